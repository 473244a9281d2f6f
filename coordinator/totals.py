"""What the requests of a coordinator add up to, and a log line of each, without text or a client's name.

A request is looked at when it has ended, however it did; nothing happens for a token or a round.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

import grpc.aio

from specwire import errors
from specwire.completion import Completion, FinishReason
from specwire.estimate import clock
from specwire.telemetry.metrics import HistogramData

log = logging.getLogger(__name__)

OK, CANCELLED, INTERNAL = "OK", "CANCELLED", "INTERNAL"
DEADLINE_EXCEEDED = errors.DeadlineExceededError.status
_LONGEST_WAY_S = 0.2
_KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type)]
STATUSES = {kind.status for kind in _KINDS if issubclass(kind, errors.SpecwireError)} - {"UNKNOWN"}
"""How a request may end beside OK; a cancel by the client is among them."""

# OpenTelemetry's advice for these histograms, with finer steps for tokens that speculation makes cheap.
_DURATION_BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_ADVISED_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_PER_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.0075, *_ADVISED_PER_TOKEN)
_WAIT_BOUNDS = (0.001, 0.01, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Counted(Protocol):
    """A generation that has begun, as `session.Session` is one."""

    @property
    def ended(self) -> bool:
        """Whether it came to its end."""
        ...

    def completion(self, draft_unavailable: str) -> Completion:
        """What it has come to by now."""
        ...


@dataclass
class _Request:
    """One call of Generate.

    Attributes:
        generation: None until it has a place.
        draft_unavailable: asked for at the end.
        trace_id: empty where nothing is traced.
    """

    arrived_ns: int
    generation: Counted | None = None
    draft_unavailable: Callable[[], str] = str
    trace_id: str = ""

    def forget(self) -> None:
        """Let go of the generation: cancelled timers hold this context for as long as they would have run."""
        self.generation, self.draft_unavailable = None, str


_request: ContextVar[_Request] = ContextVar("specwire_request")


class Totals:
    """Counts over all requests that have ended. What a generation did until it failed counts too.

    Attributes:
        requests: by status and finish reason, which is empty unless the status is OK.
        stage_ms: by stage, in milliseconds.
        drafted_per_position, accepted_per_position: from position 0.
        duration_s, first_token_s, per_token_s: of requests that ended well, in seconds from their arrival.
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

    def add(self, status: str, seconds: float, done: Completion | None) -> None:
        """A request has ended.

        Args:
            status: OK, or one of `STATUSES`.
            seconds: since it arrived.
            done: what came of it; None if it never had a place.
        """
        ended_well = status == OK and done is not None
        self.requests[status, done.finish_reason.value if done and ended_well else ""] += 1
        if done is not None:
            self._add_work(done)
            self.wait_s.add(max(0.0, seconds - done.timing.total_ms / 1e3))
            if ended_well:
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


def watch(generation: Counted, draft_unavailable: Callable[[], str], traceparent: str) -> None:
    """The request that is being served has become this generation."""
    request = _request.get(None)
    if request is not None:
        request.generation, request.draft_unavailable = generation, draft_unavailable
        request.trace_id = traceparent[3:35]


Method = TypeVar("Method", bound=Callable[..., Any])


def counted(method: Method) -> Method:
    """Count a servicer's method, `async def (self, requests, context)`, in `self.totals`; log its calls."""

    @functools.wraps(method)
    async def wrapped(self: Any, requests: Any, context: Any) -> Any:
        request = _Request(clock.stopwatch_ns())
        _request.set(request)
        status = OK
        try:
            return await method(self, requests, context)
        except BaseException as error:
            status = status_of(error)
            if status == CANCELLED and _is_over(context.time_remaining()):
                status = DEADLINE_EXCEEDED
            raise
        finally:
            _end(self.totals, status, request)
            request.forget()

    return wrapped  # type: ignore[return-value]


def status_of(error: BaseException) -> str:
    """The gRPC status that an exception ends a request with."""
    if isinstance(error, errors.SpecwireError):
        return error.status if error.status in STATUSES else INTERNAL
    gone = isinstance(error, asyncio.CancelledError | grpc.aio.InternalError)  # the latter: in mid-write
    return CANCELLED if gone else INTERNAL


def _is_over(remaining_s: float | None) -> bool:
    """Whether a deadline has passed, on the client's clock at least: whoever waited for it hangs up, sooner
    than we see it pass by as long as the request was on its way."""
    return remaining_s is not None and remaining_s < _LONGEST_WAY_S


def _end(totals: Totals, status: str, request: _Request) -> None:
    done = request.generation.completion(request.draft_unavailable()) if request.generation else None
    seconds = (clock.stopwatch_ns() - request.arrived_ns) / 1e9
    if status == CANCELLED and request.generation and request.generation.ended:
        status = OK  # a client that has its last message hangs up, and may be quicker than we are
    totals.add(status, seconds, done)
    if log.isEnabledFor(logging.INFO):
        facts = {**_facts(status, seconds, done), **({"trace": request.trace_id} if request.trace_id else {})}
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
