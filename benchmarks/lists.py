"""`python -m benchmarks.lists`: what several lists of Gumbel noise bring, beside trees and k-SEQ.

The embedded pair at temperature 1, all ways on the same prompts. Tokens a round first: only counts matter
there, so the machine may be busy. Then tokens/s of one stream, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import kseq, trees
from benchmarks.bars import Bar, Report, machine
from specwire import Client, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.config.services import UpConfig

LISTS = SamplingParams(rule=Rule.GUMBEL, ignore_eos=True)
KSEQ = replace(LISTS, rule=Rule.KSEQ)
LENGTHS = (4, 8)
NUMS_LISTS = (1, 2, 4, 8)
NUM_LISTS = 4
"""Where tokens/s are measured."""


def several(num_lists: int, length: int | None) -> SamplingParams:
    """As many chains."""
    return replace(LISTS, num_lists=num_lists, num_draft_tokens=length)


def tree(num_nodes: int, depth: int) -> SamplingParams:
    """Of one list, whose noise the draft shares."""
    return replace(LISTS, num_draft_tokens=num_nodes, max_depth=depth)


COUNTED = (
    {f"{num} lists, {length} tokens": several(num, length) for num in NUMS_LISTS for length in LENGTHS}
    | {f"tree of 16, depth {depth}": tree(16, depth) for depth in LENGTHS}
    | {f"tree of 32, depth {depth}": tree(32, depth) for depth in LENGTHS}
    | {f"k-SEQ, 4 chains of {length}": replace(KSEQ, num_draft_tokens=length) for length in LENGTHS}
)
TIMED = {
    "plain": replace(LISTS, num_draft_tokens=0),
    f"plain, {NUM_LISTS} lists": several(NUM_LISTS, 0),
    "default": LISTS,
    **{f"{NUM_LISTS} lists, {length} tokens": several(NUM_LISTS, length) for length in LENGTHS},
    f"{NUM_LISTS} lists, chosen": several(NUM_LISTS, None),
    "tree of 16, depth 8": tree(16, 8),
    "k-SEQ, 4 chains of 4": replace(KSEQ, num_draft_tokens=4),
}
"""In turns. Shapes and lengths of `default`, lengths of `chosen` are those that the coordinator chooses."""
LEAST_OF_ONE = 1.05
LEAST_OF_PLAIN = 0.98
LEAST_PACED = 1.5
PASS_MS = 60
"""Of a target whose pass costs the same for all of these tokens: the embedded one, which sleeps meanwhile."""
SETTLING_TOKENS, SETTLING_TOKENS_PACED = 500, 160


def counts(num_prompts: int, num_tokens: int) -> dict[str, list[float]]:
    """By way: tokens a round, the share of rounds that accept a first draft token, and draft tokens."""
    prompts, found = trees.cut_prompts(num_prompts), dict[str, list[float]]()
    with Stack(trees.EMBEDDED) as stack:
        for way, params in COUNTED.items():
            given = replace(params, max_tokens=num_tokens)
            done = asyncio.run(trees.generate_all(stack.address, prompts, given))
            figures = kseq.first_accepted(done), kseq.draft_tokens_a_round(done)
            found[way] = [trees.tokens_a_round(done), *figures]
            print(way, found[way], flush=True)
    return found


def rates(config: UpConfig, num_runs: int, num_tokens: int, num_settling: int) -> dict[str, list[float]]:
    """Tokens/s of one stream and their ratio to plain decoding, each way, medians, after so many tokens of
    the ways that choose lengths."""
    prompts = trees.cut_prompts(num_runs)
    runs: dict[str, list[float]] = {way: [] for way in TIMED}
    with Stack(config) as stack, Client(stack.address) as client:
        for params in TIMED.values():
            if params.num_draft_tokens is None:
                settling = replace(params, max_tokens=num_settling)
                client.generate(params=settling, prompt_token_ids=prompts[0])
        for seed, prompt in enumerate(prompts):
            for way, params in TIMED.items():
                given = replace(params, seed=seed, max_tokens=num_tokens)
                done = client.generate(params=given, prompt_token_ids=prompt)
                runs[way].append(num_tokens / done.timing.total_ms * 1e3)
    over_plain = {way: [*map(truediv, of_way, runs["plain"])] for way, of_way in runs.items()}
    return {way: [median(of_way), median(over_plain[way])] for way, of_way in runs.items()}


def main() -> None:
    """Measure the parts that are asked for; the report has the latest of all that were measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lists", description=__doc__)
    parser.add_argument("parts", nargs="*", help="counts, rates, paced; all by default")
    parser.add_argument("--prompts", type=int, default=16, help="of `counts`")
    parser.add_argument("--tokens", type=int, default=96, help="of each generation")
    parser.add_argument("--runs", type=int, default=5, help="of each way, in `rates` and `paced`")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    paced = replace(trees.EMBEDDED, least_pass_ms=PASS_MS)
    measure: dict[str, Callable[[], Any]] = {
        "counts": lambda: counts(args.prompts, args.tokens),
        "rates": lambda: rates(trees.EMBEDDED, args.runs, args.tokens, SETTLING_TOKENS),
        "paced": lambda: rates(paced, args.runs, args.tokens, SETTLING_TOKENS_PACED),
    }
    found = _earlier(args.out) | {part: measure[part]() for part in args.parts or measure}
    about = (
        "Embedded pair in float32, temperature 1. Tokens a round: accepted ones and the one after them, 8 "
        "streams; draft tokens: those that the target runs, as chains share what coincides. Trees are of one "
        "list. Tokens/s: one stream, medians, in turns, and of the ratio to plain decoding of a prompt."
    )
    result = Report(
        name="lists",
        title="Several lists of noise",
        machine=facts,
        about=about,
        bars=[bar for part in measure if part in found for bar in _BARS[part](found[part])],
        details="\n\n".join(_TABLES[part](found[part]) for part in measure if part in found),
        data=found,
    )
    print(result.write(args.out))


