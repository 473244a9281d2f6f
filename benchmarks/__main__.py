"""`python -m benchmarks`: specwire against transformers, one stream and many, one machine, one run.

Two targets, both with the embedded draft: the embedded target in float32, and the same function widened
to about 250 million parameters in bfloat16, whose passes cost what a real model's do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import curve, single, widen
from benchmarks.curve import Curve
from benchmarks.echo import EchoPair
from benchmarks.names import NO_SPECULATION, SPECWIRE
from benchmarks.peers import Peer
from benchmarks.prompts import PROMPTS, own_tokenizer, python_windows
from benchmarks.report import RESULTS, machine, say
from benchmarks.single import Comparison, Plan
from benchmarks.systems import (
    CONSTANT_TOKENS,
    AssistedOneByOne,
    ContinuousBatching,
    SpecwireStreams,
    SpecwireSystem,
    System,
    connect,
    transformers_systems,
)
from specwire import Client, embedded
from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig
from specwire.core import ModelInfo

CACHE = Path("build/benchmarks")
TEMPERATURES = (0.0, 1.0)
DRAFT_DTYPE = "float32"
"""On a CPU the small draft is faster in float32 than in bfloat16, for every system."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model to measure on, and how much: with one stream, and with many."""

    name: str
    source: Path
    dtype: str
    num_threads: int
    plan: Plan
    streams_plan: curve.Plan


def main(argv: list[str] | None = None) -> int:
    """Measure, print the tables, write the files."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few prompts, repetitions, tokens and streams")
    parser.add_argument("--only", choices=("single", "curve"), help="one stream, or many, instead of both")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(argv)
    facts = machine()
    targets = _targets(args.quick)
    if args.only != "curve":
        with EchoPair() as echo:
            comparisons = [comparison for target in targets for comparison in compare(target, echo)]
        print(single.report(facts, comparisons).write(args.out))
    if args.only != "single":
        curves = [measure_curve(target) for target in targets]
        print(curve.report(facts, curves).write(args.out))
    return 0


def compare(target: Target, echo: EchoPair) -> list[Comparison]:
    """All systems on one target; their processes live only as long."""
    say(f"{target.name}: starting")
    with (
        _peer(target) as peer,
        Stack(_config(target)) as stack,
        Client(stack.address) as client,
    ):
        systems: list[System] = [
            *transformers_systems(peer),
            SpecwireSystem(NO_SPECULATION, client, 0),
            SpecwireSystem(SPECWIRE, client, None),
        ]
        single.warm_up(systems, target.plan, TEMPERATURES)
        name = _title(target, client.get_model_info()[0])
        return [
            single.compare(name, temperature, systems, target.plan, echo, say) for temperature in TEMPERATURES
        ]


def measure_curve(target: Target) -> Curve:
    """All systems on one target, with every number of streams; their processes live only as long."""
    say(f"{target.name}, many streams: starting")
    plan = target.streams_plan
    prompts = python_windows(plan.num_windows)
    with (
        _peer(target) as peer,
        Stack(_config(target)) as stack,
        connect(stack.address) as connection,
    ):
        ours = [
            SpecwireStreams(SPECWIRE, connection, None, own_prompts=False),
            SpecwireStreams(NO_SPECULATION, connection, 0, own_prompts=True),
        ]
        batching = ContinuousBatching(peer)
        exact = target.dtype == "float32"
        identical = curve.compare_texts([*ours, batching], plan, prompts, exact=exact)
        assisted = _assisted(peer, plan, prompts)
        info, _ = connection.runner.run(connection.client.get_model_info())
        return Curve(
            target=target.name,
            title=_title(target, info),
            num_tokens=plan.num_tokens,
            assisted_setting=assisted.setting,
            num_compared=max(plan.num_streams),
            identical=identical,
            series=curve.measure([*ours, assisted, batching], plan, prompts, say),
        )


def _assisted(peer: Peer, plan: curve.Plan, prompts: Sequence[Sequence[int]]) -> AssistedOneByOne:
    """transformers' better setting for this target, after a warm-up of both."""
    constant, most = CONSTANT_TOKENS, plan.least_requests
    candidates = [
        AssistedOneByOne("its defaults (20 guesses, cut at a confidence of 0.4)", peer, most),
        AssistedOneByOne(f"a constant {constant} guesses", peer, most, num_assistant_tokens=constant),
    ]
    for candidate in candidates:
        candidate.run(prompts[:1], plan.num_tokens)
    return min(candidates, key=lambda candidate: candidate.run(prompts, plan.num_tokens).elapsed_s)


def _peer(target: Target) -> Peer:
    return Peer(target.source, embedded.DRAFT_DIR, target.dtype, DRAFT_DTYPE, target.num_threads)


def _title(target: Target, info: ModelInfo) -> str:
    return f"{target.name} target ({info.num_parameters / 1e6:.0f} M, {target.dtype})"


def _config(target: Target) -> UpConfig:
    return UpConfig(
        target=str(target.source),
        draft=str(embedded.DRAFT_DIR),
        dtype=target.dtype,
        draft_dtype=DRAFT_DTYPE,
        address="127.0.0.1:0",
        num_threads=target.num_threads,
    )


def _targets(quick: bool) -> list[Target]:
    prompts = [own_tokenizer().encode(prompt) for prompt in PROMPTS]
    if quick:
        small = wide = Plan(num_repetitions=2, num_tokens=24, prompts=prompts[:2], num_echoes=100)
        small_streams = wide_streams = curve.Plan(
            num_streams=(1, 4), num_repetitions=2, num_tokens=16, least_requests=2
        )
    else:
        small = Plan(num_repetitions=5, num_tokens=128, prompts=prompts)
        wide = Plan(num_repetitions=5, num_tokens=48, prompts=prompts)
        small_streams = curve.Plan(num_repetitions=3, num_tokens=64, least_requests=8)
        wide_streams = curve.Plan(num_repetitions=3, num_tokens=64, least_requests=4)
    say("widening the target (once)")
    widened = widen.cached(embedded.TARGET_DIR, widen.SHAPE_250M, torch.bfloat16, CACHE)
    return [
        Target(
            name="embedded",
            source=embedded.TARGET_DIR,
            dtype="float32",
            num_threads=1,
            plan=small,
            streams_plan=small_streams,
        ),
        Target(
            name="widened",
            source=widened,
            dtype="bfloat16",
            num_threads=os.cpu_count() or 1,
            plan=wide,
            streams_plan=wide_streams,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
