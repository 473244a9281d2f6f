"""The batching loop: one thread that owns the model, its cache and every sequence.

    submit(jobs) ─▶ inbox ─▶ queues ─▶ one packed forward ─▶ apply(jobs, answer) ─▶ sinks
                              ▲                                      │
                              └───── jobs that want another pass ◀───┘

Every step takes what is ready from all sequences, prefill and verify alike (`schedule.py` decides). What to
do with the logits is up to the service: it passes in a `Decider`. No locks: callers put commands into one
inbox, and only the thread touches queues and caches.

*Background* jobs work ahead on what may be requested. They run when no foreground job waits, and beside
foreground jobs as far as that adds next to nothing to the step. *Spare work* runs
between steps, while no foreground job waits.

The parts: `queues.py` (jobs under way, streams about to return), `schedule.py` (the next step), `progress.py`
(a hung device), `replies.py` (results on their way to callers).
"""

from __future__ import annotations

import logging
import math
import operator
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from specwire import clock
from specwire.core import MAX_NUM_DRAFT_TOKENS, Load, SamplingParams, check_adapter, check_token_id
from specwire.engine.batch import Feeds
from specwire.engine.cache import prefix
from specwire.engine.counts import EngineStatus
from specwire.engine.device import (
    NO_DRAFTING,
    Decider,
    DeviceLostError,
    Runner,
    SpareWork,
    StepHook,
)
from specwire.engine.jobs import MAX_CATCH_UP_TOKENS, Job, TokenSequence, check_job
from specwire.engine.progress import LEAST_LIMIT_S, Watchdog
from specwire.engine.queues import Gathering, JobQueues
from specwire.engine.replies import Replies, Sink
from specwire.engine.schedule import Scheduler, Step
from specwire.engine.threads import ComputeThread, ThreadCount
from specwire.errors import (
    RequestCancelledError,
    ResourceExhaustedError,
    ServiceUnavailableError,
    SpecwireError,
)
from specwire.proposals.estimate.costs import CostModel

log = logging.getLogger(__name__)

_MAX_DELAY = 0.1
"""Background jobs may lengthen a step by at most this share of its time without them."""
_MAX_LOSSES = 2
"""A job that was running when the device was lost more often than this fails: it may be the cause."""


