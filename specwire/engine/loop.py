"""The batching loop: one thread that owns the model, its cache and every sequence.

    run(job) ─▶ inbox ─▶ ready jobs ─▶ one packed forward ─▶ apply(jobs, answer) ─▶ futures
                             ▲                                       │
                             └──────── jobs that want more ◀─────────┘

*Background* jobs work ahead on what may be asked for. They run when nobody waits, and beside others as far as
that costs those next to nothing.

Every step takes what is ready from all sequences, prefill and verify alike (`schedule.py` says what).
What to do with the logits is the service's business: it hands in a `Decider`. No locks: callers talk to
the thread through one queue, and only the thread touches sequences.

A device that loses its memory is brought back, and every sequence runs its tokens again: nobody notices but
by the time that it takes. One that hangs is noticed by `watch`, and what waits for it fails.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specwire.core import Load, SamplingParams
from specwire.engine.batch import Feed
from specwire.engine.cache import prefix
from specwire.engine.device import Decider, DeviceLostError, Runner
from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.progress import LOOK_EVERY_S, Heartbeat
from specwire.engine.schedule import Scheduler, Step
from specwire.engine.thread import ComputeThread
from specwire.errors import (
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    ResourceExhaustedError,
    ServiceUnavailableError,
    SpecwireError,
)
from specwire.estimate import clock
from specwire.estimate.costs import CostModel

log = logging.getLogger(__name__)


_MAX_DELAY = 0.1
"""Background jobs in a step make it longer by at most this part of what it takes without them."""

NUM_STEP_SIZES = 12
"""Up to 1,024 sequences in a step are told apart, to a power of two."""

_MAX_LOSSES = 2
"""A job whose steps a device did not survive more often than this fails: it may be what kills the device."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counts, as `GetModelInfo` reports them."""

    num_sequences: int
    num_requests: int
    num_steps: int
    num_tokens: int
    num_preemptions: int
    num_hit_tokens: int
    num_waiting: int
    step_ns: int
    step_sizes: tuple[int, ...]
    """[NUM_STEP_SIZES] of the steps so far, those of up to 1, 2, 4, 8, ... and any number of sequences."""
    step_sequences: int
    """Sequences in all steps so far, added up."""
    silent_s: float
    """How long a device that hangs has been silent, in seconds; 0 while it gets on."""


