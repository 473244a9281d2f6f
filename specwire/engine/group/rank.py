"""One rank: a process that holds a shard, and executes the driver's steps together with all other ranks.

What driver and ranks send each other is pickled: they are processes of one service and trust each other.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from specwire.config.services import ModelServiceConfig
from specwire.engine.batch import Batch
from specwire.engine.boot import model_directory
from specwire.engine.device import Decide, DraftQuery, DraftShape
from specwire.engine.group import control, placement
from specwire.engine.group.control import RankConnection
from specwire.engine.group.sharding import load_shard
from specwire.engine.model import memory, own
from specwire.engine.model.graphs import make_replay
from specwire.engine.model.runner import ModelRunner
from specwire.rule.captured import Output, Replay


class RankLocation(NamedTuple):
    """Where a rank runs: the machine's address in the cluster, Ray's name for the machine, and the device as
    the machine's own tools name it (`cpu`, `cuda:3`)."""

    host: str
    node_id: str
    pid: int
    device: str


class Assignment(NamedTuple):
    """The role of a rank, and how it reaches the others: the driver's store, with the prefix of this group's
    keys, and the driver's connections to this group, with their token."""

    rank: int
    num_ranks: int
    host: str
    port: int
    key: str
    control_port: int
    token: bytes
    config: ModelServiceConfig
    source: str
    dtype: str


class Loaded(NamedTuple):
    """The properties of the loaded model, as of `ModelRunner`; the same on every rank.

    Attributes:
        description: see `loading.describe`.
        num_pages: of the KV cache.
        warning: for the service's log; empty for none.
    """

    description: dict[str, Any]
    context_len: int | None
    vocab_size: int
    num_embeddings: int
    num_pages: int
    draft_shape: DraftShape | None
    warning: str = ""


class StepCommand(NamedTuple):
    """One step: a pass of the model, or of what drafts beside it.

    Attributes:
        number: counts the steps of a group, so that a missed one is detected.
        batch: None of passes of a draft that appends nothing.
        question: None when no logits are wanted.
        decide: called by rank 0.
        query: of a pass of the draft.
    """

    number: int
    batch: Batch | None
    question: Any
    decide: Decide
    query: DraftQuery | None = None


class StepAnswer(NamedTuple):
    """The result of a step; `problem` is the traceback if `decide` failed, which leaves the group intact."""

    number: int
    answer: Any
    problem: str = ""


class Rank:
    """The Ray actor. Any error ends it, and with it the group: a rank cannot run alone."""

    def location(self) -> RankLocation:
        """Where it runs."""
        host, node_id, device = placement.devices()
        return RankLocation(host, node_id, os.getpid(), device)

    def load(self, assignment: Assignment) -> Loaded:
        """Join the others and load this rank's shard.

        Raises:
            ModelLoadError: naming the model and the reason.
            RuntimeError: another rank did not join, or died.
        """
        disable_progress_bar()
        config, self._rank = assignment.config, assignment.rank
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        store = control.connect_store(assignment.host, assignment.port, config.load_timeout_s)
        store = control.substore(store, assignment.key)
        self._join(assignment, store)
        model, description = load_shard(
            assignment.source,
            dtype=assignment.dtype,
            num_ranks=assignment.num_ranks,
            in_rank_order=config.batch_invariant,
        )
        replay = None
        if one := make_replay(config, model.device):
            replay = AgreedReplay(one, control.substore(store, "replay"), self._rank, assignment.num_ranks)
        self._runner = own.make_runner(
            config,
            model_directory(assignment.source),
            model,
            num_pages=_num_pages(config, model),
            replay=replay,
            batch_invariant=config.batch_invariant,
        )
        if replay is not None:
            replay.warm(self._runner)
        else:
            self._runner.warm()
        return Loaded(
            description=description,
            context_len=self._runner.context_len,
            vocab_size=self._runner.vocab_size,
            num_embeddings=self._runner.num_embeddings,
            num_pages=self._runner.pool.num_pages,
            draft_shape=self._runner.draft_shape,
            warning=f"steps run without CUDA graphs: {replay.problem}" if replay and replay.problem else "",
        )

    def _join(self, assignment: Assignment, store: Any) -> None:
        config = assignment.config
        # transformers reads these to find its rank; Ray shows a rank only its own device, as the first one.
        os.environ |= {"RANK": str(self._rank), "WORLD_SIZE": str(assignment.num_ranks), "LOCAL_RANK": "0"}
        is_cuda = config.device.startswith("cuda")
        if is_cuda:
            torch.cuda.set_device(0)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=control.substore(store, "model"),
            rank=self._rank,
            world_size=assignment.num_ranks,
            timeout=timedelta(seconds=config.load_timeout_s),
            device_id=torch.device("cuda", 0) if is_cuda else None,
        )
        self._connection = RankConnection(
            assignment.host, assignment.control_port, assignment.token, self._rank, config.load_timeout_s
        )

    @torch.inference_mode()
    def serve(self) -> None:
        """Execute steps until the driver ends the group, or any process of it dies."""
        number = 0
        with contextlib.closing(self._connection):  # so that the driver detects it at once
            while (command := pickle.loads(self._connection.receive())) is not None:
                if command.number != number:
                    problem = f"received step {command.number} instead of {number}"
                    raise RuntimeError(f"rank {self._rank} {problem}")
                # What drafts is on every rank, and reads what the ranks' model shows all of them.
                if command.query is not None:
                    logits = self._runner.draft(command.batch, command.query)
                else:
                    logits = self._runner.compute(command.batch)
                if self._rank == 0:
                    self._connection.answer(pickle.dumps(_answer(command, logits), pickle.HIGHEST_PROTOCOL))
                number += 1


