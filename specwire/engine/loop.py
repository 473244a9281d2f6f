"""The batching loop: one thread that owns the model, its cache and every sequence.

    submit(job) ─▶ inbox ─▶ ready jobs ─▶ one packed forward ─▶ consume(jobs, logits) ─▶ futures
                                 ▲                                        │
                                 └──────── jobs that want more ◀──────────┘

Every step takes what is ready from all sequences, prefill and verify alike, up to a token budget.
What to do with the logits is the service's business: it hands in `consume`. No locks: callers talk to
the thread through one queue, and only the thread touches sequences.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from specwire.core import SamplingParams
from specwire.engine.kv_cache import PagePool, SequenceCache
from specwire.engine.runner import Feed
from specwire.engine.thread import ComputeThread
from specwire.errors import (
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    PrefixMismatchError,
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


@dataclass(eq=False)
class TokenSequence:
    """One open sequence: the tokens known so far and the cache that covers a prefix of them.

    `order` counts sequences as they are opened: the higher, the younger.

    tokens  ├── committed ──────────────┤├─ draft ─┤
    cache   ├── computed ──────────┤                     cache.length <= len(tokens)
    """

    params: SamplingParams
    prompt_len: int
    cache: SequenceCache
    order: int
    tokens: list[int] = field(default_factory=list)
    closed: bool = False

    @property
    def seed(self) -> int:
        """The stream's seed; streams without one are refused when they open."""
        assert self.params.seed is not None
        return self.params.seed

    def rebase(self, base_len: int, token_ids: Sequence[int]) -> None:
        """Roll back to `base_len` tokens, then commit `token_ids` after them.

        The cache keeps at most all but the last committed token, since that one's logits are what the
        next draft position needs.

        Raises:
            PrefixMismatchError: fewer than `base_len` tokens are held; nothing is changed.
        """
        if base_len > len(self.tokens):
            raise PrefixMismatchError(base_len, len(self.tokens))
        del self.tokens[base_len:]
        self.tokens.extend(token_ids)
        self.cache.truncate(min(self.cache.length, base_len, len(self.tokens) - 1))


