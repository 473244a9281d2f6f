"""`python -m benchmarks.chains`: what several chains in a round bring, and what they cost.

Under k-SEQ, beside one chain, and beside trees under Gumbel coupling. The embedded pair at temperature 1, all
ways on the same prompts.

- `counts`: tokens a round. Only counts matter, so the machine may be busy.
- `rates`: tokens/s of one stream, in turns with plain decoding and with the draft as it is by default.
- `paced`: the same beside a larger target.
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
from typing import Any, NamedTuple

from benchmarks import trees
from benchmarks.bars import Bar, Report, machine
from specwire import Client, Completion, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig

KSEQ = SamplingParams(rule=Rule.KSEQ, ignore_eos=True)
GUMBEL = replace(KSEQ, rule=Rule.GUMBEL)
LENGTHS = (4, 8)
NUMS_CHAINS = (1, 2, 4, 8)
NUM_CHAINS = 4
"""What a request under k-SEQ has by itself: where trees are beside them, and tokens/s are measured."""
TREES = [trees.Shape(num_nodes, depth) for num_nodes in (16, 32) for depth in LENGTHS]
PASS_MS = 60
"""Of a target whose pass costs the same for all of these tokens: the embedded one, which sleeps meanwhile."""
SETTLING_TOKENS, SETTLING_TOKENS_PACED = 500, 160
LEAST_OF_ONE = 1.1
LEAST_OF_PLAIN, LEAST_PACED = 0.98, 1.5


class Way(NamedTuple):
    """How tokens/s are measured; `default` names the way without several chains."""

    params: SamplingParams
    default: str


BLOCK_CHOSEN, COUPLED_CHOSEN = "block verification", "Gumbel coupling"
WAYS = {
    "plain": Way(replace(GUMBEL, num_draft_tokens=0), COUPLED_CHOSEN),
    BLOCK_CHOSEN: Way(replace(KSEQ, rule=Rule.BLOCK), BLOCK_CHOSEN),
    f"k-SEQ, {NUM_CHAINS} chains of 4": Way(replace(KSEQ, num_draft_tokens=4), BLOCK_CHOSEN),
    f"k-SEQ, {NUM_CHAINS} chains, chosen": Way(KSEQ, BLOCK_CHOSEN),
    COUPLED_CHOSEN: Way(GUMBEL, COUPLED_CHOSEN),
    "tree of 16, depth 8": Way(trees.Shape(16, 8).of(GUMBEL), COUPLED_CHOSEN),
}
"""In turns. Lengths that are not named are those that the coordinator chooses."""
CHOSEN = [way for way in WAYS if way.endswith("chosen")]


def counts(num_prompts: int, num_tokens: int) -> dict[str, list[float]]:
    """By way: tokens a round, the share of rounds that accept a first draft token, and draft tokens."""
    prompts, found = trees.cut_prompts(num_prompts), dict[str, list[float]]()
    for num_chains in NUMS_CHAINS:
        with Stack(_several(trees.EMBEDDED, num_chains)) as stack:
            for way, params in _counted(num_chains).items():
                given = replace(params, max_tokens=num_tokens)
                done = asyncio.run(trees.generate_all(stack.address, prompts, given))
                found[way] = [trees.tokens_a_round(done), *_of_first_and_all(done)]
                print(way, found[way], flush=True)
    return found


def _counted(num_chains: int) -> dict[str, SamplingParams]:
    ways = {f"k-SEQ, {num_chains} of {length}": replace(KSEQ, num_draft_tokens=length) for length in LENGTHS}
    if num_chains == NUM_CHAINS:
        ways |= {str(shape): shape.of(GUMBEL) for shape in TREES}
    return ways


def _several(config: UpConfig, num_chains: int) -> UpConfig:
    """How many chains k-SEQ has is for the server to say."""
    given = {"method": "draft_model", "selection": "kseq", "num_chains": num_chains}
    return replace(config, speculative_config=json.dumps(given))


def _of_first_and_all(done: Sequence[Completion]) -> tuple[float, float]:
    """How often the first draft token was accepted, and draft tokens a round."""
    each = [one.speculation for one in done]
    first = sum(s.accepted_per_position[0] for s in each) / sum(s.drafted_per_position[0] for s in each)
    return first, sum(s.num_draft_tokens for s in each) / sum(sum(s.acceptance_histogram) for s in each)


def rates(config: UpConfig, num_runs: int, num_tokens: int, num_settling: int) -> dict[str, list[float]]:
    """By way: tokens/s of one stream, over plain decoding and over its default; medians,
    after so many tokens of each way that chooses lengths."""
    prompts = trees.cut_prompts(num_runs)
    runs: dict[str, list[float]] = {way: [] for way in WAYS}
    with Stack(config) as stack, Client(stack.address) as client:
        for way in WAYS.values():
            if way.params.num_draft_tokens is None:
                settling = replace(way.params, seed=_seed(way.params, 0), max_tokens=num_settling)
                client.generate(params=settling, prompt_token_ids=prompts[0])
        for number, prompt in enumerate(prompts):
            for name, way in WAYS.items():
                given = replace(way.params, seed=_seed(way.params, number), max_tokens=num_tokens)
                done = client.generate(params=given, prompt_token_ids=prompt)
                runs[name].append(num_tokens / done.timing.total_ms * 1e3)

    def over(way: str, other: str) -> float:
        return median(map(truediv, runs[way], runs[other]))

    return {name: [median(runs[name]), over(name, "plain"), over(name, WAYS[name].default)] for name in WAYS}


def _seed(params: SamplingParams, number: int) -> int | None:
    """Gumbel coupling only: so plain decoding and trees write the same text."""
    return number if params.rule is Rule.GUMBEL else None


def main() -> None:
    """Measure the parts that are asked for; the report has the latest of all that were measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chains", description=__doc__)
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
    measured = {part: {"machine": facts, "found": measure[part]()} for part in args.parts or measure}
    print(_report(_earlier(args.out) | measured, facts).write(args.out))


