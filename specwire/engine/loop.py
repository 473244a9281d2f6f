"""The batching loop: one thread that owns the model, its cache and every sequence.

    run(job) ─▶ inbox ─▶ ready jobs ─▶ one packed forward ─▶ consume(jobs, logits) ─▶ futures
                             ▲                                        │
                             └──────── jobs that want more ◀──────────┘

Every step takes what is ready from all sequences, prefill and verify alike (`schedule.py` says what).
What to do with the logits is the service's business: it hands in `consume`. No locks: callers talk to
the thread through one queue, and only the thread touches sequences.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specwire.core import Load, SamplingParams
from specwire.costs import CostModel
from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.kv_cache import PagePool, SequenceCache
from specwire.engine.runner import Feed
from specwire.engine.schedule import Scheduler, Step
from specwire.engine.thread import ComputeThread
from specwire.errors import (
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    ServiceUnavailableError,
    SpecwireError,
)

log = logging.getLogger(__name__)


class Runner(Protocol):
    """What the loop needs of a model runner."""

    pool: PagePool
    vocab_size: int

    def new_sequence(self) -> SequenceCache: ...
    def forward(self, feeds: Sequence[Feed]) -> Tensor: ...


Consume = Callable[[list[Job], Tensor], None]
"""Takes the jobs of a step whose rows are complete, and their logits [sum of num_rows, vocab_size].
It sets `result`, or appends to the sequence's tokens and so asks for another pass."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counts, as `GetModelInfo` reports them."""

    num_sequences: int
    num_requests: int
    num_steps: int
    num_tokens: int
    num_preemptions: int
    num_hit_tokens: int


