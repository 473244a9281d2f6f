"""What one call to a model service cost: its outcome, and where its time went. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from specwire.core import Load, Timings


class CallOutcome(enum.StrEnum):
    """How a call to a model service ended."""

    READY = "ready"
    """No request was needed: a prepared proposal was there."""
    BEGUN = "begun"
    """A proposal arrived that the service had begun to prepare before the request reached it."""
    ASKED = "asked"
    """An answer arrived, and the work for it began with the request."""
    TIMED_OUT = "timed_out"
    """No answer arrived within the plan's patience."""
    UNAVAILABLE = "unavailable"
    """There was no service to call."""
    LOST = "lost"
    """The service, or the stream to it, failed during the call."""


_HITS = (CallOutcome.READY, CallOutcome.BEGUN)


@dataclass(slots=True)
class Cost:
    """What one call to a model service cost.

    `queue_ns`, `forward_ns`, `handling_ns`, `network_ns` and `lost_ns` add up to `wall_ns`.

    Attributes:
        outcome: None if there was no call, since none was planned or an earlier one is still unanswered.
        wall_ns: measured here.
        queue_ns: waiting at the service, before the first of its passes and between them.
        forward_ns: its passes since the request arrived there.
        handling_ns: the rest of the time at the service; all of it where no answer arrived in time.
        network_ns: the rest of the round trip.
        lost_ns: failed attempts, and the search for another service.
        ahead_ns: passes for the proposal before it was requested; not part of `wall_ns`.
        request_bytes, response_bytes: of the two messages.
        num_cached_tokens: found in the service's cache instead of being computed.
        num_prefill_tokens: committed tokens that the draft has to run before it can propose: those of the
            request that it had not proposed itself.
        load: of the verify service, as it reports it.
        prepared_by: traceparent of the span of the proposal's preparation; empty if there is none.
    """

    outcome: CallOutcome | None = None
    wall_ns: int = 0
    queue_ns: int = 0
    forward_ns: int = 0
    handling_ns: int = 0
    network_ns: int = 0
    lost_ns: int = 0
    ahead_ns: int = 0
    request_bytes: int = 0
    response_bytes: int = 0
    num_cached_tokens: int = 0
    num_prefill_tokens: int = 0
    load: Load | None = None
    prepared_by: str = ""

    @property
    def prepared(self) -> bool:
        """The proposal was there before the call."""
        return self.outcome is CallOutcome.READY

    @property
    def is_hit(self) -> bool:
        """The proposal was there before the call, or begun."""
        return self.outcome in _HITS

    @property
    def timed_out(self) -> bool:
        """A proposal was requested, and did not arrive within the plan's patience."""
        return self.outcome is CallOutcome.TIMED_OUT

    @property
    def draft_unavailable(self) -> bool:
        """There was no draft to call, or it was lost during the call."""
        return self.outcome in (CallOutcome.UNAVAILABLE, CallOutcome.LOST)


def split(outcome: CallOutcome, wall_ns: int, timings: Timings, *about: Any) -> Cost:
    """Where the time of an answered call went.

    The service's clock may run a little faster than ours, and its figures come from elsewhere: each is
    limited to what is left of the wall time.

    Args:
        timings: of the answer: durations by the service's own clock.
        about: the cost's other fields, from `request_bytes` on.
    """
    queue_ns, forward_ns, residence_ns, stall_ns, ahead_ns = timings
    residence_ns = min(max(0, residence_ns), wall_ns)
    queue_ns = min(max(0, queue_ns + stall_ns), residence_ns)
    forward_ns = min(max(0, forward_ns), residence_ns - queue_ns)
    handling_ns, network_ns = residence_ns - queue_ns - forward_ns, wall_ns - residence_ns
    return Cost(outcome, wall_ns, queue_ns, forward_ns, handling_ns, network_ns, 0, max(0, ahead_ns), *about)