def _report(parts: Mapping[str, Any], facts: Mapping[str, str]) -> Report:
    """Of all parts that are known, in the usual order."""
    known = {part: parts[part]["found"] for part in _BARS if part in parts}
    about = (
        "Embedded pair in float32, temperature 1. Tokens a round: accepted ones and the one after them, 8 "
        "streams; draft tokens: those that the target runs, as chains share what coincides. Tokens/s: "
        "one stream, in turns, medians, and of the ratios to plain decoding of a prompt and to one chain or "
        f"tree of chosen lengths: {BLOCK_CHOSEN} for k-SEQ, {COUPLED_CHOSEN} for trees."
    )
    return Report(
        name="chains",
        title="Several chains",
        machine=facts,
        about=about,
        bars=[bar for part in known for bar in _BARS[part](known[part])],
        details="\n\n".join(_TABLES[part](known[part]) for part in known),
        data={"parts": parts},
    )


def _earlier(out: Path) -> dict[str, Any]:
    """Parts of the report that is there."""
    path = out / "chains.json"
    return json.loads(path.read_text())["parts"] if path.exists() else {}


def _bar(what: str, measured: float, limit: float) -> Bar:
    return Bar(what=what, measured=measured, limit=limit, at_least=True)


def _bars_of_counts(found: Mapping[str, Sequence[float]]) -> list[Bar]:
    return [
        _bar(
            f"tokens a round of k-SEQ, {NUM_CHAINS} of {length}, over one of {length}",
            found[f"k-SEQ, {NUM_CHAINS} of {length}"][0] / found[f"k-SEQ, 1 of {length}"][0],
            LEAST_OF_ONE,
        )
        for length in LENGTHS
    ]


def _bars_of_rates(found: Mapping[str, Sequence[float]]) -> list[Bar]:
    return [_bar(f"tokens/s of {way}, over plain", found[way][1], LEAST_OF_PLAIN) for way in CHOSEN]


def _bars_of_paced(found: Mapping[str, Sequence[float]]) -> list[Bar]:
    what = f"over plain, passes of {PASS_MS} ms"
    return [_bar(f"tokens/s of {way}, {what}", found[way][1], LEAST_PACED) for way in CHOSEN]


def _table_of_counts(found: Mapping[str, Sequence[float]]) -> str:
    head = ["", "tokens a round", "first token accepted", "draft tokens a round"]
    return trees.table(head, [[way, *figures] for way, figures in found.items()])


def _table_of_rates(found: Mapping[str, Sequence[float]]) -> str:
    head = ["", "tokens/s", "× plain", "× default"]
    return trees.table(head, [[way, *figures] for way, figures in found.items()])


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
