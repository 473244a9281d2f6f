"""`python -m benchmarks.ahead`: how much of the draft and of its network can be hidden.

Emulated devices in processes of their own (target 30 ms a pass, draft 2 ms a step), a delay proxy in front of
the draft. Rounds of lockstep are compared with the closed form of Leviathan et al. (2023), prepared outcomes
with lockstep, seed by seed, and chosen lengths with plain decoding.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bars import Bar, Report, machine
from specwire import Client, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig

TARGET_MS, DRAFT_MS, RUNNER_UP = 30.0, 2.0, 0.55
FAR_MS = 20.0
PROMPT = [1, 2, 3]
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "gumbel": {"rule": Rule.GUMBEL},
    "rejection": {"rule": Rule.REJECTION},
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One generation.

    Attributes:
        usual_round_ms: median time between chunks; where most rounds hit, that of a hit.
    """

    tokens_per_s: float
    round_ms: float
    usual_round_ms: float
    acceptance_length: float
    hit_rate: float


def config(alpha: float, num_draft_tokens: str, num_outcomes: str, rtt_ms: float) -> UpConfig:
    """Three services on emulated devices."""
    return UpConfig(
        target=f"emulated:step_ms={TARGET_MS:g}",
        draft=f"emulated:step_ms={DRAFT_MS:g},alpha={alpha:g},runner_up={RUNNER_UP:g}",
        num_draft_tokens=num_draft_tokens,
        num_outcomes=num_outcomes,
        draft_rtt_ms=rtt_ms,
        address="127.0.0.1:0",
        grace_s=0.0,
    )


def measure(up: UpConfig, rule: str, lengths: Sequence[int]) -> list[Point]:
    """A generation of each length, with seeds 1, 2, ..., after a short one that is not counted."""
    with Stack(up) as stack, Client(stack.address) as client:
        client.generate(params=SamplingParams(max_tokens=16, **RULES[rule]), prompt_token_ids=PROMPT)
        return [
            _generate(client, SamplingParams(max_tokens=length, seed=seed, **RULES[rule]))
            for seed, length in enumerate(lengths, start=1)
        ]


def _generate(client: Client, params: SamplingParams) -> Point:
    times_s = []
    with client.stream(params=params, prompt_token_ids=PROMPT) as stream:
        for _ in stream:
            times_s.append(time.perf_counter())
    done = stream.completion
    gaps_ms = [(later - sooner) * 1e3 for sooner, later in pairwise(times_s)]
    return Point(
        tokens_per_s=len(done.token_ids) / done.timing.total_ms * 1e3,
        round_ms=done.timing.total_ms / done.speculation.num_rounds,
        usual_round_ms=median(gaps_ms),
        acceptance_length=done.speculation.mean_acceptance_length,
        hit_rate=done.speculation.hit_rate,
    )


# --- the parts ------------------------------------------------------------------------------------


def lockstep(num_tokens: int) -> tuple[list[Bar], str, Any]:
    """Neighbours, nothing prepared: against tokens a round over (draft steps and a pass)."""
    rows, bars = [], []
    for alpha in (0.5, 0.7, 0.8, 0.9):
        for gamma in (1, 3, 5, 8):
            points = measure(config(alpha, str(gamma), "0", 0.0), "rejection", [num_tokens] * 3)
            ideal_ms = TARGET_MS + gamma * DRAFT_MS
            share = median(ideal_ms / point.round_ms for point in points)
            rows.append([alpha, gamma, ideal_ms, median(point.round_ms for point in points), share])
    worst = min(rows, key=lambda row: row[-1])
    what = f"lockstep over the closed form, worst (alpha {worst[0]}, {worst[1]} draft tokens)"
    bars.append(Bar(what=what, measured=worst[-1], limit=0.92, at_least=True))
    middle, what = median(row[-1] for row in rows), f"the same, median of {len(rows)} points"
    bars.append(Bar(what=what, measured=middle, limit=0.93, at_least=True))
    head = ["alpha", "draft tokens", "ideal round (ms)", "round (ms)", "share of the closed form"]
    return bars, _table(head, rows), rows


