"""The parent's end: one admission, one status and one set of metrics for all workers.

Slots are held by the worker whose generations run, and are free again when its process ends. What workers
report is merged: numbers of streams are sums, and counts of processes that have ended stay in them. One
worker, one of those with the most streams, learns how much to draft; the others follow it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from coordinator import metrics
from coordinator.admission import Admission
from coordinator.workers.merging import merged_status
from coordinator.workers.worker import Report
from specwire.cli import workers
from specwire.config.services import CoordinatorConfig
from specwire.errors import ServiceUnavailableError
from specwire.rpc import listening
from specwire.rpc.line import Methods
from specwire.security.bearer import Principal
from specwire.telemetry import endpoint
from specwire.telemetry.metrics import TRACING, Group, Metric, Readings, merged, read_off, remaining
from specwire.v1 import generation_pb2

_FRESH_S = 0.5
"""Longest wait for the reports that a status or a scrape is made from; then the last ones count."""
_LEAD_RATIO = 2
"""A worker with over so many times the streams of the one that learns takes its place."""
_TABLES: tuple[Sequence[Metric[Any]], ...] = (metrics.TABLE, TRACING)
"""Of the groups of metrics that each worker reports."""


@contextlib.asynccontextmanager
async def serving(config: CoordinatorConfig) -> AsyncIterator[str]:
    """Run a coordinator of `config.workers` processes; yields its `HOST:PORT`, and ends gracefully.

    Raises:
        ConfigError: a worker cannot start, with its own reason, or an address cannot be bound.
    """
    with listening.reserved(config.address) as address:
        crew = Crew(replace(config, address=address))
        async with workers.kept(crew.workers, config.grace_s), crew.observed():
            yield address


class Crew:
    """All workers of a coordinator.

    Attributes:
        admission: the limits of the config, which hold for all workers together.
        workers: by number.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self.admission = Admission(max_running=config.max_running, max_waiting=config.max_waiting)
        self._config = config
        self._started_s = time.monotonic()
        self._learnt = b""
        self._leader: CoordinatorWorker | None = None
        self._num_finished = 0  # in processes that have ended
        self._remaining: list[Readings] | None = None  # of processes that have ended
        self.workers = [CoordinatorWorker(self, number, config) for number in range(1, config.workers + 1)]

    @contextlib.asynccontextmanager
    async def observed(self) -> AsyncIterator[None]:
        """Serve metrics while the body runs; all workers serve."""
        first, *_ = await asyncio.gather(*(worker.check() for worker in self.workers))
        groups = [
            Group(read_off(table), lambda place=place: self._readings(place), labels)  # type: ignore[misc]
            for place, (table, labels) in enumerate(zip(_TABLES, first.labels, strict=True))
        ]
        async with endpoint.serving_groups(self._config, groups, self):
            yield

    @property
    def pids(self) -> Sequence[int]:
        """See `endpoint.Processes`."""
        return [os.getpid(), *(worker.service.process.pid for worker in self.workers)]

    async def refresh(self) -> None:
        """Have all workers report, but those that take too long."""

        async def check(worker: CoordinatorWorker) -> None:
            with contextlib.suppress(TimeoutError, ServiceUnavailableError):
                async with asyncio.timeout(_FRESH_S):
                    await worker.check()

        await asyncio.gather(*map(check, self.workers))

    async def status(self) -> bytes:
        """Of all workers together: a `GetStatusResponse`."""
        await self.refresh()
        parts = [generation_pb2.GetStatusResponse.FromString(report.status) for report in self._reports()]
        status = merged_status(parts)
        status.num_finished += self._num_finished
        status.uptime_ms = int((time.monotonic() - self._started_s) * 1e3)
        return status.SerializeToString()

    # --- for workers ----------------------------------------------------------------------------------

    def reported(self, worker: CoordinatorWorker) -> None:
        """A worker has a new report: that of the one that learns is passed on, or another takes its place."""
        leader = self._leader
        if leader is None or worker.num_running > _LEAD_RATIO * leader.num_running:
            self._leader = worker
            worker.lead(self._learnt)
        elif worker.report is not None:
            self.learnt(worker, worker.report.learnt)

    def learnt(self, worker: CoordinatorWorker, learnt: bytes) -> None:
        """The worker that leads has learnt, or tries another option; what others say is out of date."""
        if worker is not self._leader:
            return
        self._learnt = learnt or self._learnt
        for other in self.workers:
            if other is not worker:
                other.follow(self._learnt)

    def ended(self, worker: CoordinatorWorker, last: Report) -> None:
        """The process of a worker has ended."""
        if self._leader is worker:
            self._leader = None
        self._num_finished += generation_pb2.GetStatusResponse.FromString(last.status).num_finished
        counts = [remaining(*each) for each in zip(_TABLES, last.readings, strict=True)]
        if self._remaining is not None:
            pairs = zip(counts, self._remaining, strict=True)
            counts = [merged(*each) for each in zip(_TABLES, pairs, strict=True)]
        self._remaining = counts

    # --------------------------------------------------------------------------------------------------

    def _reports(self) -> list[Report]:
        """The last ones of the processes that run; first that of the worker that learns."""
        leader = [self._leader] if self._leader else []
        ordered = dict.fromkeys([*leader, *self.workers])
        return [worker.report for worker in ordered if worker.report is not None]

    def _readings(self, place: int) -> Readings:
        """Of a group of metrics, by its place."""
        parts = [report.readings[place] for report in self._reports()]
        if self._remaining is not None:
            parts.append(self._remaining[place])
        return merged(_TABLES[place], parts)


