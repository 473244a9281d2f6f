"""The engine over a tiny model, whose logits after any history are compared with those from scratch."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.simulation.devices import LogitsDecider
from specwire import SamplingParams
from specwire.core import Proposal
from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.loop import Engine
from specwire.engine.model.runner import ModelRunner
from specwire.engine.threads import ComputeThread
from tests.support.harness import LoopThread
from tests.support.integrity import check_integrity
from tests.support.jobs import result_of
from verify_service.verifier import VerifyJob

_TOLERANCE = 2e-5

Expected = Callable[[TokenSequence], Tensor]
"""Logits of a sequence's tokens, computed otherwise; the last rows are those of its job."""


class LogitsEngine:
    """The real engine, and what each job's logits should be."""

    def __init__(self, runner: ModelRunner, expected: Expected, **options: Any) -> None:
        self.runner = runner
        self._expected = expected
        self._logits: dict[Job, Tensor] = {}
        self.engine = Engine(
            runner,
            LogitsDecider(self._consume),
            context_len=runner.pool.num_pages * runner.pool.page_size,
            thread=ComputeThread("test"),
            **options,
        )
        self._thread = LoopThread()

    def _consume(self, jobs: list[Job], logits: Tensor) -> None:
        parts = logits.clone().split([job.num_rows for job in jobs])
        for job, rows in zip(jobs, parts, strict=True):
            self._logits[job], job.result = rows, True

    def verify_all(self, jobs: Sequence[VerifyJob]) -> None:
        """Run them together and compare every row."""

        async def together() -> None:
            await asyncio.gather(*(result_of(self.engine, job) for job in jobs))

        self._thread.run(together())
        for job in jobs:
            wanted = self._expected(job.sequence)[-job.num_rows :]
            torch.testing.assert_close(self._logits.pop(job), wanted, rtol=_TOLERANCE, atol=_TOLERANCE)

    def verify(
        self, sequence: TokenSequence, base_len: int, tokens: list[int], draft: list[int]
    ) -> VerifyJob:
        job = VerifyJob(sequence, base_len, tokens, proposal=Proposal(base_len + len(tokens), draft))
        self.verify_all([job])
        return job

    def settle(self) -> None:
        """Wait until the engine has seen every close, then check the books."""
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.engine._inbox.put(lambda: done.put(None))
        done.get(timeout=10)
        check_integrity(self.runner.pool)

    def run_history(
        self,
        rng: np.random.Generator,
        num_steps: int,
        streams: list[Stream],
        opened: Callable[[], Stream],
        job: Callable[[Stream], VerifyJob],
        *,
        replaced: float,
        max_len: int,
    ) -> None:
        """Steps of two streams, chosen at random; another one takes a stream's place by chance. All end."""
        for _ in range(num_steps):
            chosen = sorted(rng.choice(len(streams), 2, replace=False).tolist())
            for i in chosen:
                if rng.random() < replaced or len(streams[i].committed) > max_len:
                    self.engine.close_sequence(streams[i].sequence)
                    streams[i] = opened()
            jobs = [job(streams[i]) for i in chosen]
            self.verify_all(jobs)
            for i, done in zip(chosen, jobs, strict=True):
                streams[i].commit(rng, done)
            self.settle()
        for stream in streams:
            self.engine.close_sequence(stream.sequence)
        self.settle()

    def close(self) -> None:
        self.engine.close()
        self._thread.close()


class Stream:
    """What a coordinator knows of one sequence.

    Args:
        num_read: tokens of an encoder's input, with which the prompt begins.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], num_read: int = 0) -> None:
        self.sequence = engine.open(SamplingParams(seed=0), max(num_read + 1, 5), num_read)
        self.committed, self.held, self.least_len = [*prompt], 0, max(num_read + 1, 5)

    def job(self, draft: list[int]) -> VerifyJob:
        proposal = Proposal(len(self.committed), draft)
        return VerifyJob(self.sequence, self.held, self.committed[self.held :], proposal=proposal)

    def roll_back(self, rng: np.random.Generator) -> None:
        """Deep into pages that others may share, and into an encoder's input."""
        self.held = int(rng.integers(0, self.held + 1))
        self.committed = self.committed[: max(self.held, self.least_len)]

    def commit(self, rng: np.random.Generator, job: VerifyJob) -> None:
        """Any number of its draft tokens, and another one."""
        num_accepted = int(rng.integers(0, len(job.proposal.token_ids) + 1))
        self.held = len(self.committed) + num_accepted
        self.committed = [*self.committed, *job.proposal.token_ids[:num_accepted], int(rng.integers(3, 6))]
