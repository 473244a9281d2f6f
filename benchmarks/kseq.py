"""`python -m benchmarks.kseq`: what several chains in a round bring, and what they cost.

The embedded pair at temperature 1. Tokens a round of 1, 2, 4 and 8 chains on the same prompts: only counts
matter there, so the machine may be busy. Then tokens/s of one stream, in turns with plain decoding and with
the draft as it is by default (block verification, chosen lengths).
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import trees
from benchmarks.bars import Bar, Report, machine
from specwire import Client, Completion, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.config.services import UpConfig

NUMS_CHAINS = (1, 2, 4, 8)
LENGTHS = (4, 8)
NUM_CHAINS = 4
"""Where tokens/s are measured."""
PARAMS = SamplingParams(rule=Rule.KSEQ, ignore_eos=True)
WAYS = {
    "plain": replace(PARAMS, num_draft_tokens=0),
    "default": replace(PARAMS, rule=Rule.BLOCK),
    **{f"{length} tokens": replace(PARAMS, num_draft_tokens=length) for length in LENGTHS},
    "chosen": PARAMS,
}
"""In turns. The last ones draft several chains, of a fixed length and of one that the coordinator chooses."""
LEAST_OF_PLAIN = 0.98
LEAST_OF_ONE = 1.1
LEAST_PACED = 2.0
PASS_MS = 60
"""Of a target whose pass costs the same for all of these tokens: the embedded one, which sleeps meanwhile."""
SETTLING_TOKENS, SETTLING_TOKENS_PACED = 500, 160


def tokens_a_round(config: UpConfig, num_prompts: int, num_tokens: int) -> dict[str, list[float]]:
    """By length: tokens a round, the share of rounds that accept a first draft token, and draft tokens."""
    prompts, found = trees.cut_prompts(num_prompts), {}
    with Stack(config) as stack:
        for length in LENGTHS:
            params = replace(PARAMS, num_draft_tokens=length, max_tokens=num_tokens)
            done = asyncio.run(trees.generate_all(stack.address, prompts, params))
            figures = trees.tokens_a_round(done), first_accepted(done), draft_tokens_a_round(done)
            found[str(length)] = [*figures]
    return found


def first_accepted(done: Sequence[Completion]) -> float:
    each = [one.speculation for one in done]
    return sum(s.accepted_per_position[0] for s in each) / sum(s.drafted_per_position[0] for s in each)


def draft_tokens_a_round(done: Sequence[Completion]) -> float:
    each = [one.speculation for one in done]
    return sum(s.num_draft_tokens for s in each) / sum(sum(s.acceptance_histogram) for s in each)


def rates(config: UpConfig, num_runs: int, num_tokens: int, num_settling: int) -> dict[str, list[float]]:
    """Tokens/s of one stream and their ratio to plain decoding, each way, medians, after so many tokens of
    the ways that choose lengths."""
    prompts = trees.cut_prompts(num_runs)
    runs: dict[str, list[float]] = {way: [] for way in WAYS}
    with Stack(config) as stack, Client(stack.address) as client:
        for way in ("default", "chosen"):
            settling = replace(WAYS[way], max_tokens=num_settling)
            client.generate(params=settling, prompt_token_ids=prompts[0])
        for prompt in prompts:
            for way, params in WAYS.items():
                done = client.generate(params=replace(params, max_tokens=num_tokens), prompt_token_ids=prompt)
                runs[way].append(num_tokens / done.timing.total_ms * 1e3)
    over_plain = {way: [*map(truediv, of_way, runs["plain"])] for way, of_way in runs.items()}
    return {way: [median(of_way), median(over_plain[way])] for way, of_way in runs.items()}


def main() -> None:
    """Measure the parts that are asked for; the report has the latest of all that were measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kseq", description=__doc__)
    parser.add_argument("parts", nargs="*", help="counts, rates, paced; all by default")
    parser.add_argument("--prompts", type=int, default=16, help="of `counts`")
    parser.add_argument("--tokens", type=int, default=96, help="of each generation")
    parser.add_argument("--runs", type=int, default=5, help="of each way, in `rates` and `paced`")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    found = _earlier(args.out)
    measure: dict[str, Callable[[UpConfig], Any]] = {
        "counts": lambda config: tokens_a_round(config, args.prompts, args.tokens),
        "rates": lambda config: rates(config, args.runs, args.tokens, SETTLING_TOKENS),
        "paced": lambda config: rates(
            replace(config, least_pass_ms=PASS_MS), args.runs, args.tokens, SETTLING_TOKENS_PACED
        ),
    }
    for part in args.parts or measure:
        found[part] = {}
        for num in NUMS_CHAINS if part == "counts" else (NUM_CHAINS,):
            given = {"method": "draft_model", "selection": "kseq", "num_chains": num}
            config = replace(trees.EMBEDDED, speculative_config=json.dumps(given))
            found[part][num] = measure[part](config)
            print(part, num, found[part][num], flush=True)
    bars = [bar for part in found for bar in _BARS[part](found[part])]
    about = (
        "Embedded pair in float32, temperature 1. Tokens a round: accepted ones and the one after them, 8 "
        "streams; draft tokens: those that the target runs, as chains share what coincides. Tokens/s: one "
        "stream, medians, in turns, and of the ratio to plain decoding of the same prompt; `default` is "
        "block verification with lengths that the coordinator chooses, `chosen` several chains likewise."
    )
    details = "\n\n".join(_TABLES[part](found[part]) for part in found)
    result = Report(
        name="kseq",
        title="Several chains",
        machine=facts,
        about=about,
        bars=bars,
        details=details,
        data=found,
    )
    print(result.write(args.out))