@dataclass(eq=False)
class Job:
    """A few forward passes on one sequence, then a result. Subclasses say which.

    What is to be run next follows from the sequence: its tokens that the cache lacks. So a sequence
    that lost its cache to another one just runs them again.

    Attributes:
        num_rows: of the tokens to run, how many of the last need logits.
        num_cached_tokens: tokens that a cached prefix held, instead of running them.
        result: set by `consume` when it has seen enough logits.
    """

    sequence: TokenSequence
    base_len: int
    token_ids: Sequence[int]
    num_rows: int = 0
    arrived_ns: int = field(default_factory=time.time_ns)
    started_ns: int = 0
    finished_ns: int = 0
    forward_ns: int = 0
    num_cached_tokens: int = 0
    result: Any = None
    future: asyncio.Future[Any] | None = None

    def start(self) -> None:
        """Called once on the engine thread: roll the sequence back and commit."""
        self.sequence.rebase(self.base_len, self.token_ids)

    @property
    def committed_len(self) -> int:
        """Length of the sequence when the job's tokens are committed, drafts not counted."""
        return self.base_len + len(self.token_ids)

    @property
    def pending(self) -> list[int]:
        """Tokens to run next, in order."""
        return self.sequence.tokens[self.sequence.cache.length :]

    @property
    def done(self) -> bool:
        """True when there is a result, or when no logits are wanted and the cache is filled."""
        return self.result is not None or (self.num_rows == 0 and not self.pending)

    @property
    def queue_ns(self) -> int:
        """From arrival to the start of the first forward pass."""
        return self.started_ns - self.arrived_ns


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
        context_len: int,
        thread: ComputeThread,
        prefix_sharing: bool = True,
    ) -> None:
        self._runner = runner
        self._consume = consume
        self._max_num_tokens = max_num_tokens
        self._context_len = context_len
        self._prefix_sharing = prefix_sharing
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._sequences: dict[int, TokenSequence] = {}
        self._num_opened = 0
        self._num_preemptions = 0
        self._num_steps = 0
        self._num_tokens = 0
        self._num_hit_tokens = 0
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
        job.future = asyncio.get_running_loop().create_future()
        self._inbox.put(lambda: self._start(job))
        return await job.future

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
            self._num_preemptions,
            self._num_hit_tokens,
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
            self._take_orders(block=not self._jobs)
            if self._jobs:
                self._step()
        self._take_orders(block=False)
        for job in self._jobs:
            self._fail(job, ServiceUnavailableError("the service is shutting down"))

    def _take_orders(self, block: bool) -> None:
        """Everything in the inbox; may wait for the first order."""
        try:
            self._inbox.get(block=block)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _start(self, job: Job) -> None:
        if job.sequence.closed:
            return
        try:
            job.start()
        except SpecwireError as error:
            self._fail(job, error)
        else:
            self._jobs.append(job)

    def _drop(self, sequence: TokenSequence) -> None:
        sequence.closed = True
        for job in [job for job in self._jobs if job.sequence is sequence]:
            self._fail(job, RequestCancelledError("the stream was closed"))
            self._jobs.remove(job)
        sequence.cache.release()

    def _step(self) -> None:
        jobs, feeds = self._schedule()
        started_ns = time.time_ns()
        for job in jobs:
            job.started_ns = job.started_ns or started_ns
        try:
            self._forward(jobs, feeds)
        except Exception as error:
            self._isolate(jobs, feeds, error)
        self._finish(jobs, started_ns, time.time_ns())

    def _schedule(self) -> tuple[list[Job], list[Feed]]:
        """First come, first served, up to the token budget and as far as memory goes."""
        jobs: list[Job] = []
        feeds: list[Feed] = []
        budget, promised = self._max_num_tokens, 0
        for job in self._jobs:
            cache, num_found = job.sequence.cache, self._adopt_prefix(job)
            if num_found:  # a page that a job above was to write in place may be shared since
                promised = sum(feed.cache.pages_needed(len(feed.token_ids)) for feed in feeds)
            feed = _next_feed(job, budget)
            if feed is None:
                cache.truncate(cache.length - num_found)
                break
            running = {other.sequence.order for other in jobs}
            num_pages = cache.pages_needed(len(feed.token_ids))
            if self._make_room(job.sequence, promised + num_pages, running):
                jobs.append(job)
                feeds.append(feed)
                budget -= len(feed.token_ids)
                promised += num_pages
                job.num_cached_tokens += num_found
                self._num_hit_tokens += num_found
            else:
                cache.truncate(cache.length - num_found)
        return jobs, feeds

    def _adopt_prefix(self, job: Job) -> int:
        """Begin an empty cache with what is known of its tokens; returns how many were found.

        The rows whose logits are wanted are run in any case, and so is at least one token.
        """
        sequence = job.sequence
        if not self._prefix_sharing or sequence.cache.length:
            return 0
        return sequence.cache.adopt(sequence.tokens, len(sequence.tokens) - max(1, job.num_rows))

    def _make_room(self, sequence: TokenSequence, num_pages: int, running: Set[int]) -> bool:
        """Free pages by taking the cache of others, youngest first; they run their tokens again later.

        A sequence gives way to older ones only, unless it idles between rounds. So the oldest one that
        has work always gets on, and nobody waits for a stream that does nothing.
        """
        pool = sequence.cache.pool
        if pool.num_free_pages >= num_pages:
            return True
        waiting = {job.sequence.order for job in self._jobs}
        for victim in sorted(self._sequences.values(), key=lambda other: -other.order):
            gives_way = victim.order > sequence.order or victim.order not in waiting
            if victim is sequence or victim.order in running or not gives_way or not victim.cache.length:
                continue
            victim.cache.truncate(0)
            self._num_preemptions += 1
            if pool.num_free_pages >= num_pages:
                return True
        return False

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

    def _isolate(self, jobs: list[Job], feeds: list[Feed], error: Exception) -> None:
        """A step failed: run its jobs one by one, so that only those at fault do."""
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
        for job in jobs:
            job.forward_ns += finished_ns - started_ns
            job.finished_ns = finished_ns
            if job.done:
                self._resolve(job, job.result)
        self._jobs = [job for job in self._jobs if not job.done]

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, SpecwireError):
            log.error("a forward pass failed", exc_info=error)
            error = InternalError("the forward pass failed; the service's log has the details")
        job.result = error
        self._resolve(job, error)

    def _resolve(self, job: Job, result: Any) -> None:
        future = job.future
        if future is None:
            return
        job.future = None
        future.get_loop().call_soon_threadsafe(_settle, future, result)


def _next_feed(job: Job, budget: int) -> Feed | None:
    """The job's next piece within the budget: all of it, or a chunk that leaves the wanted rows whole."""
    pending = job.pending
    if len(pending) <= budget:
        return Feed(job.sequence.cache, pending, job.num_rows)
    size = min(budget, len(pending) - job.num_rows)
    return Feed(job.sequence.cache, pending[:size], 0) if size > 0 else None


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