class Engine:
    """Runs jobs of all sequences in shared forward passes, on a thread of its own.

    Attributes:
        watchdog: detects a device that hangs, while it is watched.
    """

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
        vocab_size: int | None = None,
        hook: StepHook | None = None,
        threads: ThreadCount | None = None,
        costs: CostModel | None = None,
        draft_costs: CostModel | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        """Starts to run.

        Args:
            hook: it has been loaded.
            vocab_size: token ids that jobs and parameters name are below it; None for the model's own.
            step_timeout_s: time limit of a step while the cost of steps is unknown.
            threads: that passes run on; None leaves them as they are.
            costs: of passes, by sequences and tokens; None if they were not measured.
            draft_costs: of passes of what drafts after a step, by nodes; likewise.
            adapters: names of those that the model has, in their order.
        """
        self._runner, self._decider = runner, decider
        self._prefix_sharing = prefix_sharing
        self._drafting = NO_DRAFTING  # of the last step
        self._context_len = context_len
        self._vocab_size = vocab_size or runner.vocab_size
        self._adapters = adapters
        self._step_timeout_s = step_timeout_s
        self._hook, self._hook_ns = hook, 0
        self._threads = threads
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gathered: list[Callable[[], None]] | None = None  # event loop only
        self._sequences: set[TokenSequence] = set()
        self._num_opened = 0
        self._num_forks = 0
        self._num_waiting = self._prefill_ns = self._draft_prefill_ns = 0
        self._closing = False
        self._costs = costs or CostModel(2)  # of a step: its sequences, its tokens
        self._draft_costs = draft_costs or CostModel(2)  # see `measure_draft`
        self._counts = EngineStatus()
        self._replies = Replies()
        self._queues = JobQueues(self._replies)
        self._gathering = Gathering()
        self.watchdog = Watchdog(self._replies)
        self._scheduler = Scheduler(
            self._sequences,
            max_num_tokens=max_num_tokens,
            max_prefill_tokens=max_prefill_tokens,
            prefix_sharing=prefix_sharing,
        )
        self._spare_work: SpareWork | None = None
        self._thread = thread
        self._thread.start(self._run)

    # --- called from the event loop ---

    def open(
        self, params: SamplingParams, prompt_len: int, encoder_len: int = 0, vocab_limit: int = 0
    ) -> TokenSequence:
        """A new, empty sequence; it holds no memory until its first job runs.

        Args:
            encoder_len: first tokens, which are the input of an encoder.
            vocab_limit: of a draft, the target's token ids are below it; biases of those that the draft lacks
                are left out, since it never proposes them.

        Raises:
            InvalidRequestError: for a parameter that names a token outside the vocabulary, or an adapter that
                the model does not have.
        """
        check_adapter(params.adapter, self._adapters)
        lacking = {i for i in params.logit_bias if self._vocab_size <= i < vocab_limit}
        if lacking:
            known = {i: bias for i, bias in params.logit_bias.items() if i not in lacking}
            params = replace(params, logit_bias=known)
        for token_id in params.logit_bias:
            check_token_id(f"logit_bias[{token_id}]", token_id, self._vocab_size)
        return self._open(params, prompt_len, encoder_len)

    def open_fork(self, sequence: TokenSequence) -> TokenSequence:
        """A new sequence of the same stream, empty until its first job, which names its parent, starts."""
        self._num_forks += 1
        encoder_len = sequence.cache.encoder_len
        fork = self._open(sequence.params, sequence.prompt_len, encoder_len, is_fork=True)
        fork.grammar = sequence.grammar
        return fork

    def _open(
        self, params: SamplingParams, prompt_len: int, encoder_len: int, *, is_fork: bool = False
    ) -> TokenSequence:
        self._num_opened += 1
        cache = self._runner.new_sequence()
        cache.adapter = self._adapters.index(params.adapter) + 1 if params.adapter else 0
        version = self._spare_work.version if self._spare_work else 0
        cache.root = prefix.root(params.cache_salt, version=version, adapter=cache.adapter)
        cache.encoder_len = encoder_len
        sequence = TokenSequence(params, prompt_len, cache, self._num_opened, is_fork=is_fork)
        self._sequences.add(sequence)
        return sequence

    def expect(self, job: Job, sink: Sink) -> None:
        """The result of a job that begins by itself goes to this sink; see `Job.following`."""
        self._replies.expect(job, sink)

    def submit(self, job: Job, sink: Sink, extra_len: int = 0, *, background: bool = False) -> None:
        """Run a job; the sink gets its result, together with others that are there at the same time.

        A background job gives way to all others. It is cancelled when another job on its sequence arrives,
        and fails when memory is short.

        Args:
            extra_len: tokens that may be added to its sequence meanwhile.

        Raises:
            SpecwireError: it cannot be run at all.
        """
        vocab_size = max(self._vocab_size, job.num_translated)
        check_job(job, extra_len, context_len=self._context_len, vocab_size=vocab_size)
        if self._closing:
            raise ServiceUnavailableError("the service is shutting down")
        self.watchdog.check()
        self._replies.expect(job, sink)
        self.run_soon(lambda: self._start(job, background))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What the body submits and closes reaches the thread at once, before any further step."""
        commands: list[Callable[[], None]] = []
        self._gathered = commands

        def run_all() -> None:
            for command in commands:
                command()

        try:
            yield
        finally:
            self._gathered = None
            if commands:
                self._inbox.put(run_all)

    def run_soon(self, command: Callable[[], None]) -> None:
        """Run a function on the thread, after what was submitted before and before any further step; it must
        not raise."""
        if self._gathered is None:
            self._inbox.put(command)
        else:
            self._gathered.append(command)

    def promote(self, job: Job) -> None:
        """Make a background job a foreground job, since its result is waited for now."""
        self.run_soon(lambda: self._queues.promote(job))

    def replace_with_fork(self, sequence: TokenSequence, fork: TokenSequence) -> None:
        """Let a sequence go on with its fork's tokens, cache and jobs, and close the fork."""
        self._forget(fork)
        self.run_soon(lambda: self._replace_with_fork(sequence, fork))

    def close_sequence(self, sequence: TokenSequence) -> None:
        """Cancel the sequence's jobs and free its memory, before the next step."""
        self._forget(sequence)
        self.run_soon(lambda: self._close_sequence(sequence))

    def _forget(self, sequence: TokenSequence) -> None:
        self._sequences.remove(sequence)
        self._num_forks -= sequence.is_fork

    def add_spare_work(self, work: SpareWork) -> None:
        """Do this work from now on, while no foreground job waits."""
        self.run_soon(lambda: setattr(self, "_spare_work", work))

    def check_device(self) -> None:
        """The device was seen to be lost: recover it now rather than when the next job arrives."""
        self._inbox.put(self._check_device)

    def close(self) -> None:
        """End the thread after the running step; open jobs fail with ServiceUnavailableError."""
        self._closing = True
        self._inbox.put(lambda: None)
        self._thread.join()

    def status(self) -> EngineStatus:
        """Counts now."""
        return replace(
            self._counts,
            step_sizes=[*self._counts.step_sizes],
            num_sequences=len(self._sequences) - self._num_forks,
            num_requests=len(self._queues),
            num_preemptions=self._scheduler.num_preemptions,
            num_hit_tokens=self._scheduler.num_hit_tokens,
            num_waiting=min(self._num_waiting, len(self._queues.foreground)),
            silent_s=self.watchdog.silent_s,
        )

    def load(self, job: Job | None = None) -> Load:
        """The load that a job met which has just ended, if one is given, and the fitted cost of steps."""
        pass_ns = (self._costs.known_base, *self._costs.rates)
        draft_ns = (self._draft_costs.base, *self._draft_costs.rates)
        costs = map(int, (*pass_ns, *draft_ns, self._prefill_ns, self._draft_prefill_ns))
        return Load(self._num_waiting, job.batch_size if job else 1, *costs)

    # --- on the engine thread ---

    @torch.inference_mode()
    def _run(self) -> None:
        while not self._closing:
            self.watchdog.beat()
            timeout_s: float | None = 0
            if not self._queues:
                timeout_s = self._spare_work.wait_s() if self._spare_work else None
            self._drain_inbox(timeout_s)
            self.watchdog.beat()
            while wait_s := self._gathering_s():
                self._drain_inbox(timeout_s=wait_s)
            if self._queues:
                self._step()
            work = self._spare_work
            is_idle = not (self._queues.foreground or self._closing) and self._inbox.empty()
            if is_idle and work is not None and work.wait_s() == 0:
                # One piece: a request that comes now waits for no more.
                self.watchdog.beat(work.usual_s, LEAST_LIMIT_S if work.usual_s else self._step_timeout_s)
                work.do()
        self._drain_inbox(timeout_s=0)
        self._queues.fail(self._queues, ServiceUnavailableError("the service is shutting down"))
        self._replies.flush()

    def _drain_inbox(self, timeout_s: float | None) -> None:
        """Run all commands in the inbox; waits for the first one, without limit when `timeout_s` is None."""
        if timeout_s != 0:
            self._replies.flush()
        try:
            self._inbox.get(timeout_s != 0, timeout_s)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass
        if not self._replies.is_held:
            self._replies.flush()

    def _gathering_s(self) -> float:
        """How long the next step may still wait for streams that are about to return, in seconds."""
        if not (self._queues.foreground or self._queues.num_going_on) or self._closing:
            return 0.0
        return self._gathering.remaining_s()

    def _start(self, job: Job, background: bool) -> None:
        if job.sequence.closed:
            self._replies.fail(job, RequestCancelledError("the sequence was closed"))
            return
        if background and not job.goes_on:
            self._gathering.expected.discard(job.sequence)  # no step waits for its stream
        else:
            self._gathering.arrived(job)
        if not background:
            self._queues.cancel_background(job.sequence, "another request came")
        self._begin(job, background)

    def _begin(self, job: Job, background: bool) -> None:
        try:
            job.start()
        except SpecwireError as error:
            self._replies.fail(job, error)
        else:
            self._queues.add(job, background=background)

    def _replace_with_fork(self, sequence: TokenSequence, fork: TokenSequence) -> None:
        if sequence.closed:
            fork.cache.release()
            return
        self._queues.cancel_background(sequence, "the stream went on")
        sequence.replace_with_fork(fork)
        self._queues.move(fork, sequence)

    def _close_sequence(self, sequence: TokenSequence) -> None:
        sequence.closed = True
        self._gathering.expected.discard(sequence)
        self._queues.cancel(sequence, "the stream was closed")
        sequence.cache.release()

    def _step(self) -> None:
        started_ns = clock.stopwatch_ns()
        if self._threads is not None:
            self._threads.before_step(started_ns)
        step = self._begin_step(started_ns)
        if step is not None:
            self._end_step(step, started_ns)

    def _begin_step(self, started_ns: int) -> Step | None:
        """Plan a step and run it; None when nothing could run, or the device was lost."""
        if self._hook is not None:
            self._hook.before_step([*self._queues], self._costs)
            self._hook_ns = clock.stopwatch_ns() - started_ns
        step = self._plan(started_ns)
        if not step.jobs:
            self._queues.fail(self._queues.background, ResourceExhaustedError("no memory to work ahead in"))
            self._replies.flush()
            return None
        for job in step.jobs:
            job.started_ns = job.started_ns or started_ns
        # The watchdog is told how long it may take; before the first one its cost is unknown.
        bound_ns = self._costs.bound((len(step.jobs), step.num_tokens))
        bound_ns += MAX_NUM_DRAFT_TOKENS * self._draft_costs.bound((0, 0))
        least_s = self._runner.longest_pause_s if bound_ns else self._step_timeout_s
        self.watchdog.beat(bound_ns / 1e9, least_s)
        self._drafting = NO_DRAFTING
        try:
            self._run_passes(step.jobs, step.feeds)
        except DeviceLostError as error:
            self._recover(step.jobs, error)
            return None
        return step

    def _run_passes(self, jobs: Sequence[Job], feeds: Feeds) -> None:
        """Run all jobs in one pass; if it fails, one by one, so that only jobs at fault fail.

        Raises:
            DeviceLostError: what all caches held is gone.
        """
        try:
            self._forward(jobs, feeds)
        except DeviceLostError:
            raise
        except Exception as error:
            is_untouched = all(
                job.result is None and len(job.pending) >= len(feed.token_ids)
                for job, feed in zip(jobs, feeds, strict=True)
            )
            if len(jobs) > 1 and is_untouched:
                for job, feed in zip(jobs, feeds, strict=True):
                    self._run_passes([job], Feeds.of([feed]))
            else:
                for job in jobs:
                    self._replies.fail(job, error)

    def _forward(self, jobs: Sequence[Job], feeds: Feeds) -> None:
        ready = [job for job, num_rows in zip(jobs, feeds.num_rows, strict=True) if num_rows]
        question = self._decider.ask(ready) if ready else None
        answer = self._runner.run(feeds, question, self._decider.decide)
        self._counts.add_pass(sum(feeds.num_query))
        if self._prefix_sharing:
            for job in jobs:
                sequence = job.sequence
                if sequence.cache.has_unnamed_page:
                    sequence.cache.remember(sequence.chain)
        if ready:
            self._decider.apply(ready, answer)
            self._drafting = self._decider.drafting
        self._runner.end_step()

    def _check_device(self) -> None:
        try:
            self._runner.check()
        except DeviceLostError as error:
            self._recover((), error)

    def _recover(self, jobs: Sequence[Job], error: DeviceLostError) -> None:
        """Empty all caches, whose contents are lost, and wait for the device. Every sequence runs its tokens
        again, which callers notice as a delay only.

        Args:
            jobs: of the step that was lost.
        """
        log.warning("%s; sequences run their tokens again on a new device", error)
        for job in jobs:
            job.num_losses += 1
            if job.num_losses > _MAX_LOSSES:
                problem = f"the device was lost, {job.num_losses} times at this request"
                self._replies.fail(job, ServiceUnavailableError(problem))
        self.watchdog.beat(least_s=math.inf)  # the runner bounds its own recovery
        for sequence in list(self._sequences):
            sequence.cache.truncate(0)
        self._runner.pool.forget_all()
        try:
            self._runner.recover(lambda: not self._closing)
        except SpecwireError as failure:
            log.error("the device did not come back: %s", failure)
            self._queues.fail(self._queues, ServiceUnavailableError("the device did not come back"))
        self._queues.remove([job for job in self._queues if job.done])
        self._replies.flush()

    def _end_step(self, step: Step, started_ns: int) -> None:
        """Learn what the step cost, and answer the jobs that are done."""
        finished_ns = clock.stopwatch_ns()
        num_passes, num_nodes, num_hosted, drafting_ns, draft_prefill_ns = self._drafting
        pass_ns = finished_ns - started_ns - self._hook_ns - drafting_ns - draft_prefill_ns
        self._costs.add((len(step.jobs), step.num_tokens), max(1, pass_ns))
        num_lacking = map(operator.sub, step.feeds.num_query, step.feeds.num_rows)
        num_prefill = sum(num for num in num_lacking if num > MAX_CATCH_UP_TOKENS)
        self._draft_prefill_ns = draft_prefill_ns
        self._prefill_ns = draft_prefill_ns + int(num_prefill * self._costs.rates[1])
        if num_passes:
            features = num_nodes / num_passes, num_hosted / num_passes
            self._draft_costs.add(features, max(1, drafting_ns / num_passes))
        self._counts.add_step(len(step.jobs), finished_ns - started_ns)
        self._finish(step.jobs, started_ns, finished_ns)

    def _plan(self, now_ns: int) -> Step:
        step = self._scheduler.plan([*self._queues.foreground], now_ns)
        if self._queues.background:
            sequence_ns, token_ns = self._costs.rates
            usual_ns = self._costs.predict((len(step.jobs), step.num_tokens))
            spare_ns = _MAX_DELAY * usual_ns if step.jobs else usual_ns
            job_ns = sequence_ns + token_ns
            num_tokens = int(spare_ns / job_ns) if job_ns else step.budget
            others = [*self._queues.background]
            if self._queues.num_going_on:
                self._scheduler.fill(step, [job for job in others if job.goes_on], step.budget)
                others = [job for job in others if not job.goes_on]
            self._scheduler.fill(step, others, num_tokens)
        return step

    def _finish(self, jobs: Sequence[Job], started_ns: int, finished_ns: int) -> None:
        forward_ns = finished_ns - started_ns
        for job in jobs:
            job.forward_ns += forward_ns
        done = [job for job in jobs if job.done]
        for job in done:
            job.finished_ns, job.batch_size = finished_ns, len(jobs)
        background = self._queues.background
        self._num_waiting = len(self._queues.foreground) - sum(job not in background for job in done)
        answered = [
            job.sequence for job in done if not job.following and (job.goes_on or job not in background)
        ]
        self._replies.resolve(done)
        if done and all(job.following for job in done):
            self._replies.hold(finished_ns, forward_ns)
        else:
            self._replies.flush()
        self._gathering.expect(answered, min(forward_ns, int(self._costs.base)), finished_ns)
        self._queues.remove(done)
        for job in done:
            if job.following is not None and not job.sequence.closed:
                job.sequence.answered_ns = finished_ns  # it is running: prompts must not delay it
                self._begin(job.following, background=True)
