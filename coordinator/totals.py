"""Counts over the requests of a coordinator, and a log line for each, without text or a client's name.

A request is counted when it has ended, successfully or not; there is no work for a token or a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import grpc.aio

from specwire import errors
from specwire.completion import Completion, FinishReason
from specwire.estimate import clock
from specwire.telemetry.metrics import HistogramData

log = logging.getLogger(__name__)

OK, CANCELLED, INTERNAL = "OK", "CANCELLED", "INTERNAL"
DEADLINE_EXCEEDED = errors.DeadlineExceededError.status
_MAX_ONE_WAY_S = 0.2
"""A request takes no longer from its client to the coordinator."""
_KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type)]
STATUSES = {kind.status for kind in _KINDS if issubclass(kind, errors.SpecwireError)} - {"UNKNOWN"}
"""How a request may end other than OK; cancelled by its client is one of them."""

# The bounds that OpenTelemetry advises, with finer steps for tokens that speculation makes cheap.
_DURATION_BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_ADVISED_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_PER_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.0075, *_ADVISED_PER_TOKEN)
_WAIT_BOUNDS = (0.001, 0.01, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class CountedGeneration(Protocol):
    """A generation that has begun, such as a `session.Session`."""

    @property
    def ended(self) -> bool:
        """Whether it has reached a stop condition."""
        ...

    def completion(self, draft_unavailable: str) -> Completion:
        """The generation so far."""
        ...


@dataclass
class CallRecord:
    """One call of Generate; its servicer fills in the generation when that begins.

    Attributes:
        arrived_ns: by the stopwatch.
        generation: None until it begins.
        draft_unavailable: why the draft was not there for a part of it; called at the end.
        trace_id: empty without tracing.
    """

    arrived_ns: int
    generation: CountedGeneration | None = None
    draft_unavailable: Callable[[], str] = str
    trace_id: str = ""

    def begin(
        self, generation: CountedGeneration, draft_unavailable: Callable[[], str], traceparent: str
    ) -> None:
        """The call has been admitted, and this is its generation."""
        self.generation, self.draft_unavailable = generation, draft_unavailable
        self.trace_id = traceparent[3:35]


class Totals:
    """Counts over all requests that have ended. What a generation did before it failed counts too.

    Attributes:
        requests: by status and finish reason, which is empty unless the status is OK.
        stage_ms: by stage, in milliseconds.
        drafted_per_position, accepted_per_position: from position 0.
        duration_s, first_token_s, per_token_s: of successful requests, in seconds from their arrival.
        wait_s: from the arrival to the start of the generation, in seconds.
    """

    def __init__(self) -> None:
        keys = [(OK, reason.value) for reason in FinishReason] + [(status, "") for status in sorted(STATUSES)]
        self.requests: Counter[tuple[str, ...]] = Counter(dict.fromkeys(keys, 0))
        self.prompt_tokens = self.output_tokens = self.hit_tokens = 0
        self.rounds = self.prepared = self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self.without_draft = 0
        self.drafted_per_position: list[int] = []
        self.accepted_per_position: list[int] = []
        self.stage_ms = dict.fromkeys(("draft", "verify", "queue", "rule", "network"), 0.0)
        self.duration_s = HistogramData(_DURATION_BOUNDS)
        self.first_token_s = HistogramData(_FIRST_TOKEN_BOUNDS)
        self.per_token_s = HistogramData(_PER_TOKEN_BOUNDS)
        self.wait_s = HistogramData(_WAIT_BOUNDS)

    @contextlib.contextmanager
    def record(self, remaining_s: Callable[[], float | None]) -> Iterator[CallRecord]:
        """Count and log the call that the body serves.

        Args:
            remaining_s: until the client's deadline; None without one.
        """
        call = CallRecord(clock.stopwatch_ns())
        status = OK
        try:
            yield call
        except BaseException as error:
            status = status_of(error)
            if status == CANCELLED and _has_passed(remaining_s()):
                status = DEADLINE_EXCEEDED
            raise
        finally:
            _end(self, status, call)

    def add(self, status: str, seconds: float, done: Completion | None) -> None:
        """A request has ended.

        Args:
            status: OK, or one of `STATUSES`.
            seconds: since it arrived.
            done: its generation; None if that never began.
        """
        succeeded = status == OK and done is not None
        self.requests[status, done.finish_reason.value if done and succeeded else ""] += 1
        if done is not None:
            self._add_work(done)
            self.wait_s.add(max(0.0, seconds - done.timing.total_ms / 1e3))
            if succeeded:
                self._add_times(seconds, done)

    def _add_work(self, done: Completion) -> None:
        speculation, timing = done.speculation, done.timing
        self.prompt_tokens += done.usage.prompt_tokens
        self.output_tokens += done.usage.completion_tokens
        self.hit_tokens += done.usage.cached_tokens
        self.rounds += speculation.num_rounds
        self.prepared += speculation.num_prepared
        self.drafts += sum(speculation.acceptance_histogram)
        self.draft_tokens += speculation.num_draft_tokens
        self.accepted_tokens += speculation.num_accepted_tokens
        self.without_draft += bool(speculation.draft_unavailable)
        self.drafted_per_position = _added(self.drafted_per_position, speculation.drafted_per_position)
        self.accepted_per_position = _added(self.accepted_per_position, speculation.accepted_per_position)
        for stage in self.stage_ms:
            self.stage_ms[stage] += getattr(timing, f"{stage}_ms")

    def _add_times(self, seconds: float, done: Completion) -> None:
        timing, num_tokens = done.timing, done.usage.completion_tokens
        after_first_s = (timing.total_ms - timing.time_to_first_token_ms) / 1e3
        self.duration_s.add(seconds)
        if num_tokens:
            self.first_token_s.add(max(0.0, seconds - after_first_s))
        if num_tokens > 1:
            self.per_token_s.add(after_first_s / (num_tokens - 1))


def _added(sums: list[int], more: tuple[int, ...]) -> list[int]:
    return [ours + theirs for ours, theirs in zip_longest(sums, more, fillvalue=0)]


def status_of(error: BaseException) -> str:
    """The gRPC status that an exception ends a request with."""
    if isinstance(error, errors.SpecwireError):
        return error.status if error.status in STATUSES else INTERNAL
    # The client hung up; during a write grpc.aio says so with its InternalError.
    is_cancelled = isinstance(error, asyncio.CancelledError | grpc.aio.InternalError)
    return CANCELLED if is_cancelled else INTERNAL


def _has_passed(remaining_s: float | None) -> bool:
    """Whether a deadline has passed on the client's clock: the client cancels then, and we see the deadline
    pass later than that by the time that the request was on its way."""
    return remaining_s is not None and remaining_s < _MAX_ONE_WAY_S


def _end(totals: Totals, status: str, call: CallRecord) -> None:
    generation = call.generation
    done = generation.completion(call.draft_unavailable()) if generation else None
    seconds = (clock.stopwatch_ns() - call.arrived_ns) / 1e9
    if status == CANCELLED and generation and generation.ended:
        status = OK  # the client has its last message, and hung up before the call ended here
    totals.add(status, seconds, done)
    if log.isEnabledFor(logging.INFO):
        facts = {**_facts(status, seconds, done), **({"trace": call.trace_id} if call.trace_id else {})}
        log.info("request %s", " ".join(f"{name}={value}" for name, value in facts.items()))


def _facts(status: str, seconds: float, done: Completion | None) -> dict[str, object]:
    facts: dict[str, object] = {"status": status, "duration_ms": round(seconds * 1e3)}
    if done is None:
        return facts
    if status == OK:
        facts["finish_reason"] = done.finish_reason.value
    return facts | {
        "wait_ms": round(seconds * 1e3 - done.timing.total_ms),
        "first_token_ms": round(done.timing.time_to_first_token_ms),
        "prompt_tokens": done.usage.prompt_tokens,
        "output_tokens": done.usage.completion_tokens,
        "cached_tokens": done.usage.cached_tokens,
        "rule": done.rule.value,
        "rounds": done.speculation.num_rounds,
        "draft_tokens": done.speculation.num_draft_tokens,
        "accepted_tokens": done.speculation.num_accepted_tokens,
        "prepared": done.speculation.num_prepared,
    }
