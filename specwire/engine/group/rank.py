"""One rank: a process that holds a shard and does in every step what the driver says, as all others do."""

from __future__ import annotations

import os
import pickle
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from specwire.config.services import ModelServiceConfig
from specwire.engine.group import control, placement
from specwire.engine.group.control import RankLine
from specwire.engine.group.messages import Assignment, Loaded, Order, RankLocation, StepAnswer
from specwire.engine.group.replay import AgreedReplay
from specwire.engine.group.sharding import load_shard
from specwire.engine.model.graphs import CudaReplay
from specwire.engine.model.memory import pages_in_memory
from specwire.engine.model.runner import ModelRunner


class Rank:
    """What a Ray actor runs. Any error ends it, and with it the group: no rank goes on alone."""

    def place(self) -> RankLocation:
        """Where it runs."""
        host, node_id, device = placement.devices()
        return RankLocation(host, node_id, os.getpid(), device)

    def load(self, assignment: Assignment) -> Loaded:
        """Join the others and load this rank's shard.

        Raises:
            ModelLoadError: naming the model and the reason.
            RuntimeError: another rank did not join, or was lost.
        """
        disable_progress_bar()
        config, self._rank = assignment.config, assignment.rank
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        store = control.reach_store(assignment.host, assignment.port, config.load_timeout_s)
        store = control.part_of(store, assignment.key)
        self._join(assignment, store)
        model, description = load_shard(
            assignment.source, dtype=assignment.dtype, num_ranks=assignment.num_ranks
        )
        replay = None
        if model.device.type == "cuda" and config.cuda_graphs:
            part = control.part_of(store, "replay")
            replay = AgreedReplay(CudaReplay(), part, self._rank, assignment.num_ranks)
        self._runner = ModelRunner(
            model, num_pages=_num_pages(config, model), page_size=config.page_len, replay=replay
        )
        if replay is not None:
            replay.warm(self._runner)
        return Loaded(
            description=description,
            context_len=self._runner.context_len,
            vocab_size=self._runner.vocab_size,
            num_embeddings=self._runner.num_embeddings,
            num_pages=self._runner.pool.num_pages,
            warning=f"steps run without CUDA graphs: {replay.problem}" if replay and replay.problem else "",
        )

    def _join(self, assignment: Assignment, store: Any) -> None:
        config = assignment.config
        # transformers reads these to find its place; Ray shows a rank its own device only, the first one.
        os.environ |= {"RANK": str(self._rank), "WORLD_SIZE": str(assignment.num_ranks), "LOCAL_RANK": "0"}
        is_cuda = config.device.startswith("cuda")
        if is_cuda:
            torch.cuda.set_device(0)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=control.part_of(store, "model"),
            rank=self._rank,
            world_size=assignment.num_ranks,
            timeout=timedelta(seconds=config.load_timeout_s),
            device_id=torch.device("cuda", 0) if is_cuda else None,
        )
        self._line = RankLine(
            assignment.host, assignment.line_port, assignment.token, self._rank, config.load_timeout_s
        )

    @torch.inference_mode()
    def serve(self) -> None:
        """Step after step, until the driver says that it was the last one or somebody is lost."""
        try:
            self._follow()
        finally:
            self._line.close()  # so that the driver knows at once

    def _follow(self) -> None:
        number = 0
        while (order := pickle.loads(self._line.hear())) is not None:
            if order.number != number:
                raise RuntimeError(f"rank {self._rank} heard step {order.number} instead of {number}")
            logits = self._runner.compute(order.batch)
            if self._rank == 0:
                self._line.answer(pickle.dumps(_answer(order, logits), pickle.HIGHEST_PROTOCOL))
            number += 1


def _answer(order: Order, logits: Tensor) -> StepAnswer:
    """Deciding needs no other rank: when it fails the group goes on."""
    if order.question is None:
        return StepAnswer(order.number, None)
    try:
        return StepAnswer(order.number, order.decide(order.question, logits))
    except Exception:
        return StepAnswer(order.number, None, traceback.format_exc())


def _num_pages(config: ModelServiceConfig, model: Any) -> Any:
    """The pages that every rank has room for."""
    if not config.kv_cache_memory:
        return config.num_pages

    def agreed(page_bytes: int) -> int:
        num_pages = pages_in_memory(config.kv_cache_memory / _sharers(model.device), model.device, page_bytes)
        least = torch.tensor(num_pages, device=model.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    return agreed


def _sharers(device: torch.device) -> int:
    """Ranks that take from the same memory: on CPUs all of them, as if they were on one machine."""
    return dist.get_world_size() if device.type == "cpu" else 1
