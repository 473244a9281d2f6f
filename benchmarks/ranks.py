"""Plain processes as ranks of a gloo group, and what a step costs on them: no driver, no Ray."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from specwire.engine.batch import Feed
from specwire.engine.group.sharding import load_shard
from specwire.engine.model import loading
from specwire.engine.model.runner import ModelRunner

NUM_RANKS = 2
_PROMPT = list(range(5, 105))
_ROUND = [7, 8, 9, 10, 11]
_LIMIT = timedelta(seconds=120)
_END_S = 5.0

# What torch does not declare, though it documents it.
_dist: Any = dist


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(num_ranks, *args)` on every rank; what it returns on rank 0.

    Raises:
        RuntimeError: a rank failed.
    """
    store = _dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(rank, num_ranks, store.port, results, function, args))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        while results.empty():
            multiprocessing.connection.wait([process.sentinel for process in ranks], 0.1)
            failed = [process.exitcode for process in ranks if process.exitcode]
            if failed:
                raise RuntimeError(f"ranks ended with status {failed}")
        return results.get()
    finally:
        for process in ranks:
            process.join(_END_S)
            process.kill()


def _rank(
    rank: int, num_ranks: int, port: int, results: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    torch.set_num_threads(1)
    store = _dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_LIMIT)
    with torch.inference_mode():
        result = function(num_ranks, *args)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()


def first_choice(question: object, logits: torch.Tensor) -> int:
    """The least that a service could do with logits."""
    return int(logits[0].argmax())


def step_on(runner: Any) -> Callable[[], float]:
    """A round of five tokens after a prompt; each call takes as many milliseconds as it returns."""
    cache = runner.new_sequence()
    runner.run([Feed(cache, _PROMPT, 0)], None, first_choice)

    def step() -> float:
        cache.truncate(len(_PROMPT))
        started_s = time.perf_counter()
        runner.run([Feed(cache, _ROUND, len(_ROUND))], 0, first_choice)
        return (time.perf_counter() - started_s) * 1e3

    return step


def _measure(num_ranks: int, source: str, num_steps: int) -> dict[str, list[float]]:
    """Runs on each rank."""
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_plan="auto", tp_size=num_ranks)
    shard, _ = load_shard(source, dtype="float32", num_ranks=num_ranks)
    runners = {
        "one rank": ModelRunner(loading.load_model(source, dtype="float32"), num_pages=64),
        "DTensor": ModelRunner(
            loading.load_weights(source, "float32", distributed_config=plan), num_pages=64
        ),
        "shards": ModelRunner(shard, num_pages=64),
    }
    steps = {name: step_on(runner) for name, runner in runners.items()}
    token = torch.zeros(len(_ROUND), shard.config.hidden_size)
    found: dict[str, list[float]] = {name: [] for name in (*steps, "all-reduce")}
    for _ in range(num_steps):
        for name, step in steps.items():
            dist.barrier()
            if name != "one rank" or dist.get_rank() == 0:
                found[name].append(step())
        dist.barrier()
        for _ in range(4):
            started_s = time.perf_counter()
            dist.all_reduce(token)
            found["all-reduce"].append((time.perf_counter() - started_s) * 1e3)
    return found


def on_ranks(source: str, num_steps: int) -> dict[str, list[float]]:
    """Milliseconds of everything that needs no driver."""
    found: dict[str, list[float]] = run_ranks(NUM_RANKS, _measure, source, num_steps)
    return found
