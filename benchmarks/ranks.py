"""Two plain processes as ranks, and what a step costs on them: no driver, no Ray."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from specwire.engine import loading
from specwire.engine.batch import Feed
from specwire.engine.group.sharding import load_shard
from specwire.engine.runner import ModelRunner

NUM_RANKS = 2
_PROMPT = list(range(5, 105))
_ROUND = [7, 8, 9, 10, 11]
_LIMIT = timedelta(seconds=120)


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


def _rank(rank: int, port: int, source: str, num_steps: int, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_RANK": "0"}
    torch.set_num_threads(1)
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=_LIMIT)
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_plan="auto", tp_size=NUM_RANKS)
    shard, _ = load_shard(source, dtype="float32", num_ranks=NUM_RANKS)
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
    with torch.inference_mode():
        for _ in range(num_steps):
            for name, step in steps.items():
                dist.barrier()
                if name != "one rank" or rank == 0:
                    found[name].append(step())
            dist.barrier()
            for _ in range(4):
                started_s = time.perf_counter()
                dist.all_reduce(token)
                found["all-reduce"].append((time.perf_counter() - started_s) * 1e3)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(source: str, num_steps: int) -> dict[str, list[float]]:
    """Milliseconds of everything that needs no driver."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(rank, store.port, source, num_steps, results), daemon=True)
        for rank in range(NUM_RANKS)
    ]
    for process in ranks:
        process.start()
    while results.empty():
        if any(process.exitcode for process in ranks):
            raise RuntimeError("a rank failed")
        time.sleep(0.1)
    found: dict[str, list[float]] = results.get()
    for process in ranks:
        process.join()
    return found
