"""`python -m benchmarks.trees`: what token trees bring and cost, beside chains.

- `tokens`: tokens a round of the embedded pair in float32, the best chain against the best tree of each size.
  Only counts matter, so the machine may be busy.
- `rates`: tokens/s on emulated devices whose pass costs the same up to 64 tokens, with shapes that the
  coordinator chooses, against chains alone; in turns, once both have settled.
- `costs`: time of a round of the embedded pair by part, on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import windows
from benchmarks.ahead import DRAFT_MS, FAR_MS, PROMPT, RUNNER_UP, TARGET_MS
from benchmarks.bars import Bar, Part, Report, earlier, machine
from specwire import AsyncClient, Client, Completion, Rule, SamplingParams, embedded, tokenizer
from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig

KINDS = {
    "gumbel": SamplingParams(rule=Rule.GUMBEL, seed=0, ignore_eos=True),
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
}
"""Gumbel coupling at temperature 1."""
CHAINS = (4, 8, 16)
DEPTHS = {16: (4, 8), 32: (6, 8, 10), 64: (8, 12)}
"""Longest paths that are tried, by nodes."""
NUM_STREAMS = 8
BAR_NODES, LEAST_RATIOS = 32, {"gumbel": 1.25, "greedy": 1.15}
"""Tokens a round over those of the best chain."""
ALPHAS, LEAST_GAIN = (0.7, 0.8), 1.2
SETTLING_TOKENS = 4000
COST_DEPTH = 8

EMBEDDED = UpConfig(
    dtype="float32",
    draft_dtype="float32",
    draft_placement="service",
    address="127.0.0.1:0",
    num_outcomes="0",
    num_threads=1,
)


class Shape(NamedTuple):
    """What is proposed; a chain has no depth of its own."""

    num_draft_tokens: int
    max_depth: int = 0

    def of(self, params: SamplingParams) -> SamplingParams:
        """Parameters that ask for it."""
        return replace(params, num_draft_tokens=self.num_draft_tokens, max_depth=self.max_depth)

    def __str__(self) -> str:
        if self.max_depth:
            return f"tree of {self.num_draft_tokens}, depth {self.max_depth}"
        return f"chain of {self.num_draft_tokens}"


# --- tokens a round ---------------------------------------------------------------------------------


def tokens(num_prompts: int, num_tokens: int) -> Part:
    """The embedded pair, every shape on the same prompts."""
    chains, trees = _shapes()
    prompts = cut_prompts(num_prompts)
    found: dict[str, dict[Shape, float]] = {}
    with Stack(EMBEDDED) as stack:
        for kind, params in KINDS.items():
            found[kind] = {}
            for shape in (*chains, *trees):
                done = asyncio.run(
                    generate_all(stack.address, prompts, replace(shape.of(params), max_tokens=num_tokens))
                )
                found[kind][shape] = tokens_a_round(done)
                print(kind, shape, f"{found[kind][shape]:.2f}", flush=True)
    bars, rows = [], []
    for kind, by_shape in found.items():
        chain = max(chains, key=by_shape.__getitem__)
        best = {nodes: max((Shape(nodes, d) for d in DEPTHS[nodes]), key=by_shape.get) for nodes in DEPTHS}  # type: ignore[arg-type]
        what = f"tokens a round of {BAR_NODES} nodes over the best chain's, {kind}"
        ratio = by_shape[best[BAR_NODES]] / by_shape[chain]
        bars.append(Bar(what=what, measured=ratio, limit=LEAST_RATIOS[kind], at_least=True))
        cells = [f"{by_shape[shape]:.2f}" for shape in chains]
        cells += [f"{by_shape[shape]:.2f} ({shape.max_depth})" for shape in best.values()]
        rows.append([kind, *cells])
    head = ["", *(f"chain of {n}" for n in CHAINS), *(f"{n} nodes (depth)" for n in DEPTHS)]
    data = {kind: {str(shape): rate for shape, rate in found[kind].items()} for kind in found}
    about = (
        f"Embedded pair in float32, {num_prompts} prompts, {num_tokens} tokens each. Gumbel coupling at "
        f"temperature 1. Of each size the best of the depths {DEPTHS}."
    )
    return Part(bars=bars, text=f"## Tokens a round\n\n{about}\n\n{table(head, rows)}", data=data)


def _shapes() -> tuple[list[Shape], list[Shape]]:
    return [Shape(n) for n in CHAINS], [Shape(n, depth) for n, depths in DEPTHS.items() for depth in depths]


def cut_prompts(count: int) -> list[list[int]]:
    loaded = tokenizer.load(embedded.TARGET_DIR)
    assert loaded is not None
    return windows.cut(loaded, count)


async def generate_all(
    address: str, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[Completion]:
    free = asyncio.Semaphore(NUM_STREAMS)

    async def generate(client: AsyncClient, seed: int, prompt: Sequence[int]) -> Completion:
        async with free:
            return await client.generate(params=replace(params, seed=seed), prompt_token_ids=prompt)

    async with AsyncClient(address) as client:
        return await asyncio.gather(*(generate(client, *each) for each in enumerate(prompts)))


def tokens_a_round(done: Sequence[Completion]) -> float:
    """Accepted tokens and the one after them, a round with a draft."""
    accepted = sum(each.speculation.num_accepted_tokens for each in done)
    return 1 + accepted / sum(sum(each.speculation.acceptance_histogram) for each in done)


# --- tokens a second --------------------------------------------------------------------------------


def rates(num_tokens: int, num_runs: int) -> Part:
    """Chosen shapes against chosen chains, on devices whose pass costs the same for every batch."""
    bars, rows = [], []
    for alpha in ALPHAS:
        for rtt_ms in (0.0, FAR_MS):
            trees, chains = _rates_of(alpha, rtt_ms, num_tokens, num_runs)
            gain = median(tree / chain for tree, chain in zip(trees, chains, strict=True))
            rows.append([alpha, rtt_ms, median(chains), median(trees), gain])
            print(*rows[-1], flush=True)
            what = f"tokens/s over chains alone, alpha {alpha}, draft {rtt_ms:g} ms away"
            bars.append(Bar(what=what, measured=gain, limit=LEAST_GAIN, at_least=True))
    head = ["alpha", "draft away (ms)", "chains (tokens/s)", "shapes chosen (tokens/s)", "ratio"]
    about = (
        f"Emulated devices: a pass of the target {TARGET_MS:g} ms whatever its tokens, one of the draft "
        f"{DRAFT_MS:g} ms, runner-up {RUNNER_UP}. One stream under Gumbel coupling, lengths and outcomes "
        f"chosen by the coordinator; `--max-depth auto` against `--max-depth 0`, {num_runs} times "
        f"{num_tokens} tokens of the same seeds in turns, after {SETTLING_TOKENS} tokens each. Medians."
    )
    return Part(bars=bars, text=f"## Tokens a second\n\n{about}\n\n{table(head, rows)}", data=rows)


def _rates_of(alpha: float, rtt_ms: float, num_tokens: int, num_runs: int) -> tuple[list[float], list[float]]:
    """Tokens/s of each run, with trees and without."""
    found: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as running:
        stacks = [running.enter_context(Stack(_devices(alpha, rtt_ms, depth))) for depth in ("auto", "0")]
        clients = [running.enter_context(Client(stack.address)) for stack in stacks]
        with ThreadPoolExecutor() as together:
            list(together.map(lambda client: _rate(client, SETTLING_TOKENS, 99), clients))
        for seed in range(num_runs):
            for client, of_one in zip(clients, found, strict=True):
                of_one.append(_rate(client, num_tokens, seed))
    return found


def _devices(alpha: float, rtt_ms: float, max_depth: str) -> UpConfig:
    return UpConfig(
        target=f"emulated:step_ms={TARGET_MS:g}",
        draft=f"emulated:step_ms={DRAFT_MS:g},alpha={alpha:g},runner_up={RUNNER_UP:g}",
        max_depth=max_depth,
        draft_rtt_ms=rtt_ms,
        address="127.0.0.1:0",
        grace_s=0.0,
    )


def _rate(client: Client, num_tokens: int, seed: int) -> float:
    params = SamplingParams(rule=Rule.GUMBEL, seed=seed, max_tokens=num_tokens)
    done = client.generate(params=params, prompt_token_ids=PROMPT)
    return num_tokens / done.timing.total_ms * 1e3


# --- the time of a round ----------------------------------------------------------------------------


def costs(num_tokens: int, num_runs: int) -> Part:
    """One stream of the embedded pair, shapes in turns; medians of the runs."""
    shapes = [Shape(COST_DEPTH), *(Shape(nodes, COST_DEPTH) for nodes in DEPTHS)]
    prompts, params = cut_prompts(num_runs + 1), replace(KINDS["greedy"], max_tokens=num_tokens)
    runs: dict[Shape, list[Completion]] = {shape: [] for shape in shapes}
    with Stack(EMBEDDED) as stack, Client(stack.address) as client:
        for prompt in prompts:
            for shape, done in runs.items():
                done.append(client.generate(params=shape.of(params), prompt_token_ids=prompt))
    rows = [[str(shape), *_a_round(done[1:])] for shape, done in runs.items()]
    about = (
        f"Embedded pair in float32, one stream, greedy, {num_runs} times {num_tokens} tokens, in turns; the "
        "first run is not counted. Of all runs together."
    )
    text = f"## The time of a round\n\n{about}\n\n{table(['', *_PARTS], rows)}"
    return Part(bars=[], text=text, data=rows)


_PARTS = ("round (ms)", "draft (ms)", "verify (ms)", "other (ms)", "tokens a round", "tokens/s")


def _a_round(done: Sequence[Completion]) -> list[float]:
    """In the order of `_PARTS`."""
    num_rounds = sum(each.speculation.num_rounds for each in done)
    num_tokens = sum(len(each.token_ids) for each in done)
    total_ms, draft_ms, verify_ms = (
        sum(getattr(each.timing, name) for each in done) for name in ("total_ms", "draft_ms", "verify_ms")
    )
    times_ms = [total_ms, draft_ms, verify_ms, total_ms - draft_ms - verify_ms]
    return [*(ms / num_rounds for ms in times_ms), num_tokens / num_rounds, num_tokens / total_ms * 1e3]


# --- the report -------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head)]
    lines += [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Measure the parts that are asked for; the report has the latest of all that were measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trees", description=__doc__)
    parser.add_argument("parts", nargs="*", help="tokens, rates, costs; all by default")
    parser.add_argument("--num-prompts", type=int, default=16, help="of `tokens`")
    parser.add_argument("--num-tokens", type=int, default=128, help="of each generation in `tokens`, `costs`")
    parser.add_argument("--num-runs", type=int, default=5, help="of `rates` and `costs`")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    measure: dict[str, Callable[[], Part]] = {
        "tokens": lambda: tokens(args.num_prompts, args.num_tokens),
        "rates": lambda: rates(3 * args.num_tokens, args.num_runs),
        "costs": lambda: costs(args.num_tokens, args.num_runs),
    }
    facts = machine()
    found = earlier(args.out / "trees.json") | {name: measure[name]() for name in args.parts or measure}
    result = Report.of(
        {name: found[name] for name in measure if name in found},
        name="trees",
        title="Token trees",
        machine=facts,
        about="Tokens a round: accepted ones and the one after them.",
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