class Engine:
    """Runs jobs of all sequences in shared forward passes, on a thread of its own."""

    def __init__(
        self,
        runner: Runner,
        consume: Consume,
        *,
        max_num_tokens: int,
        max_prefill_tokens: int,
        context_len: int,
        thread: ComputeThread,
        prefix_sharing: bool = True,
    ) -> None:
        self._runner = runner
        self._consume = consume
        self._context_len = context_len
        self._prefix_sharing = prefix_sharing
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._sequences: dict[int, TokenSequence] = {}
        self._scheduler = Scheduler(
            self._sequences,
            max_num_tokens=max_num_tokens,
            max_prefill_tokens=max_prefill_tokens,
            prefix_sharing=prefix_sharing,
        )
        self._costs = CostModel(2)  # of a step: its sequences, its tokens
        self._expected: set[TokenSequence] = set()
        self._wait_until_ns = 0
        self._num_opened = 0
        self._answers: list[tuple[asyncio.Future[Any], Any]] = []
        self._num_waiting = 0
        self._num_steps = 0
        self._num_tokens = 0
        self._closing = False
        self._thread = thread
        self._thread.start(self._run)

    # --- called from the event loop ---

    def open(self, params: SamplingParams, prompt_len: int) -> TokenSequence:
        """A new, empty sequence; it holds no memory until its first job runs.

        Raises:
            InvalidRequestError: for a parameter that names a token outside the vocabulary.
        """
        for token_id in params.logit_bias:
            self._check_token(f"logit_bias[{token_id}]", token_id)
        self._num_opened += 1
        sequence = TokenSequence(params, prompt_len, self._runner.new_sequence(), self._num_opened)
        self._sequences[sequence.order] = sequence
        return sequence

    async def run(self, job: Job, extra_len: int = 0) -> Any:
        """The job's result; `extra_len` tokens may be added to its sequence meanwhile.

        Raises:
            SpecwireError: what the job failed with; other jobs are not affected.
        """
        self._check_job(job, extra_len)
        if self._closing:
            raise ServiceUnavailableError("the service is shutting down")
        future = job.future = asyncio.get_running_loop().create_future()
        self._inbox.put(lambda: self._start(job))
        return await future  # the thread may have taken it off the job by now

    def close_sequence(self, sequence: TokenSequence) -> None:
        """Drop the sequence's jobs and free its memory, before the next step."""
        del self._sequences[sequence.order]
        self._inbox.put(lambda: self._drop(sequence))

    def close(self) -> None:
        """End the thread after the running step; open jobs fail with ServiceUnavailableError."""
        self._closing = True
        self._inbox.put(lambda: None)
        self._thread.join()

    def status(self) -> EngineStatus:
        """Counts now."""
        return EngineStatus(
            len(self._sequences),
            len(self._jobs),
            self._num_steps,
            self._num_tokens,
            self._scheduler.num_preemptions,
            self._scheduler.num_hit_tokens,
        )

    def load(self, job: Job) -> Load:
        """As seen by a job that has just ended."""
        sequence_ns, token_ns = self._costs.rates
        return Load(
            self._num_waiting, job.num_companions, int(self._costs.base), int(sequence_ns), int(token_ns)
        )

    def _check_job(self, job: Job, extra_len: int) -> None:
        length = job.base_len + len(job.token_ids)
        if job.base_len < 0:
            raise InvalidRequestError("base_len", job.base_len, "must be at least 0")
        if length == 0:
            raise InvalidRequestError("token_ids", [], "at least one token must be committed")
        if length + extra_len > self._context_len:
            raise ContextLengthError(
                "token_ids", length + extra_len, f"over the context of {self._context_len}"
            )
        for i, token_id in enumerate(job.token_ids):
            self._check_token(f"token_ids[{i}]", token_id)

    def _check_token(self, name: str, token_id: int) -> None:
        if not 0 <= token_id < self._runner.vocab_size:
            raise InvalidRequestError(
                name, token_id, f"is outside the vocabulary of {self._runner.vocab_size}"
            )

    # --- on the engine thread ---

    @torch.inference_mode()
    def _run(self) -> None:
        while not self._closing:
            self._take_orders(timeout_s=0 if self._jobs else None)
            self._gather()
            if self._jobs:
                self._step()
        self._take_orders(timeout_s=0)
        for job in self._jobs:
            self._fail(job, ServiceUnavailableError("the service is shutting down"))
        self._answer()

    def _take_orders(self, timeout_s: float | None) -> None:
        """Everything in the inbox; waits for the first order, for ever when `timeout_s` is None."""
        try:
            self._inbox.get(timeout_s != 0, timeout_s)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass
        self._answer()

    def _gather(self) -> None:
        """Wait a moment for streams that are about to be back, rather than leave them a whole step behind.

        Without it streams fall into groups that take turns, and each waits for the steps of all groups. One
        group instead of two saves what a step costs beside its tokens; so long is it worth waiting.
        """
        while self._jobs and self._expected and not self._closing:
            left_ns = self._wait_until_ns - time.time_ns()
            if left_ns <= 0:
                self._expected.clear()
            else:
                self._take_orders(timeout_s=left_ns / 1e9)

    def _expect(self, answered: list[TokenSequence], step_ns: int, now_ns: int) -> None:
        """Note who was answered, and how long it is worth waiting for them."""
        patience_ns = min(step_ns, int(self._costs.base))
        for sequence in answered:
            sequence.answered_ns = now_ns
        self._expected = {sequence for sequence in answered if 0 < sequence.away_ns <= patience_ns}
        longest_ns = max((sequence.away_ns for sequence in self._expected), default=0)
        self._wait_until_ns = now_ns + min(patience_ns, 2 * longest_ns)

    def _start(self, job: Job) -> None:
        sequence = job.sequence
        if sequence.closed:
            return
        if sequence.answered_ns:
            sequence.away_ns = job.arrived_ns - sequence.answered_ns
        self._expected.discard(sequence)
        try:
            job.start()
        except SpecwireError as error:
            self._fail(job, error)
        else:
            self._jobs.append(job)

    def _drop(self, sequence: TokenSequence) -> None:
        sequence.closed = True
        self._expected.discard(sequence)
        for job in [job for job in self._jobs if job.sequence is sequence]:
            self._fail(job, RequestCancelledError("the stream was closed"))
            self._jobs.remove(job)
        sequence.cache.release()

    def _step(self) -> None:
        started_ns = time.time_ns()
        step = self._scheduler.plan(self._jobs, started_ns)
        for job in step.jobs:
            job.started_ns = job.started_ns or started_ns
        try:
            self._forward(step.jobs, step.feeds)
        except Exception as error:
            self._isolate(step, error)
        finished_ns = time.time_ns()
        self._costs.add((len(step.jobs), step.num_tokens), max(1, finished_ns - started_ns))
        self._finish(step.jobs, started_ns, finished_ns)

    def _forward(self, jobs: list[Job], feeds: list[Feed]) -> None:
        logits = self._runner.forward(feeds)
        self._num_steps += 1
        self._num_tokens += sum(len(feed.token_ids) for feed in feeds)
        if self._prefix_sharing:
            for job in jobs:
                job.sequence.cache.remember(job.sequence.tokens)
        ready = [job for job, feed in zip(jobs, feeds, strict=True) if feed.num_rows]
        if ready:
            self._consume(ready, logits)

    def _isolate(self, step: Step, error: Exception) -> None:
        """A step failed: run its jobs one by one, so that only those at fault do."""
        jobs, feeds = step.jobs, step.feeds
        untouched = all(
            job.result is None and len(job.pending) >= len(feed.token_ids)
            for job, feed in zip(jobs, feeds, strict=True)
        )
        if len(jobs) == 1 or not untouched:
            for job in jobs:
                self._fail(job, error)
            return
        for job, feed in zip(jobs, feeds, strict=True):
            try:
                self._forward([job], [feed])
            except Exception as own_error:
                self._fail(job, own_error)

    def _finish(self, jobs: list[Job], started_ns: int, finished_ns: int) -> None:
        answered = [job for job in jobs if job.done]
        self._num_waiting = len(self._jobs) - len(answered)
        for job in jobs:
            job.forward_ns += finished_ns - started_ns
            job.finished_ns = finished_ns
            job.num_companions = len(jobs)
        for job in answered:
            self._resolve(job, job.result)
        self._answer()
        self._expect([job.sequence for job in answered], finished_ns - started_ns, finished_ns)
        self._jobs = [job for job in self._jobs if not job.done]

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, SpecwireError):
            log.error("a forward pass failed", exc_info=error)
            error = InternalError("the forward pass failed; the service's log has the details")
        job.result = error
        self._resolve(job, error)

    def _resolve(self, job: Job, result: Any) -> None:
        if job.future is not None:
            self._answers.append((job.future, result))
            job.future = None

    def _answer(self) -> None:
        """Hand over what was resolved, all of it at once: waking the event loop costs more than an answer."""
        answers, self._answers = self._answers, []
        for loop in {future.get_loop() for future, _ in answers}:
            ours = [(future, result) for future, result in answers if future.get_loop() is loop]
            loop.call_soon_threadsafe(_settle, ours)


def _settle(answers: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in answers:
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
