"""`--workers N`: processes that serve one address together, as children of the one that was started.

The parent serves no request. It starts its workers, answers what they ask it over a line to each, restarts
those that end, and kills one that has stopped answering: a process that hangs would keep its connections, and
those that the kernel still gives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from specwire.cli.kept import KeptService
from specwire.cli.process import Service, wait_ready
from specwire.config.flags import CheckedConfig
from specwire.errors import ServiceUnavailableError
from specwire.rpc.line import Line, Methods

log = logging.getLogger(__name__)

_CHECK_S = 1.0
_HUNG_S = 5.0
"""A worker that has not answered for this long is lost; event loops are never busy for nearly as long."""
_LOOK_S = 0.25
_STOPPED_S = 2.0
"""So is one that has not answered for this long, and has had no processor time meanwhile."""


class Worker(KeptService):
    """A worker, and the ones that replace it.

    Attributes:
        line: to the process at present.
    """

    def __init__(self, module: str, number: int, config: CheckedConfig, pass_fds: Sequence[int] = ()) -> None:
        """Start it; it does not serve yet.

        Args:
            module: run with the descriptor of the line's other end and `pass_fds` as its arguments.
            number: from 1.
            config: which the worker asks for.
            pass_fds: descriptors that it inherits, besides those that the config names.
        """
        self._module, self._number, self._config = module, number, config
        self._pass_fds, self._named_fds = pass_fds, _named_descriptors(config)
        super().__init__()

    def _start(self, address: str) -> Service:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            words = map(str, [fd, *self._pass_fds])
            service = Service(self._module, [*words], pass_fds=[fd, *self._pass_fds, *self._named_fds])
        self.line = Line({"config": self._answer_config, **self.methods()})
        self.line.open(ours).add_done_callback(lambda _: self.lost())
        return service

    @property
    def name(self) -> str:
        """See `KeptService`."""
        return f"worker {self._number} (process {self.service.process.pid})"

    def methods(self) -> Methods:
        """What a new process may call, besides `config`."""
        return {}

    def lost(self) -> None:
        """A process has ended, or hangs: nothing more is received from it."""

    async def check(self) -> Any:
        """Return when the worker answers.

        Raises:
            ServiceUnavailableError: it has ended.
        """
        await self.line.call("check")

    async def watch(self) -> None:
        """Kill processes that hang, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_S)
            if not self.service.address:  # it starts, which may take long
                continue
            try:
                hung_s = await self._hangs()
            except ServiceUnavailableError:
                continue  # it has ended, and `keep` starts another
            if hung_s:
                log.warning("%s has not answered for %g s: ended by force", self.name, hung_s)
                self.service.process.kill()

    async def _hangs(self) -> float:
        """For how long it has not answered, when that is too long; 0 as soon as it answers.

        Time is counted in looks, each of which this process lives through: a machine that is suspended does
        not count. Raises as `check`.
        """
        pid, checking = self.service.process.pid, asyncio.ensure_future(self.check())
        num_looks, num_still, spent = 0, 0, _cpu_ticks(pid)
        try:
            while max(num_looks * _LOOK_S / _HUNG_S, num_still * _LOOK_S / _STOPPED_S) < 1:
                await asyncio.wait([checking], timeout=_LOOK_S)
                if checking.done():
                    checking.result()
                    return 0.0
                before, spent = spent, _cpu_ticks(pid)
                num_looks += 1
                num_still = num_still + 1 if before == spent is not None else 0
        finally:
            checking.cancel()
        return num_looks * _LOOK_S

    async def _answer_config(self) -> tuple[int, CheckedConfig]:
        return self._number, self._config


@contextlib.asynccontextmanager
async def kept(workers: Sequence[Worker], grace_s: float) -> AsyncIterator[None]:
    """Keep workers serving while the body runs, which begins when all serve; then shut them down gracefully.

    Raises:
        ConfigError: one of them cannot start, with its own reason.
    """
    try:
        await asyncio.to_thread(wait_ready, [worker.service for worker in workers])
        tasks = [asyncio.create_task(each) for worker in workers for each in (worker.keep(), worker.watch())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*(worker.stop(grace_s) for worker in workers))
    finally:
        for worker in workers:
            worker.service.kill()


def _cpu_ticks(pid: int) -> int | None:
    """Processor time of a process, in hundredths of a second; None where the system does not say."""
    try:
        fields_after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields_after_name[11]) + int(fields_after_name[12])


def _named_descriptors(config: Any) -> list[int]:
    """Of files without a name, as `supervisor` passes tokens."""
    paths = [str(getattr(config, field.name)) for field in fields(config)]
    return [int(found[1]) for path in paths if (found := re.fullmatch("/dev/fd/([0-9]+)", path))]
