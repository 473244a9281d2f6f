"""`python -m benchmarks.choice`: what is chosen by itself, beside plain decoding and fixed settings.

Real services with real models and default flags. For each point (pair, streams, rule) they start anew, and
the first requests take turns between automatic and plain, so that what is learnt is learnt from nothing. Then
all settings take turns, every other turn in reverse, since what comes later finds the machine warmer. A
machine's speed wanders within minutes: only ratios within a turn count.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import widen
from benchmarks.prompts import PROMPTS
from specwire import AsyncClient, Rule, SamplingParams, embedded
from specwire.cli.supervisor import Stack
from specwire.config.models import EMBEDDED
from specwire.config.speculative import NGRAM
from specwire.config.stack import UpConfig

CACHE = Path("build/benchmarks")
AUTO, PLAIN, SERVICE = "auto", "plain", "service"
SETTINGS: Mapping[str, dict[str, Any]] = {
    AUTO: {},
    PLAIN: {"num_draft_tokens": 0},
    **{f"{length} tokens": {"num_draft_tokens": length} for length in (2, 4, 8)},
    **{f"tree of {nodes}": {"num_draft_tokens": nodes, "max_depth": 6} for nodes in (16, 32)},
    NGRAM: {"draft": NGRAM},
    SERVICE: {},
    f"{SERVICE}, 4 tokens": {"num_draft_tokens": 4},
}
"""Where the draft is a service, it is one of another stack; else it is where it is by default."""
RULES = {
    "greedy": SamplingParams(temperature=0.0),
    "rejection": SamplingParams(rule=Rule.REJECTION),
    "gumbel": SamplingParams(rule=Rule.GUMBEL),
}
SHAPES = {"widened": widen.SHAPE_250M, "8b": widen.SHAPE_8B}
TRAINED = "trained"
"""Of the embedded pair's shape, and served as that is by default; no choice was ever tuned on it."""
TRAINED_DIR = CACHE / TRAINED
TRAINING = (
    f"python -m benchmarks.embedded.train --out {TRAINED_DIR} --seed 1 --threads 1 --target-seconds 900 "
    "--draft-seconds 480"
)
PAIRS = (EMBEDDED, *SHAPES, TRAINED)
NUM_TOKENS = 64
NUM_LEARNING_TOKENS = 1000
"""Of automatic requests; after so many it is to be as good as the best fixed setting."""


@dataclass(frozen=True)
class Point:
    """Where it is measured."""

    pair: str
    num_streams: int
    rule: str


@dataclass
class Measured:
    """Ratios of automatic over plain, turn by turn; then tokens/s of all settings, turn by turn."""

    point: Point
    learning: list[float] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)

    def over(self, setting: str) -> float:
        """Automatic over a fixed setting: the median of the ratios within a turn."""
        return statistics.median(a / b for a, b in zip(self.rates[AUTO], self.rates[setting], strict=True))

    @property
    def worst(self) -> float:
        """Automatic over plain in the worst single turn, learning ones included."""
        later = [a / b for a, b in zip(self.rates[AUTO], self.rates[PLAIN], strict=True)]
        return min(self.learning + later)

    @property
    def row(self) -> str:
        """Of a Markdown table."""
        half = len(self.learning) // 2
        halves = [statistics.median(each) for each in (self.learning[:half], self.learning[half:])]
        medians = {name: statistics.median(values) for name, values in self.rates.items()}
        best = max((name for name in medians if name != AUTO), key=lambda name: medians[name])
        cells = [*map(str, asdict(self.point).values()), ", ".join(f"{each:.2f}" for each in halves)]
        cells += [f"{self.over(PLAIN):.2f}", f"{self.worst:.2f}", f"{self.over(best):.2f} ({best})"]
        cells += [f"{medians[name]:.0f}" if name in medians else "-" for name in SETTINGS]
        return f"| {' | '.join(cells)} |"


