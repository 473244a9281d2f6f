"""`python -m benchmarks.batch_invariant`: what `--batch-invariant` costs a pass on two ranks.

Interleaved, pass by pass, on the same two ranks, in bfloat16: the shards as they are, with an all-reduce
after each row-wise layer, and batch-invariant, in passes of one size whose parts are gathered and added in
rank order. A pass appends its tokens to one sequence: 1 is decoding, 5 a round, and the others are prompts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch.distributed as dist

from benchmarks.ranks import NUM_RANKS, run_ranks
from benchmarks.report import RESULTS, Bar, Report, machine, table
from specwire import embedded
from specwire.engine.batch import Feed
from specwire.engine.group.sharding import load_shard
from specwire.engine.model.runner import ModelRunner

_SIZES = (1, 5, 32, 256)
_PROMPT_LEN = 100
_NUM_PAGES = 64
_MOST_ROWS = 5  # of a prompt the last one is wanted; of a round all
_LIMIT = 1.3


def _step_on(runner: ModelRunner, size: int) -> Callable[[], float]:
    """A pass of so many tokens after a prompt; each call takes as many milliseconds as it returns."""
    rng = np.random.default_rng(size)
    prompt, tokens = (rng.integers(3, 200, num) for num in (_PROMPT_LEN, size))
    cache = runner.new_sequence()
    runner.forward([Feed(cache, prompt, 0)])

    def step() -> float:
        cache.truncate(_PROMPT_LEN)
        dist.barrier()
        started_s = time.perf_counter()
        runner.forward([Feed(cache, tokens, min(size, _MOST_ROWS))])
        return (time.perf_counter() - started_s) * 1e3

    return step


def _measure(num_ranks: int, source: str, num_steps: int) -> dict[int, list[tuple[float, float]]]:
    """Runs on each rank; milliseconds without and with, by size."""
    runners = []
    for invariant in (False, True):
        shard, _ = load_shard(source, dtype="bfloat16", num_ranks=num_ranks, in_rank_order=invariant)
        runners.append(ModelRunner(shard, num_pages=_NUM_PAGES, batch_invariant=invariant))
    steps = {size: [_step_on(runner, size) for runner in runners] for size in _SIZES}
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in _SIZES}
    for _ in range(num_steps):
        for size, (without, with_it) in steps.items():
            found[size].append((without(), with_it()))
    return found


def main() -> int:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_invariant", description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--target", default=str(embedded.TARGET_DIR), help="directory of a model")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    found = run_ranks(NUM_RANKS, _measure, args.target, args.steps)
    ratios = {size: median(ours / plain for plain, ours in times) for size, times in found.items()}
    rows = [
        [size, *(f"{median(column):.2f}" for column in zip(*times, strict=True)), f"{ratios[size]:.2f}"]
        for size, times in found.items()
    ]
    result = Report(
        name="batch_invariant",
        title="What --batch-invariant costs on two ranks",
        machine=machine(),
        about=(
            f"Two gloo ranks of one thread each, {Path(args.target).name}, bfloat16; {args.steps} passes of "
            "each kind in turns; medians, the ratio of the two passes of a turn. A pass has as many tokens "
            f"after {_PROMPT_LEN}."
        ),
        bars=[Bar(what="passes of 5 tokens, with over without", measured=ratios[5], limit=_LIMIT)],
        details=table(["tokens", "without (ms)", "with", "ratio"], rows),
        data={"ms": {str(size): times for size, times in found.items()}},
    )
    return result.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
