"""`python -m benchmarks.block`: tokens a round under block verification, and under the token rule.

The embedded pair at temperature 1, the same prompts and draft lengths. Only counts matter, so the machine may
be busy. Rounds without a draft do not count.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import windows
from benchmarks.bars import Bar, Report, machine
from specwire import AsyncClient, Completion, Rule, SamplingParams, embedded, tokenizer
from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig

LEAST_RATIOS = {4: 1.04, 8: 1.10, 16: 1.2}
"""Tokens a round over those of the token rule, by number of draft tokens."""
RULES = (Rule.REJECTION, Rule.BLOCK)
NUM_TOKENS, NUM_STREAMS = 256, 8
"""Of each generation; and generations at a time."""
_NUM_RESAMPLES = 2_000

_Counts = np.ndarray[Any, np.dtype[np.int64]]


async def measure(address: str, prompts: Sequence[Sequence[int]], length: int) -> dict[Rule, _Counts]:
    """[num_prompts, 2] for each rule: accepted tokens, and rounds with a draft."""
    free = asyncio.Semaphore(NUM_STREAMS)

    async def generate(client: AsyncClient, prompt: Sequence[int], params: SamplingParams) -> Completion:
        async with free:
            return await client.generate(params=params, prompt_token_ids=prompt)

    counts = {}
    async with AsyncClient(address) as client:
        for rule in RULES:
            params = SamplingParams(
                rule=rule, num_draft_tokens=length, max_tokens=NUM_TOKENS, ignore_eos=True
            )
            done = await asyncio.gather(*(generate(client, prompt, params) for prompt in prompts))
            rounds = [each.speculation for each in done]
            counts[rule] = np.array([(s.num_accepted_tokens, sum(s.acceptance_histogram)) for s in rounds])
    return counts


def tokens_a_round(counts: _Counts) -> float:
    """Accepted tokens and the one after them, a round with a draft."""
    accepted, rounds = counts.sum(axis=0)
    return float(1 + accepted / rounds)


def ratio_error(counts: dict[Rule, _Counts]) -> float:
    """Standard error of block over token rule, by drawing the prompts anew, for both alike."""
    rng = np.random.default_rng(0)
    token, block = (counts[rule] for rule in RULES)
    drawn = rng.integers(0, len(token), (_NUM_RESAMPLES, len(token)))
    return float(np.std([tokens_a_round(block[some]) / tokens_a_round(token[some]) for some in drawn]))


def main() -> None:
    """Measure all lengths and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block", description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=64, help="generations of each rule and length")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    loaded = tokenizer.load(embedded.TARGET_DIR)
    assert loaded is not None
    prompts = windows.cut(loaded, args.num_prompts)
    config = UpConfig(
        dtype="float32", draft_dtype="float32", address="127.0.0.1:0", num_outcomes="0", num_threads=1
    )
    rows: list[tuple[int, float, float, float, float]] = []
    bars = []
    with Stack(config) as stack:
        for length, least in LEAST_RATIOS.items():
            counts = asyncio.run(measure(stack.address, prompts, length))
            token, block = (tokens_a_round(counts[rule]) for rule in RULES)
            rows.append((length, token, block, block / token, ratio_error(counts)))
            print(rows[-1], flush=True)
            what = f"tokens a round with {length} draft tokens, over the token rule's"
            bars.append(Bar(what=what, measured=block / token, limit=least, at_least=True))
    lines = [f"| {n} | {token:.2f} | {block:.2f} | {r:.3f} ± {e:.3f} |" for n, token, block, r, e in rows]
    head = [
        "| draft tokens | token rule | block verification | ratio ± standard error |",
        "|---|---|---|---|",
    ]
    result = Report(
        name="block",
        title="Block verification",
        machine=facts,
        about=f"Embedded pair in float32, temperature 1; for each rule and length {args.num_prompts} "
        f"generations of {NUM_TOKENS} tokens. Tokens a round: accepted ones and the one after them.",
        bars=bars,
        details="\n".join([*head, *lines]),
        data={"draft tokens, token rule, block, ratio, its standard error": rows},
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