def far(num_tokens: int) -> tuple[list[Bar], str, Any]:
    """A draft 20 ms away: prepared outcomes against lockstep, the same seeds, in turns."""
    rows: list[tuple[str, int, float, float, float, float, float]] = []
    bars = []
    for rule in RULES:
        for gamma in (3, 4):
            off = measure(config(0.8, str(gamma), "0", FAR_MS), rule, [num_tokens] * 3)
            on = measure(config(0.8, str(gamma), "32", FAR_MS), rule, [num_tokens] * 3)
            gain = median(a.tokens_per_s / b.tokens_per_s for a, b in zip(on, off, strict=True))
            hit_ms = median(point.usual_round_ms for point in on)
            rows.append(
                (
                    rule,
                    gamma,
                    median(p.tokens_per_s for p in off),
                    median(p.tokens_per_s for p in on),
                    gain,
                    median(p.hit_rate for p in on),
                    hit_ms,
                )
            )
    for rule in ("greedy", "gumbel"):
        best = max((row for row in rows if row[0] == rule), key=lambda row: row[3])
        bars.append(
            Bar(what=f"{rule}, 20 ms away, over lockstep", measured=best[4], limit=1.6, at_least=True)
        )
        bars.append(
            Bar(what=f"{rule}, a round that hits over a pass", measured=best[6] / TARGET_MS, limit=1.1)
        )
    slowest = min(row[4] for row in rows if row[0] == "rejection")
    bars.append(Bar(what="rejection, 20 ms away, over lockstep", measured=slowest, limit=1.0, at_least=True))
    head = ["rule", "draft tokens", "lockstep (tokens/s)", "prepared", "gain", "hit rate", "usual round (ms)"]
    return bars, _table(head, rows), rows


def chosen(num_tokens: int) -> tuple[list[Bar], str, Any]:
    """Lengths and outcomes chosen, against plain decoding: never slower, whatever the draft and the distance.

    The first half of the tokens, in which it learns, is shown apart.
    """
    rows = []
    plain = measure(config(0.5, "0", "0", 0.0), "greedy", [200])[0].tokens_per_s
    for alpha in (0.1, 0.5, 0.8, 0.95):
        for rtt_ms in (0.0, 5.0, 20.0, 80.0):
            first, second = measure(config(alpha, "auto", "auto", rtt_ms), "greedy", [num_tokens] * 2)
            rows.append([alpha, rtt_ms, first.tokens_per_s / plain, second.tokens_per_s / plain])
    worst = min(rows, key=lambda row: row[-1])
    what = f"chosen over plain decoding, worst (alpha {worst[0]}, {worst[1]:g} ms)"
    bars = [Bar(what=what, measured=worst[-1], limit=0.98, at_least=True)]
    head = ["alpha", "round trip (ms)", "over plain, while it learns", "over plain, then"]
    return bars, _table(head, rows), rows


PARTS = {"lockstep": (lockstep, 120), "far": (far, 200), "chosen": (chosen, 600)}


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measure all parts, or one, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ahead", description=__doc__)
    parser.add_argument("--only", choices=list(PARTS), action="append", help="leave out the other parts")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    bars: list[Bar] = []
    details, data = [], {}
    for name in args.only or PARTS:
        part, num_tokens = PARTS[name]
        found, table, data[name] = part(num_tokens)
        bars += found
        details.append(f"## {name.capitalize()}\n\n{str(part.__doc__).splitlines()[0]}\n\n{table}")
        print(details[-1], flush=True)
    result = Report(
        name="ahead",
        title="The draft ahead of the target",
        machine=facts,
        about=f"Emulated devices: target {TARGET_MS:g} ms a pass, draft {DRAFT_MS:g} ms a step; where the "
        f"target's token is not the draft's first choice, it is the next with probability {RUNNER_UP:g}.",
        bars=bars,
        details="\n\n".join(details),
        data=data,
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