COLUMNS = (
    *("pair", "streams", "rule", f"auto / plain, first {NUM_LEARNING_TOKENS} tokens: halves", "after them"),
    *("worst turn", "auto / best", *(f"{name}, tokens/s" for name in SETTINGS)),
)
HEADER = (f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|")


async def rate(client: AsyncClient, params: SamplingParams, num_streams: int, turn: int) -> float:
    """Tokens a second of so many requests at once, none of which finds its prompt in a cache."""
    params = replace(params, cache_salt=str(time.monotonic_ns()))
    started_s = time.monotonic()
    done = await asyncio.gather(
        *(
            client.generate(
                PROMPTS[(turn + index) % len(PROMPTS)], replace(params, seed=turn * num_streams + index)
            )
            for index in range(num_streams)
        )
    )
    return sum(len(each.token_ids) for each in done) / (time.monotonic() - started_s)


def in_turn(names: Iterable[str], turn: int) -> list[str]:
    """In reverse every other turn."""
    return list(names)[:: -1 if turn % 2 else 1]


async def measure(address: str, beside: str, point: Point, num_turns: int, others: Sequence[str]) -> Measured:
    """All turns of a point, with services that have served nothing yet.

    Args:
        beside: address of a stack whose draft is a service; it idles in the turns of the others.
        others: settings beside automatic and plain.
    """
    ruled_out = {name for name, each in SETTINGS.items() if point.rule == "rejection" and "max_depth" in each}
    names = (name for name in SETTINGS if name in {AUTO, PLAIN, *others} - ruled_out)
    found = Measured(point, rates={name: [] for name in names})
    params = replace(RULES[point.rule], max_tokens=NUM_TOKENS, ignore_eos=True)
    async with AsyncClient(address, timeout_s=600.0) as client, AsyncClient(beside, timeout_s=600.0) as other:

        async def asked(name: str, turn: int) -> float:
            served = other if name.startswith(SERVICE) else client
            return await rate(served, replace(params, **SETTINGS[name]), point.num_streams, turn)

        for turn in range(max(4, NUM_LEARNING_TOKENS // (NUM_TOKENS * point.num_streams))):
            rates = {name: await asked(name, turn) for name in in_turn((AUTO, PLAIN), turn)}
            found.learning.append(rates[AUTO] / rates[PLAIN])
            if SERVICE in found.rates:
                await asked(SERVICE, turn)
        for turn in range(num_turns):
            for name in in_turn(found.rates, turn):
                found.rates[name].append(await asked(name, turn))
    return found


def config_of(pair: str, device: str) -> UpConfig:
    """What `specwire up` is given: the models, where they run, and a port."""
    config = UpConfig(address="127.0.0.1:0", log_level="warning", device=device, draft_device=device)
    if pair == EMBEDDED:
        return config
    if pair == TRAINED:
        config = replace(config, dtype="float32", draft_dtype="float32", num_threads=1)
        return replace(config, target=str(TRAINED_DIR / "target"), draft=str(TRAINED_DIR / "draft"))
    target = widen.cached(embedded.TARGET_DIR, SHAPES[pair], torch.bfloat16, CACHE, device)
    return replace(config, target=str(target), draft=str(embedded.DRAFT_DIR))


def write(out: Path, found: Sequence[Measured]) -> None:
    """The table, and the figures beside it as JSON."""
    out.write_text("\n".join([*HEADER, *(each.row for each in found)]) + "\n")
    out.with_suffix(".json").write_text(json.dumps([asdict(each) for each in found], indent=1))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choice", description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=[*PAIRS[:2]], choices=PAIRS)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--rules", nargs="+", default=[*RULES], choices=[*RULES])
    parser.add_argument("--settings", nargs="*", default=[*SETTINGS], help="beside automatic and plain")
    parser.add_argument("--device", default="cpu", help="of target and draft")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table here, and figures beside it as JSON")
    args = parser.parse_args(argv)
    if args.out and args.out.is_dir():
        parser.error(f"--out {args.out} is a folder: name a file")
    if TRAINED in args.pairs and not (TRAINED_DIR / "evaluation.json").is_file():
        parser.error(f"{TRAINED_DIR} has no trained pair; make it with `{TRAINING}`")
    print("\n".join(HEADER), flush=True)
    found = []
    for each in itertools.product(args.pairs, args.streams, args.rules):
        point = Point(*each)
        config = config_of(point.pair, args.device)
        with Stack(config) as stack, Stack(replace(config, draft_placement="service")) as other:
            found.append(asyncio.run(measure(stack.address, other.address, point, args.turns, args.settings)))
        print(found[-1].row, flush=True)
        if args.out:
            write(args.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
