"""Where the time of one generation goes: each moment since its request arrived belongs to exactly one stage.

    arrival ─┬ admission ┬ coordinator ┬ a call: queue, work, network of draft or verify ┬ rule ┬ emit ┬─▶ now
             └───────────┴─────────────┴────────────────── cursor ───────────────────────┴──────┴──────┘

A cursor moves from the arrival to now, and each time that it moves, the time in between is charged. So stages
add up to the wall time by construction. All figures of stages are read from here: the completion's timing,
metrics, attributes of spans.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.cost import Cost
from specwire import clock
from specwire.completion import Stage, Timing

_COORDINATOR, _FAILOVER = Stage.COORDINATOR.number, Stage.FAILOVER.number
_OF_CALL = {
    Stage.DRAFT.number: (Stage.DRAFT_QUEUE.number, Stage.DRAFT.number, Stage.DRAFT_NETWORK.number),
    Stage.VERIFY.number: (Stage.VERIFY_QUEUE.number, Stage.VERIFY.number, Stage.VERIFY_NETWORK.number),
}
"""Where the time of a call goes: queue, work, network."""


class Ledger:
    """The stages of one generation, in nanoseconds by the stopwatch.

    Attributes:
        arrived_ns: when its request arrived.
        closed_ns: when it ended; 0 before.
    """

    def __init__(self) -> None:
        self.arrived_ns = self._cursor_ns = clock.stopwatch_ns()
        self._stage = _COORDINATOR
        self._spent = [0] * len(Stage)
        self._ahead_ns = 0
        self._first_token_ns = 0
        self.closed_ns = 0

    @property
    def charged_s(self) -> float:
        """From the arrival to the latest moment that is charged, in seconds."""
        return (self._cursor_ns - self.arrived_ns) / 1e9

    @property
    def spent_ns(self) -> Mapping[Stage, int]:
        """What is charged so far, by stage; for counters that go up all the time."""
        return dict(zip(Stage, self._spent, strict=True))

    def switch(self, stage: Stage) -> int:
        """From now on time belongs to this stage; returns the time now."""
        return self._charge(stage.number)

    def settle(self, cost: Cost, then: Stage) -> None:
        """The call that the present stage, `DRAFT` or `VERIFY`, waited for has ended, and `then` begins.

        What the cost does not account for is the coordinator's.
        """
        spent = self._spent
        queue, work, network = _OF_CALL[self._stage]
        now_ns = clock.stopwatch_ns()
        work_ns = cost.forward_ns + cost.handling_ns
        spent[queue] += cost.queue_ns
        spent[work] += work_ns
        spent[network] += cost.network_ns
        spent[_FAILOVER] += cost.lost_ns
        accounted_ns = cost.queue_ns + work_ns + cost.network_ns + cost.lost_ns
        spent[_COORDINATOR] += now_ns - self._cursor_ns - accounted_ns
        self._cursor_ns, self._stage = now_ns, then.number
        self._ahead_ns += cost.ahead_ns

    def fail(self) -> None:
        """The call that the present stage waited for has failed for good."""
        self._stage = _FAILOVER
        self._charge(_COORDINATOR)

    def close(self) -> None:
        """The generation ends now: all later readings are the same."""
        self.closed_ns = self._charge(self._stage)

    def emit_first_token(self) -> None:
        """The first token was committed at the latest moment that is charged; later calls do nothing."""
        self._first_token_ns = self._first_token_ns or self._cursor_ns - self.arrived_ns

    def timing(self) -> Timing:
        """All stages until now; of a call that is under way, everything is its work."""
        now_ns = self.closed_ns or clock.stopwatch_ns()
        spent = self._spent.copy()
        spent[self._stage] += now_ns - self._cursor_ns
        return Timing(
            total_ms=(now_ns - self.arrived_ns) / 1e6,
            time_to_first_token_ms=self._first_token_ns / 1e6,
            ahead_ms=self._ahead_ns / 1e6,
            **{f"{stage}_ms": spent_ns / 1e6 for stage, spent_ns in zip(Stage, spent, strict=True)},
        )

    def _charge(self, then: int) -> int:
        now_ns = self.closed_ns or clock.stopwatch_ns()
        self._spent[self._stage] += now_ns - self._cursor_ns
        self._cursor_ns, self._stage = now_ns, then
        return now_ns
