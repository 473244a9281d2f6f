"""Plain processes as ranks of a group: no driver, no Ray."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NUM_RANKS = 2
_LIMIT = timedelta(seconds=120)
_END_S = 5.0

# What torch does not declare, though it documents it.
_dist: Any = dist


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> Any:
    """Call `function(num_ranks, *args)` on every rank; what it returns on rank 0.

    Args:
        backend: gloo on CPUs; nccl on as many GPUs as there are ranks.

    Raises:
        RuntimeError: a rank failed.
    """
    store = _dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(
            target=_rank,
            args=(rank, num_ranks, store.port, results, function, args),
            kwargs={"backend": backend},
        )
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
    rank: int,
    num_ranks: int,
    port: int,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    backend: str,
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    torch.set_num_threads(1)
    store = _dist.TCPStore("127.0.0.1", port, is_master=False)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_LIMIT)
    with torch.inference_mode():
        result = function(num_ranks, *args)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()