def _earlier(out: Path) -> dict[str, Any]:
    """Parts of the report that is there."""
    path = out / "lists.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    return {part: known[part] for part in _TABLES if part in known}


def _bar(what: str, measured: float, limit: float) -> Bar:
    return Bar(what=what, measured=measured, limit=limit, at_least=True)


def _bars_of_counts(found: Mapping[str, Sequence[float]]) -> list[Bar]:
    return [
        _bar(
            f"tokens a round of {NUM_LISTS} lists over one, {length} tokens",
            found[f"{NUM_LISTS} lists, {length} tokens"][0] / found[f"1 lists, {length} tokens"][0],
            LEAST_OF_ONE,
        )
        for length in LENGTHS
    ]


def _bars_of_rates(found: Mapping[str, Sequence[float]]) -> list[Bar]:
    way = f"{NUM_LISTS} lists, chosen"
    return [_bar(f"tokens/s of {way}, over plain", found[way][1], LEAST_OF_PLAIN)]


def _bars_of_paced(found: Mapping[str, Sequence[float]]) -> list[Bar]:
    way = f"{NUM_LISTS} lists, chosen"
    return [_bar(f"tokens/s of {way}, over plain, passes of {PASS_MS} ms", found[way][1], LEAST_PACED)]


def _table_of_counts(found: Mapping[str, Sequence[float]]) -> str:
    head = ["", "tokens a round", "first token accepted", "draft tokens a round"]
    return trees.table(head, [[way, *figures] for way, figures in found.items()])


def _table_of_rates(found: Mapping[str, Sequence[float]]) -> str:
    return trees.table(["", "tokens/s", "× plain"], [[way, *figures] for way, figures in found.items()])


def _table_of_paced(found: Mapping[str, Sequence[float]]) -> str:
    head = f"A target whose pass takes {PASS_MS} ms, for one token and for all of these alike:"
    return f"{head}\n\n{_table_of_rates(found)}"


_BARS: dict[str, Callable[[Any], list[Bar]]] = {
    "counts": _bars_of_counts,
    "rates": _bars_of_rates,
    "paced": _bars_of_paced,
}
_TABLES: dict[str, Callable[[Any], str]] = {
    "counts": _table_of_counts,
    "rates": _table_of_rates,
    "paced": _table_of_paced,
}


if __name__ == "__main__":
    main()
