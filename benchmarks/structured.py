"""`python -m benchmarks.structured`: what grammars cost, and what they do to acceptance.

The embedded draft with the embedded target widened to 254 M parameters, Gumbel coupling, some streams at
a time; ways in turns, after a first run of each that does not count.

- `all text`: an expression that every text matches, so the texts are those without a grammar, token by token:
  the difference in tokens/s is what masks cost.
- `schema`: an object with strings, numbers and a list, whose texts are others.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import truediv
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks import trees, widen
from benchmarks.bars import Bar, Report, machine
from specwire import AsyncClient, Completion, Grammar, Rule, SamplingParams, embedded
from specwire.cli.supervisor import Stack

CACHE = Path("build/benchmarks")
PLAIN, ALL_TEXT, SCHEMA = "without", "all text", "schema"
OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 24},
        "kind": {"enum": ["function", "class", "module"]},
        "line": {"type": "integer", "minimum": 1, "maximum": 99999},
        "arguments": {
            "type": "array",
            "items": {"type": "string", "maxLength": 16},
            "minItems": 4,
            "maxItems": 8,
        },
        "summary": {"type": "string", "minLength": 40, "maxLength": 80},
    },
    "required": ["name", "kind", "line", "arguments", "summary"],
}
GRAMMARS = {PLAIN: None, ALL_TEXT: Grammar(regex=r"[\s\S]*"), SCHEMA: Grammar(json_schema=OBJECT)}
NUM_DRAFT_TOKENS = 4
LEAST_RATE, LEAST_ACCEPTANCE = 0.9, 1.0


class Run(NamedTuple):
    """All streams once: their tokens a second, and tokens a round."""

    rate: float
    acceptance_len: float


def measure(num_streams: int, num_runs: int, num_tokens: int) -> dict[str, list[Run]]:
    """By way."""
    target = widen.cached(embedded.TARGET_DIR, widen.SHAPE_250M, torch.bfloat16, CACHE)
    config = replace(trees.EMBEDDED, target=str(target), draft=str(embedded.DRAFT_DIR), dtype="bfloat16")
    prompts = trees.cut_prompts(num_streams)
    runs: dict[str, list[Run]] = {way: [] for way in GRAMMARS}
    with Stack(config) as stack:
        for number in range(num_runs + 1):
            for way, grammar in GRAMMARS.items():
                params = SamplingParams(
                    rule=Rule.GUMBEL,
                    grammar=grammar,
                    num_draft_tokens=NUM_DRAFT_TOKENS,
                    max_tokens=num_tokens,
                )
                run = _run(stack.address, prompts, params)
                print(number, way, run, flush=True)
                if number:
                    runs[way].append(run)
    return runs


def _run(address: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Run:
    """Seeds are those of the prompts' places, so texts repeat."""
    started_s = time.perf_counter()
    done = asyncio.run(_generate(address, prompts, params))
    elapsed_s = time.perf_counter() - started_s
    return Run(sum(len(one.token_ids) for one in done) / elapsed_s, trees.tokens_a_round(done))


async def _generate(
    address: str, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[Completion]:
    async with AsyncClient(address) as client:
        each = (replace(params, seed=seed) for seed in range(len(prompts)))
        asked = zip(each, prompts, strict=True)
        return await asyncio.gather(*(client.generate(params=p, prompt_token_ids=ids) for p, ids in asked))


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured", description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5, help="of each way")
    parser.add_argument("--tokens", type=int, default=96, help="most of each generation")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    print(_report(measure(args.streams, args.runs, args.tokens), args.streams, facts).write(args.out))


def _report(runs: Mapping[str, Sequence[Run]], num_streams: int, facts: Mapping[str, str]) -> Report:
    rates = {way: [run.rate for run in of_way] for way, of_way in runs.items()}
    lens = {way: median(run.acceptance_len for run in of_way) for way, of_way in runs.items()}
    over = {way: median(map(truediv, of_way, rates[PLAIN])) for way, of_way in rates.items()}
    return Report(
        name="structured",
        title="Structured output",
        machine=facts,
        about=f"{num_streams} streams, the widened target in bfloat16, {NUM_DRAFT_TOKENS} draft tokens a "
        "round, Gumbel coupling at temperature 1. Medians; ratios are of runs in turns.",
        bars=[
            Bar(
                what="tokens/s where all text is allowed, over those without a grammar",
                measured=over[ALL_TEXT],
                limit=LEAST_RATE,
                at_least=True,
            ),
            Bar(
                what="tokens a round with a schema, over those without",
                measured=lens[SCHEMA] / lens[PLAIN],
                limit=LEAST_ACCEPTANCE,
                at_least=True,
            ),
        ],
        details=trees.table(
            ["grammar", "tokens/s", "over without", "tokens a round"],
            [[way, f"{median(rates[way]):.1f}", f"{over[way]:.3f}", f"{lens[way]:.2f}"] for way in runs],
        ),
        data={way: [run._asdict() for run in of_way] for way, of_way in runs.items()},
    )


if __name__ == "__main__":
    main()
