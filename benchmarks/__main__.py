"""`python -m benchmarks`: one stream of specwire against transformers, one machine, one run.

Two targets, both with the embedded draft: the embedded target in float32, and the same function widened
to about 250 million parameters in bfloat16, whose passes cost what a real model's do.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import measure, report, volume, widen
from benchmarks.echo import EchoPair
from benchmarks.measure import Comparison, Plan
from benchmarks.peers import Peer
from benchmarks.prompts import PROMPTS
from benchmarks.systems import (
    ASSISTED,
    ASSISTED_CONSTANT,
    CONSTANT_TOKENS,
    NO_SPECULATION,
    PLAIN,
    SPECWIRE,
    SpecwireSystem,
    System,
    TransformersSystem,
)
from specwire import Client, embedded, tokenizer
from specwire.config import UpConfig
from specwire.supervisor import Stack

CACHE = Path("build/benchmarks")
TEMPERATURES = (0.0, 1.0)
DRAFT_DTYPE = "float32"
"""On a CPU the small draft is faster in float32 than in bfloat16, for every system."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model to measure on, and how much."""

    name: str
    source: Path
    dtype: str
    num_threads: int
    plan: Plan


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, write the files."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two prompts, two repetitions, few tokens")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args(argv)
    facts = report.machine()
    targets = _targets(args.quick)
    with EchoPair() as echo:
        comparisons = [comparison for target in targets for comparison in compare(target, echo)]
    _say("bytes a round")
    results = report.Results(
        machine=facts,
        assisted_tokens=CONSTANT_TOKENS,
        comparisons=comparisons,
        volumes=volume.measure(_config(targets[0]), targets[0].plan),
        synthetic_bytes=volume.synthetic(),
    )
    print(report.write(results, args.out))
    return 0


def compare(target: Target, echo: EchoPair) -> list[Comparison]:
    """All systems on one target; their processes live only as long."""
    _say(f"{target.name}: starting")
    with (
        Peer(target.source, embedded.DRAFT_DIR, target.dtype, DRAFT_DTYPE, target.num_threads) as peer,
        Stack(_config(target)) as stack,
        Client(stack.address) as client,
    ):
        systems = _systems(peer, client)
        measure.warm_up(systems, target.plan, TEMPERATURES)
        size = client.get_model_info()[0].num_parameters / 1e6
        name = f"{target.name} target ({size:.0f} M, {target.dtype})"
        return [
            measure.compare(name, temperature, systems, target.plan, echo, _say)
            for temperature in TEMPERATURES
        ]


def _systems(peer: Peer, client: Client) -> list[System]:
    return [
        TransformersSystem(PLAIN, peer, assisted=False),
        TransformersSystem(ASSISTED, peer, assisted=True),
        TransformersSystem(ASSISTED_CONSTANT, peer, assisted=True, num_assistant_tokens=CONSTANT_TOKENS),
        SpecwireSystem(NO_SPECULATION, client, 0),
        SpecwireSystem(SPECWIRE, client, None),
    ]


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
    loaded = tokenizer.load(embedded.TARGET_DIR)
    assert loaded is not None
    prompts = [loaded.encode(prompt) for prompt in PROMPTS]
    if quick:
        small = wide = Plan(num_repetitions=2, num_tokens=24, prompts=prompts[:2], num_echoes=100)
    else:
        small = Plan(num_repetitions=5, num_tokens=128, prompts=prompts)
        wide = Plan(num_repetitions=5, num_tokens=48, prompts=prompts)
    _say("widening the target (once)")
    widened = widen.cached(embedded.TARGET_DIR, widen.SHAPE_250M, torch.bfloat16, CACHE)
    return [
        Target(name="embedded", source=embedded.TARGET_DIR, dtype="float32", num_threads=1, plan=small),
        Target(name="widened", source=widened, dtype="bfloat16", num_threads=os.cpu_count() or 1, plan=wide),
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