def _answer(command: StepCommand, logits: Tensor) -> StepAnswer:
    """Deciding involves no other rank, so the group survives when it fails."""
    if command.question is None:
        return StepAnswer(command.number, None)
    try:
        return StepAnswer(command.number, command.decide(command.question, logits))
    except Exception:
        return StepAnswer(command.number, None, traceback.format_exc())


def _num_pages(config: ModelServiceConfig, model: Any) -> Any:
    """The number of pages that fits on every rank."""
    # On CPUs all ranks share the memory, as if they were on one machine.
    num_sharing = dist.get_world_size() if model.device.type == "cpu" else 1
    fitting = memory.num_pages(config, model.device, num_sharing)
    if isinstance(fitting, int):
        return fitting

    def agreed(page_bytes: int, state_bytes: int) -> int:
        least = torch.tensor(fitting(page_bytes, state_bytes), device=model.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

    return agreed


class AgreedReplay:
    """Captures a step only if all ranks can.

    NCCL requires that a collective is captured by all ranks of a group or by none. Buckets follow from the
    batch alone, so all ranks use the same ones in the same order, and capture at the same time. They exchange
    results through the store, not the group, which a failed capture may have left unusable.

    Args:
        replay: how one rank captures.
        store: shared by all ranks; reads wait for missing keys.

    Attributes:
        problem: why steps are no longer captured, from the first rank that reports one; else empty.
    """

    def __init__(self, replay: Replay, store: Any, rank: int, num_ranks: int) -> None:
        self._replay, self._store = replay, store
        self._rank, self._num_ranks = rank, num_ranks
        self._number = 0
        self.problem = ""

    def capture(self, run: Callable[[], Output]) -> Callable[[], Output]:
        """See `Replay`.

        Raises:
            RuntimeError: some rank failed to capture; raised on all ranks.
        """
        recorded, problem = None, ""
        try:
            recorded = self._replay.capture(run)
        except Exception as error:
            problem = f"rank {self._rank}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        self.problem = next(filter(None, self._exchange(problem)), "")
        if self.problem or recorded is None:
            raise RuntimeError(self.problem)
        return recorded

    def warm(self, runner: ModelRunner) -> None:
        """Warm up a runner; if the ranks end up in different states, none of them replays."""
        runner.warm()
        found = self._exchange(f"{runner.num_graphs} recorded, {runner.attention_path}")
        if len(set(found)) > 1:
            self.problem = f"ranks differ: {', '.join(found)}"
        if self.problem:
            runner.stop_replaying()

    def _exchange(self, text: str) -> list[str]:
        """The texts of all ranks, in order."""
        self._number += 1
        self._store.set(f"{self._number}/{self._rank}", text)
        ranks = range(self._num_ranks)
        return [self._store.get(f"{self._number}/{rank}").decode() for rank in ranks]
