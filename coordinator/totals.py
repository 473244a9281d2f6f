"""Counts over the requests of a coordinator, and a log line for each, without text or a client's name.

Tokens, rounds and stages are counted as they happen, and a request when it has ended, successfully or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import grpc.aio

from coordinator import spans
from coordinator.beams.answer import BeamAnswer
from coordinator.ledger import Ledger
from coordinator.session import Session
from coordinator.tally import Tally
from specwire import clock, errors
from specwire.completion import Completion, FinishReason, Stage, Timing
from specwire.telemetry import logs
from specwire.telemetry import semantics as names
from specwire.telemetry.metrics import HistogramData
from specwire.telemetry.semantics import stage_attribute
from specwire.telemetry.tracing import NO_SPAN, Span, described

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
_STAGE_BOUNDS = (0.001, 0.004, 0.016, 0.064, 0.256, 1.024, 4.096, 16.384, 65.536)
_LOGGED_MS = 0.05
"""Shorter stages are left out of the log line, where they would be 0.0."""


@dataclass
class CallRecord:
    """One call of Generate; its servicer fills in the generation when that begins.

    Attributes:
        ledger: its stages since it arrived.
        span: from the arrival to the end.
        request_id: the client's own; empty without one.
        remaining_s: until its deadline; None without one.
        generation: None until it begins.
    """

    totals: Totals
    ledger: Ledger
    span: Span = NO_SPAN
    request_id: str = ""
    remaining_s: Callable[[], float | None] = lambda: None
    generation: Session | BeamAnswer | None = None
    _last_chunk_s: float | None = None

    def begin(self, generation: Session | BeamAnswer) -> None:
        """The call has been admitted, and this is its generation."""
        self.generation = generation
        self.totals.prompt_tokens += generation.request.num_prompt_tokens

    def count(self, num_tokens: int) -> None:
        """A message with so many tokens is sent."""
        if not num_tokens:
            return
        totals, now_s = self.totals, self.ledger.charged_s
        totals.output_tokens += num_tokens
        if self._last_chunk_s is None:
            totals.first_token_s.add(now_s, trace_id=self.span.trace_id)
        else:
            gap_s = (now_s - self._last_chunk_s) / num_tokens
            totals.inter_token_s.add(gap_s, num_tokens, self.span.trace_id)
        self._last_chunk_s = now_s


class Totals:
    """Counts over all requests.

    Attributes:
        requests: that have ended, by status and finish reason, which is empty unless the status is OK.
        prompt_tokens: of requests that have begun.
        output_tokens: sent.
        tally: of all rounds.
        without_draft: requests that had to do without a draft for a part.
        duration_s: by status, in seconds from the arrival to the end.
        first_token_s: from the arrival to the first token, in seconds.
        inter_token_s: between tokens after the first; those of a chunk share the time since the one before.
        per_token_s: the mean of that over each request that succeeded.
        wait_s: for a slot, of requests whose generation began.
        request_stage_s: by stage, of each request that has ended, in seconds.
    """

    def __init__(self) -> None:
        keys = [(OK, reason.value) for reason in FinishReason] + [(status, "") for status in sorted(STATUSES)]
        self.requests: Counter[tuple[str, ...]] = Counter(dict.fromkeys(keys, 0))
        self.prompt_tokens = self.output_tokens = self.without_draft = 0
        self.tally = Tally()
        self._ledgers: set[Ledger] = set()
        self._ended_ns = Counter(dict.fromkeys(Stage, 0))
        self.duration_s: dict[tuple[str, ...], HistogramData] = defaultdict(
            partial(HistogramData, _DURATION_BOUNDS)
        )
        self.first_token_s = HistogramData(_FIRST_TOKEN_BOUNDS)
        self.inter_token_s = HistogramData(_PER_TOKEN_BOUNDS)
        self.per_token_s = HistogramData(_PER_TOKEN_BOUNDS)
        self.wait_s = HistogramData(_WAIT_BOUNDS)
        self.request_stage_s: dict[tuple[str, ...], HistogramData] = {
            (stage.value,): HistogramData(_STAGE_BOUNDS) for stage in Stage
        }

    @contextlib.contextmanager
    def record(self, call: CallRecord) -> Iterator[None]:
        """Count, trace and log the call that the body serves."""
        self._ledgers.add(call.ledger)
        status, refused = OK, dict[str, str]()
        try:
            yield
        except BaseException as error:
            status = _status_of_call(call, error)
            if isinstance(error, errors.InvalidRequestError):
                refused = logs.refused(error)
            if status != OK:
                call.span.fail(status, described(error))
            raise
        finally:
            call.ledger.close()
            done, timing = call.generation.completion() if call.generation else None, call.ledger.timing()
            self._end(call, status, done, timing)
            _report(call, status, done, timing, refused)

    @property
    def stage_ns(self) -> dict[Stage, int]:
        """By stage, of all requests: those that run count up to the latest moment that is charged."""
        total_ns = self._ended_ns.copy()
        for ledger in self._ledgers:
            total_ns.update(ledger.spent_ns)
        return total_ns

    def _end(self, call: CallRecord, status: str, done: Completion | None, timing: Timing) -> None:
        """Count a request that has ended; `done` is None if its generation never began."""
        self._ledgers.discard(call.ledger)
        self._ended_ns.update(call.ledger.spent_ns)
        self.requests[status, done.finish_reason.value if done and status == OK else ""] += 1
        self.duration_s[status,].add(timing.total_ms / 1e3, trace_id=call.span.trace_id)
        for stage, spent_ms in timing.stages.items():
            self.request_stage_s[stage.value,].add(spent_ms / 1e3)
        if done is None:
            return
        self.without_draft += bool(done.speculation.draft_unavailable)
        self.wait_s.add(timing.admission_ms / 1e3)
        num_tokens = done.usage.completion_tokens
        if status == OK and num_tokens > 1 and not done.hypotheses:  # which all come at once
            after_first_s = (done.timing.total_ms - done.timing.time_to_first_token_ms) / 1e3
            self.per_token_s.add(after_first_s / (num_tokens - 1))


def status_of(error: BaseException) -> str:
    """The gRPC status that an exception ends a request with."""
    if isinstance(error, errors.SpecwireError):
        return error.status if error.status in STATUSES else INTERNAL
    # The client hung up; during a write grpc.aio says so with its InternalError.
    is_cancelled = isinstance(error, asyncio.CancelledError | grpc.aio.InternalError)
    return CANCELLED if is_cancelled else INTERNAL


def _status_of_call(call: CallRecord, error: BaseException) -> str:
    status = status_of(error)
    if status != CANCELLED:
        return status
    if call.generation and call.generation.ended:
        return OK  # the client has its last message, and hung up before the call ended here
    # A client cancels when the deadline passes on its clock; here it passes later, by the time that the
    # request was on its way.
    remaining_s = call.remaining_s()
    has_passed = remaining_s is not None and remaining_s < _MAX_ONE_WAY_S
    return DEADLINE_EXCEEDED if has_passed else CANCELLED


def _report(
    call: CallRecord, status: str, done: Completion | None, timing: Timing, refused: dict[str, str]
) -> None:
    """On its span, and in the log, with what the client has to change."""
    # Every stage that took any time; they add up to the span's duration.
    stages = {stage_attribute(stage): spent_ms for stage, spent_ms in timing.stages.items() if spent_ms}
    call.span.set({**stages, names.AHEAD_MS: timing.ahead_ms})
    if done is not None:
        call.span.set(spans.of_generation(done, has_ended=status == OK))
    call.span.end(clock.epoch_ns(call.ledger.closed_ns))
    if log.isEnabledFor(logging.INFO):
        ids = {"trace_id": call.span.trace_id, "request_id": call.request_id}
        known = {name: value for name, value in ids.items() if value}
        log.info("request", extra=_facts(status, done, timing) | refused | known)


def _facts(status: str, done: Completion | None, timing: Timing) -> dict[str, object]:
    stages = {f"{stage}_ms": round(ms, 1) for stage, ms in timing.stages.items() if ms >= _LOGGED_MS}
    facts: dict[str, object] = {"status": status, "duration_ms": round(timing.total_ms, 1)} | stages
    if done is None:
        return facts
    if status == OK:
        facts["finish_reason"] = done.finish_reason.value
    return facts | {
        "first_token_ms": round(done.timing.time_to_first_token_ms, 1),
        "prompt_tokens": done.usage.prompt_tokens,
        "output_tokens": done.usage.completion_tokens,
        "cached_tokens": done.usage.cached_tokens,
        "rule": done.rule.value,
        "rounds": done.speculation.num_rounds,
        "draft_tokens": done.speculation.num_draft_tokens,
        "accepted_tokens": done.speculation.num_accepted_tokens,
        "prepared": done.speculation.num_prepared,
    }
