"""A worker's end of its line: limits are the parent's, and the parent says what all workers do together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from coordinator.admission import Pause, SlotSource
from specwire.config.services import CoordinatorConfig
from specwire.errors import SpecwireError
from specwire.rpc.line import Line, Methods, join
from specwire.security.bearer import Principal
from specwire.telemetry.metrics import Group, Readings
from specwire.v1 import generation_pb2

if TYPE_CHECKING:
    from coordinator.servicer import GenerationServicer

_STATUS_S = 2.0
LOOK_S = 0.05
"""Between two looks at the choices of a worker that leads: what it tries, the others try within this time."""


class Report(NamedTuple):
    """A worker at present.

    Attributes:
        status: its own `GetStatusResponse`, serialised.
        readings: of its groups of metrics, in their order.
        labels: that all samples of a group have.
        learnt: as of `SharedChoice.exported`; empty where it follows.
    """

    status: bytes
    readings: Sequence[Readings]
    labels: Sequence[dict[str, str]]
    learnt: bytes


class RemoteAdmission(SlotSource):
    """The parent's admission; the counts are those of this worker's generations."""

    num_running = num_waiting = num_paused = 0

    def __init__(self, line: Line) -> None:
        self._line = line

    async def wait(self, client: Principal, *, has_begun: bool) -> None:
        """See `SlotSource`."""
        self.num_waiting += 1
        admitted = self._line.start("admit", client, has_begun)
        try:
            await asyncio.shield(admitted)
        except asyncio.CancelledError:
            _when_done(admitted, lambda: self._return(client, None))
            self._line.cancel(admitted)  # which may be too late
            raise
        finally:
            self.num_waiting -= 1
        self.num_running += 1

    def release(self, client: Principal, turn_s: float | None) -> None:
        """See `SlotSource`."""
        self.num_running -= 1
        self._return(client, turn_s)

    @contextlib.contextmanager
    def paused(self, slot: Pause) -> Iterator[None]:
        """See `SlotSource`."""
        self.num_paused += 1
        pause = self._line.start("pause", slot.client)
        _when_done(pause, slot.end_pause)
        try:
            yield
        finally:
            self.num_paused -= 1
            self._line.cancel(pause)

    def _return(self, client: Principal, turn_s: float | None) -> None:
        self._line.tell("release", client, turn_s)


def _when_done(call: asyncio.Future[Any], do: Callable[[], None]) -> None:
    """Unless it fails, or is cancelled in time."""
    call.add_done_callback(lambda done: None if done.exception() else do())


class Worker:
    """One process of a coordinator.

    Attributes:
        config: of the coordinator; its limits are those of all workers together.
        header: tells clients which worker answers, and of how many.
        admission: for its generations.
    """

    def __init__(self) -> None:
        self.config: CoordinatorConfig
        self.header: tuple[str, str]
        self.admission: RemoteAdmission
        self._line: Line
        self._servicer: GenerationServicer
        self._groups: Sequence[Group[Any]] = ()
        self._leading: asyncio.Task[None] | None = None

    @classmethod
    async def join(cls, fd: int) -> Self:
        """The worker at this end of an inherited line."""
        self = cls()
        methods: Methods = {"report": self._report, "follow": self._follow, "lead": self._lead}
        self._line, number, self.config = await join(fd, methods)
        self.header = ("x-specwire-worker", f"{number}/{self.config.workers}")
        self.admission = RemoteAdmission(self._line)
        return self

    def begin(self, servicer: GenerationServicer, groups: Sequence[Group[Any]]) -> None:
        """Report what this servicer does, and these metrics."""
        self._servicer = servicer
        self._groups = groups

    async def whole_status(self, own: generation_pb2.GetStatusResponse) -> generation_pb2.GetStatusResponse:
        """The status of all workers together; this one's own where the parent does not answer."""
        with contextlib.suppress(TimeoutError, SpecwireError):
            async with asyncio.timeout(_STATUS_S):
                return generation_pb2.GetStatusResponse.FromString(await self._line.call("status"))
        return own

    async def _report(self) -> Report:
        return Report(
            self._servicer.status().SerializeToString(),
            [group.readings() for group in self._groups],
            [dict(group.fixed) for group in self._groups],
            self._servicer.choice.exported() if self._leading else b"",
        )

    def _follow(self, learnt: bytes) -> None:
        if self._leading:
            self._leading.cancel()
            self._leading = None
        self._servicer.choice.follow(learnt)

    def _lead(self) -> None:
        self._servicer.choice.lead()
        self._leading = asyncio.create_task(self._tell_choices())

    async def _tell_choices(self) -> None:
        """Have the others follow at once when an option changes; what is learnt otherwise is in reports."""
        choice = self._servicer.choice
        before = None
        while True:
            if (now := choice.options) != before:
                before = now
                self._line.tell("learnt", choice.exported())
            await asyncio.sleep(LOOK_S)
