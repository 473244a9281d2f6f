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
from specwire.completion import Stage, Timing
from specwire.estimate import clock

_OF_CALL = {
    Stage.DRAFT: (Stage.DRAFT_QUEUE, Stage.DRAFT, Stage.DRAFT_NETWORK),
    Stage.VERIFY: (Stage.VERIFY_QUEUE, Stage.VERIFY, Stage.VERIFY_NETWORK),
}


class Ledger:
    """The stages of one generation, in nanoseconds by the stopwatch.

    Attributes:
        arrived_ns: when its request arrived.
        closed_ns: when it ended; 0 before.
    """

    def __init__(self) -> None:
        self.arrived_ns = self._cursor_ns = clock.stopwatch_ns()
        self._stage = Stage.COORDINATOR
        self._spent = dict.fromkeys(Stage, 0)
        self._taken = dict.fromkeys(Stage, 0)
        self._ahead_ns = 0
        self._first_token_ns = 0
        self.closed_ns = 0

    @property
    def elapsed_s(self) -> float:
        """Since the arrival, in seconds."""
        return (clock.stopwatch_ns() - self.arrived_ns) / 1e9

    def switch(self, stage: Stage) -> None:
        """From now on time belongs to this stage."""
        now_ns = self.closed_ns or clock.stopwatch_ns()
        self._spent[self._stage] += now_ns - self._cursor_ns
        self._cursor_ns, self._stage = now_ns, stage

    def settle(self, cost: Cost) -> None:
        """The call that the present stage, `DRAFT` or `VERIFY`, waited for has ended.

        What it does not account for is the coordinator's.
        """
        queue, work, network = _OF_CALL[self._stage]
        now_ns = clock.stopwatch_ns()
        left_ns = now_ns - self._cursor_ns
        for stage, spent_ns in (
            (queue, cost.queue_ns),
            (work, cost.forward_ns + cost.handling_ns),
            (network, cost.network_ns),
            (Stage.FAILOVER, cost.lost_ns),
        ):
            self._spent[stage] += spent_ns
            left_ns -= spent_ns
        self._spent[Stage.COORDINATOR] += left_ns
        if self._stage is Stage.DRAFT:
            self._ahead_ns += cost.ahead_ns
        self._cursor_ns, self._stage = now_ns, Stage.COORDINATOR

    def fail(self) -> None:
        """The call that the present stage waited for has failed for good."""
        self._stage = Stage.FAILOVER
        self.switch(Stage.COORDINATOR)

    def close(self) -> None:
        """The generation ends now: all later readings are the same."""
        self.switch(self._stage)
        self.closed_ns = self._cursor_ns

    def emit_first_token(self) -> None:
        """Note the time of the first token; later calls do nothing."""
        self._first_token_ns = self._first_token_ns or clock.stopwatch_ns() - self.arrived_ns

    def take(self) -> Mapping[Stage, int]:
        """What was charged since the last call of this, by stage, for counters that go up all the time."""
        self.switch(self._stage)
        new = {stage: spent_ns - self._taken[stage] for stage, spent_ns in self._spent.items()}
        self._taken = dict(self._spent)
        return new

    def timing(self) -> Timing:
        """All stages until now."""
        self.switch(self._stage)
        return Timing(
            total_ms=(self._cursor_ns - self.arrived_ns) / 1e6,
            time_to_first_token_ms=self._first_token_ns / 1e6,
            ahead_ms=self._ahead_ns / 1e6,
            **{f"{stage}_ms": spent_ns / 1e6 for stage, spent_ns in self._spent.items()},
        )