class CoordinatorWorker(workers.Worker):
    """A worker as the parent knows it.

    Attributes:
        report: the last one of the process at present; None before the first.
    """

    def __init__(self, crew: Crew, number: int, config: CoordinatorConfig) -> None:
        self._crew = crew
        self._held: Counter[Principal] = Counter()
        self.report: Report | None = None
        super().__init__("coordinator.workers", number, config)

    @property
    def num_running(self) -> int:
        """Generations that run there."""
        return self._held.total()

    def methods(self) -> Methods:
        """See `workers.Worker`."""
        return {
            "admit": self._admit,
            "release": self._release,
            "pause": self._hold_pause,
            "status": self._crew.status,
            "learnt": self._learnt,
        }

    async def check(self) -> Report:
        """Receive a report. Errors as for `workers.Worker`."""
        report: Report = await self.line.call("report")
        self.report = report
        self._crew.reported(self)
        return report

    def lost(self) -> None:
        """Free its slots; what it has counted remains."""
        for client in [*self._held.elements()]:
            self._release(client, None)
        last, self.report = self.report, None
        if last is not None:
            self._crew.ended(self, last)

    def lead(self, learnt: bytes) -> None:
        """Have it learn, beginning with what another has learnt, and with nothing if that is empty."""
        self.follow(learnt)
        self.line.tell("lead")

    def follow(self, learnt: bytes) -> None:
        """Have it adopt what another has learnt, once it serves."""
        if learnt and self.report is not None:
            self.line.tell("follow", learnt)

    async def _admit(self, client: Principal, has_begun: bool) -> None:
        await self._crew.admission.wait(client, has_begun=has_begun)
        self._held[client] += 1

    def _release(self, client: Principal, turn_s: float | None) -> None:
        self._held[client] -= 1
        self._held += Counter()  # drop zeros
        self._crew.admission.release(client, turn_s)

    async def _hold_pause(self, client: Principal) -> None:
        """Return when there are too many others."""
        pause = _Pause(client)
        with self._crew.admission.paused(pause):
            await pause.has_ended.wait()

    def _learnt(self, learnt: bytes) -> None:
        self._crew.learnt(self, learnt)


class _Pause:
    def __init__(self, client: Principal) -> None:
        self.client = client
        self.has_ended = asyncio.Event()

    def end_pause(self) -> None:
        self.has_ended.set()
