"""`python -m benchmarks.beams`: how many rounds a beam search takes, with and without drafts.

The embedded pair, greedy. Each search has a fixed number of steps, and no end token. Texts with drafts are
compared with those without; a difference ends the measurement.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import trees
from benchmarks.bars import Bar, Report, machine
from specwire import Client, Completion, SamplingParams
from specwire.cli.supervisor import Stack

NUMS_BEAMS = (2, 4, 8)
PARAMS = SamplingParams(temperature=0, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "off": {"draft": "off"},
    "chains of 3": {"num_draft_tokens": 3, "max_depth": 0},
    "trees of 6": {"num_draft_tokens": 6, "max_depth": 3},
    "trees of 12": {"num_draft_tokens": 12, "max_depth": 4},
    "chosen": {},
}
"""Draft tokens after each live beam."""
LEAST_STEPS = 1.1
LEAST_OF_OFF = 0.98


def measured(pass_ms: float, num_prompts: int, num_tokens: int) -> dict[int, dict[str, list[float]]]:
    """By width and way: steps a round, and steps/s and their ratio to those without a draft, medians.

    Raises:
        AssertionError: a draft has changed a text.
    """
    prompts, found = trees.cut_prompts(num_prompts), {}
    config = replace(trees.EMBEDDED, least_pass_ms=pass_ms)
    with Stack(config) as stack, Client(stack.address) as client:
        for num_beams in NUMS_BEAMS:
            wide = replace(PARAMS, num_beams=num_beams, num_return_sequences=num_beams, max_tokens=num_tokens)
            done: dict[str, list[Completion]] = {way: [] for way in WAYS}
            for prompt in prompts:
                _run_prompt(client, prompt)
                for way, shape in WAYS.items():
                    params = replace(wide, **shape)
                    done[way].append(client.generate(params=params, prompt_token_ids=prompt))
                    assert _texts(done[way][-1]) == _texts(done["off"][-1]), (num_beams, way)
            found[num_beams] = _figures(done, num_tokens)
            print(pass_ms, num_beams, found[num_beams], flush=True)
    return found


def _run_prompt(client: Client, prompt: list[int]) -> None:
    """So that all ways find it in the caches."""
    params = replace(PARAMS, num_beams=2, max_tokens=3, num_draft_tokens=2)
    client.generate(params=params, prompt_token_ids=prompt)


def _texts(done: Completion) -> list[tuple[int, ...]]:
    return [each.token_ids for each in done.hypotheses]


def _figures(done: dict[str, list[Completion]], num_tokens: int) -> dict[str, list[float]]:
    rates = {way: [num_tokens / one.timing.total_ms * 1e3 for one in each] for way, each in done.items()}
    return {
        way: [
            num_tokens * len(each) / sum(one.speculation.num_rounds for one in each),
            median(rates[way]),
            median(map(truediv, rates[way], rates["off"])),
        ]
        for way, each in done.items()
    }


def main() -> None:
    """Measure; write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beams", description=__doc__)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24, help="steps of each search")
    parser.add_argument("--pass-ms", type=float, nargs="*", default=[0, 60], help="least time of a pass")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    found = {pass_ms: measured(pass_ms, args.prompts, args.tokens) for pass_ms in args.pass_ms}
    result = Report(
        name="beams",
        title="Beam search",
        machine=facts,
        about=(
            "Embedded pair in float32, one search at a time, with as many steps as tokens. Steps a "
            "round; steps/s, and in brackets their ratio to those of the same search without a draft, "
            "medians. All texts are those without a draft."
        ),
        bars=[bar for pass_ms, by_width in found.items() for bar in _bars(pass_ms, by_width)],
        details="\n\n".join(_table(pass_ms, by_width) for pass_ms, by_width in found.items()),
        data=found,
    )
    print(result.write(args.out))


def _bars(pass_ms: float, by_width: dict[int, dict[str, list[float]]]) -> list[Bar]:
    at = f"passes of at least {pass_ms:g} ms"
    steps = [
        Bar(
            what=f"steps a round with {num_beams} beams and trees of 12, {at}",
            measured=by_way["trees of 12"][0],
            limit=LEAST_STEPS,
            at_least=True,
        )
        for num_beams, by_way in by_width.items()
    ]
    rates = [
        Bar(
            what=f"steps/s with {num_beams} beams, chosen, over those without a draft, {at}",
            measured=by_way["chosen"][2],
            limit=LEAST_OF_OFF,
            at_least=True,
        )
        for num_beams, by_way in by_width.items()
    ]
    return steps + rates


def _table(pass_ms: float, by_width: dict[int, dict[str, list[float]]]) -> str:
    head = ["beams", *(f"{way}: steps a round" for way in WAYS), *(f"{way}: steps/s" for way in WAYS)]
    rows = [
        [num, *(each[0] for each in by.values()), *(f"{each[1]:.1f} ({each[2]:.2f})" for each in by.values())]
        for num, by in by_width.items()
    ]
    return f"A pass of the target takes at least {pass_ms:g} ms:\n\n{trees.table(head, rows)}"


if __name__ == "__main__":
    main()