def _earlier(out: Path) -> dict[str, Any]:
    """Parts of the report that is there."""
    path = out / "kseq.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    return {
        part: {int(num): of_num for num, of_num in known[part].items()} for part in _TABLES if part in known
    }


def _bars_of_counts(counts: dict[int, dict[str, list[float]]]) -> list[Bar]:
    return [
        Bar(
            what=f"tokens a round of {NUM_CHAINS} chains of {length} over those of one",
            measured=counts[NUM_CHAINS][str(length)][0] / counts[1][str(length)][0],
            limit=LEAST_OF_ONE,
            at_least=True,
        )
        for length in LENGTHS
    ]


def _bars_of_rates(speeds: dict[int, dict[str, list[float]]]) -> list[Bar]:
    return [
        Bar(
            what=f"tokens/s of {num} chains, lengths chosen, over plain",
            measured=by["chosen"][1],
            limit=LEAST_OF_PLAIN,
            at_least=True,
        )
        for num, by in speeds.items()
    ]


def _bars_of_paced(speeds: dict[int, dict[str, list[float]]]) -> list[Bar]:
    return [
        Bar(
            what=f"tokens/s of {NUM_CHAINS} chains of {length} over plain, passes of {PASS_MS} ms",
            measured=speeds[NUM_CHAINS][f"{length} tokens"][1],
            limit=LEAST_PACED,
            at_least=True,
        )
        for length in LENGTHS
    ]


def _table_of_counts(counts: dict[int, dict[str, list[float]]]) -> str:
    head = ["chains", "length", "tokens a round", "first token accepted", "draft tokens a round"]
    rows = [[num, length, *found] for num, by in counts.items() for length, found in by.items()]
    return trees.table(head, rows)


def _table_of_rates(speeds: dict[int, dict[str, list[float]]]) -> str:
    head = ["chains", *(f"{way}: tokens/s (× plain)" for way in WAYS)]
    rows = [[num, *(f"{rate:.1f} ({gain:.2f})" for rate, gain in by.values())] for num, by in speeds.items()]
    return trees.table(head, rows)


def _table_of_paced(speeds: dict[int, dict[str, list[float]]]) -> str:
    head = f"A target whose pass takes {PASS_MS} ms, for one token and for all of these alike:"
    return f"{head}\n\n{_table_of_rates(speeds)}"


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