class Engine:
    """Runs jobs of all sequences in shared forward passes, on a thread of its own."""

    def __init__(
        self,
        runner: Runner,
        decider: Decider,
        *,
        max_num_tokens: int,
        max_prefill_tokens: int,
        context_len: int,
        thread: ComputeThread,
        prefix_sharing: bool = True,
        step_timeout_s: float = 60.0,
    ) -> None:
        """Begins to run.

        Args:
            step_timeout_s: longest step while nothing is known of what steps cost.
        """
        self._runner = runner
        self._decider = decider
        self._context_len = context_len
        self._prefix_sharing = prefix_sharing
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._background: list[Job] = []
        self._sequences: set[TokenSequence] = set()
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
        self._num_forks = 0
        self._answers: list[tuple[asyncio.Future[Any], Any]] = []
        self._num_waiting = 0
        self._num_steps = 0
        self._num_tokens = 0
        self._step_ns = 0
        self._step_sizes = [0] * NUM_STEP_SIZES
        self._step_sequences = 0
        self._step_timeout_s = step_timeout_s
        self._progress = Heartbeat()
        self._awaited: set[asyncio.Future[Any]] = set()
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
        return self._open(params, prompt_len)

    def open_fork(self, sequence: TokenSequence) -> TokenSequence:
        """A new sequence of the same stream, empty until its first job, which names its parent, starts."""
        self._num_forks += 1
        return self._open(sequence.params, sequence.prompt_len, is_fork=True)

    def _open(self, params: SamplingParams, prompt_len: int, *, is_fork: bool = False) -> TokenSequence:
        self._num_opened += 1
        cache = self._runner.new_sequence()
        cache.root = prefix.root(params.cache_salt)
        sequence = TokenSequence(params, prompt_len, cache, self._num_opened, is_fork=is_fork)
        self._sequences.add(sequence)
        return sequence

    async def run(self, job: Job, extra_len: int = 0, *, background: bool = False) -> Any:
        """The job's result; `extra_len` tokens may be added to its sequence meanwhile.

        A background job gives way to all others. It is cancelled when another job on its sequence arrives,
        and fails when memory is short.

        Raises:
            SpecwireError: what the job failed with; other jobs are not affected.
        """
        return await self.submit(job, extra_len, background=background)

    def submit(self, job: Job, extra_len: int = 0, *, background: bool = False) -> asyncio.Future[Any]:
        """As `run`, without waiting; only the job's own errors come through the future."""
        self._check_job(job, extra_len)
        if self._closing:
            raise ServiceUnavailableError("the service is shutting down")
        if self._progress.hangs:
            raise self._hung()
        # The thread may have taken it off the job when this returns.
        future = job.future = asyncio.get_running_loop().create_future()
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        self._inbox.put(lambda: self._start(job, background))
        return future

    def hurry(self, job: Job) -> None:
        """A background job that somebody waits for now: it is like any other from then on."""
        self._inbox.put(lambda: self._hurry(job))

    def adopt(self, sequence: TokenSequence, fork: TokenSequence) -> None:
        """Let a sequence go on from what its fork holds; the fork is closed, and its jobs pass over."""
        self._forget(fork)
        self._inbox.put(lambda: self._adopt(sequence, fork))

    def close_sequence(self, sequence: TokenSequence) -> None:
        """Drop the sequence's jobs and free its memory, before the next step."""
        self._forget(sequence)
        self._inbox.put(lambda: self._drop(sequence))

    def _forget(self, sequence: TokenSequence) -> None:
        self._sequences.remove(sequence)
        self._num_forks -= sequence.is_fork

    async def watch(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Look at the engine's progress for ever; when its device hangs, fail what waits for it.

        Args:
            tell: whether it gets on; called when that has changed.
        """
        looked_ns, was_hung = clock.stopwatch_ns(), False
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_ns = clock.stopwatch_ns()
            self._progress.look(bool(self._awaited), (now_ns - looked_ns) / 1e9)
            looked_ns, hangs = now_ns, self._progress.hangs
            if hangs:
                self._fail_awaited(was_hung)
            if hangs != was_hung:
                was_hung = hangs
                await tell(not hangs)

    def _fail_awaited(self, was_hung: bool) -> None:
        error = self._hung()
        if not was_hung:
            log.error("%s: failing %d requests", error, len(self._awaited))
        for future in list(self._awaited):
            if not future.done():
                future.set_exception(error)

    def _hung(self) -> ServiceUnavailableError:
        progress = self._progress
        return ServiceUnavailableError(
            f"the device hangs: one pass takes over {progress.silent_s:.1f} s, {progress.limit_s:.1f} allowed"
        )

    def check_device(self) -> None:
        """Somebody saw the device die: bring it back now rather than when the next job comes."""
        self._inbox.put(self._check_device)

    def close(self) -> None:
        """End the thread after the running step; open jobs fail with ServiceUnavailableError."""
        self._closing = True
        self._inbox.put(lambda: None)
        self._thread.join()

    def status(self) -> EngineStatus:
        """Counts now."""
        return EngineStatus(
            len(self._sequences) - self._num_forks,
            len(self._jobs) + len(self._background),
            self._num_steps,
            self._num_tokens,
            self._scheduler.num_preemptions,
            self._scheduler.num_hit_tokens,
            min(self._num_waiting, len(self._jobs)),
            self._step_ns,
            tuple(self._step_sizes),
            self._step_sequences,
            self._progress.silent_s if self._progress.hangs else 0.0,
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
            self._progress.beat()
            self._take_orders(timeout_s=0 if self._jobs or self._background else None)
            self._progress.beat()
            self._gather()
            if self._jobs or self._background:
                self._step()
        self._take_orders(timeout_s=0)
        for job in self._jobs + self._background:
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
        while wait_s := self._gathering_s():
            self._take_orders(timeout_s=wait_s)

    def _gathering_s(self) -> float:
        """How long the next step may still wait for streams that are about to be back, in seconds."""
        if not self._jobs or not self._expected or self._closing:
            return 0.0
        left_ns = self._wait_until_ns - clock.stopwatch_ns()
        if left_ns <= 0:
            self._expected.clear()
        return max(0, left_ns) / 1e9

    def _expect(self, answered: list[TokenSequence], step_ns: int, now_ns: int) -> None:
        """Note who was answered, and how long it is worth waiting for them."""
        patience_ns = min(step_ns, int(self._costs.base))
        for sequence in answered:
            sequence.answered_ns = now_ns
        self._expected = {sequence for sequence in answered if 0 < sequence.away_ns <= patience_ns}
        longest_ns = max((sequence.away_ns for sequence in self._expected), default=0)
        self._wait_until_ns = now_ns + min(patience_ns, 2 * longest_ns)

    def _start(self, job: Job, background: bool) -> None:
        sequence = job.sequence
        if sequence.closed:
            return
        if not background:
            if sequence.answered_ns:
                sequence.away_ns = job.arrived_ns - sequence.answered_ns
            self._expected.discard(sequence)
            self._cancel(self._background, sequence, "another request came")
        try:
            job.start()
        except SpecwireError as error:
            self._fail(job, error)
        else:
            (self._background if background else self._jobs).append(job)

    def _adopt(self, sequence: TokenSequence, fork: TokenSequence) -> None:
        if sequence.closed:
            fork.cache.release()
            return
        self._cancel(self._background, sequence, "the stream went on")
        sequence.adopt(fork)
        for job in self._jobs + self._background:
            if job.sequence is fork:
                job.sequence = sequence

    def _hurry(self, job: Job) -> None:
        if job in self._background:
            self._background.remove(job)
            self._jobs.append(job)

    def _cancel(self, jobs: list[Job], sequence: TokenSequence, why: str) -> None:
        for job in [job for job in jobs if job.sequence is sequence]:
            self._fail(job, RequestCancelledError(why))
            jobs.remove(job)

    def _drop(self, sequence: TokenSequence) -> None:
        sequence.closed = True
        self._expected.discard(sequence)
        for jobs in (self._jobs, self._background):
            self._cancel(jobs, sequence, "the stream was closed")
        sequence.cache.release()

    def _step(self) -> None:
        started_ns = clock.stopwatch_ns()
        step = self._begin_step(started_ns)
        if step is not None:
            self._end_step(step, started_ns)

    def _begin_step(self, started_ns: int) -> Step | None:
        """Plan and run it; None when there is nothing that could be run, or when it was lost."""
        step = self._plan(started_ns)
        if not step.jobs:
            for job in self._background:
                self._fail(job, ResourceExhaustedError("no memory to work ahead in"))
            self._background.clear()
            self._answer()
            return None
        for job in step.jobs:
            job.started_ns = job.started_ns or started_ns
        self._begin_watched(step)
        try:
            self._run_step(step)
        except DeviceLostError as error:
            self._lost(step.jobs, error)
            return None
        return step

    def _begin_watched(self, step: Step) -> None:
        """What steps cost is not known before the first one."""
        bound_ns = self._costs.bound((len(step.jobs), step.num_tokens))
        least_s = self._runner.longest_pause_s if bound_ns else self._step_timeout_s
        self._progress.beat(bound_ns / 1e9, least_s)

    def _run_step(self, step: Step) -> None:
        try:
            self._forward(step.jobs, step.feeds)
        except DeviceLostError:
            raise
        except Exception as error:
            self._isolate(step, error)

    def _end_step(self, step: Step, started_ns: int) -> None:
        """Learn what it cost, and answer whoever is done."""
        finished_ns = clock.stopwatch_ns()
        self._costs.add((len(step.jobs), step.num_tokens), max(1, finished_ns - started_ns))
        self._count(len(step.jobs), finished_ns - started_ns)
        self._finish(step.jobs, started_ns, finished_ns)

    def _count(self, num_sequences: int, step_ns: int) -> None:
        self._step_ns += step_ns
        self._step_sequences += num_sequences
        self._step_sizes[min((num_sequences - 1).bit_length(), NUM_STEP_SIZES - 1)] += 1

    def _plan(self, now_ns: int) -> Step:
        step = self._scheduler.plan(self._jobs, now_ns)
        if self._background:
            sequence_ns, token_ns = self._costs.rates
            usual_ns = self._costs.predict((len(step.jobs), step.num_tokens))
            spare_ns = _MAX_DELAY * usual_ns if step.jobs else usual_ns
            job_ns = sequence_ns + token_ns
            self._scheduler.fill(step, self._background, int(spare_ns / job_ns) if job_ns else step.budget)
        return step

    def _forward(self, jobs: list[Job], feeds: list[Feed]) -> None:
        ready = [job for job, feed in zip(jobs, feeds, strict=True) if feed.num_rows]
        question = self._decider.ask(ready) if ready else None
        answer = self._runner.run(feeds, question, self._decider.decide)
        self._num_steps += 1
        self._num_tokens += sum(len(feed.token_ids) for feed in feeds)
        if self._prefix_sharing:
            for job in jobs:
                job.sequence.cache.remember(job.sequence.tokens)
        if ready:
            self._decider.apply(ready, answer)
        self._runner.end_step()

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
            except DeviceLostError:
                raise
            except Exception as own_error:
                self._fail(job, own_error)

    def _lost(self, jobs: Sequence[Job], error: DeviceLostError) -> None:
        """What the caches held is gone: all sequences begin again from their tokens, when it is back."""
        log.warning("%s; sequences run their tokens again on a new device", error)
        for job in jobs:
            job.num_losses += 1
            if job.num_losses > _MAX_LOSSES:
                problem = f"the device was lost, {job.num_losses} times at this request"
                self._fail(job, ServiceUnavailableError(problem))
        self._recover()
        self._jobs = [job for job in self._jobs if not job.done]
        self._background = [job for job in self._background if not job.done]
        self._answer()

    def _check_device(self) -> None:
        try:
            self._runner.check()
        except DeviceLostError as error:
            self._lost((), error)

    def _recover(self) -> None:
        self._progress.beat(least_s=math.inf)  # it has a bound of its own
        for sequence in list(self._sequences):
            sequence.cache.truncate(0)
        self._runner.pool.forget_all()
        try:
            self._runner.recover(lambda: not self._closing)
        except SpecwireError as error:
            log.error("the device did not come back: %s", error)
            for job in self._jobs + self._background:
                self._fail(job, ServiceUnavailableError("the device did not come back"))

    def _finish(self, jobs: list[Job], started_ns: int, finished_ns: int) -> None:
        answered = [job for job in jobs if job.done]
        awaited = [job for job in answered if job not in self._background]
        self._num_waiting = len(self._jobs) - len(awaited)
        for job in jobs:
            job.forward_ns += finished_ns - started_ns
            job.finished_ns = finished_ns
            job.num_companions = len(jobs)
        for job in answered:
            self._resolve(job, job.result)
        self._answer()
        self._expect([job.sequence for job in awaited], finished_ns - started_ns, finished_ns)
        self._jobs = [job for job in self._jobs if not job.done]
        self._background = [job for job in self._background if not job.done]

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
