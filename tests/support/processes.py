"""`specwire` commands as processes of their own."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from specwire.telemetry.logs import STACKS_SIGNAL

ROOT = Path(__file__).parents[2]
START_S = 240.0  # on a machine that is busy with other things
END_S = 120.0


class Command:
    """A `specwire` command, and every process that it started.

    Args:
        prefix: what starts it; it must become the command itself.
    """

    def __init__(self, *argv: str, stdout: int = subprocess.PIPE, prefix: Sequence[str] = ()) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SPECWIRE_")}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "specwire.cli", *argv],
            cwd=ROOT,
            env=environ | {"SPECWIRE_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=self._stderr,
            start_new_session=True,
        )
        self._own = psutil.Process(self.process.pid)
        self._services: dict[int, psutil.Process] = {}

    @property
    def services(self) -> dict[str, psutil.Process]:
        """Running service processes by module name."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._services |= {child.pid: child for child in self._own.children(recursive=True)}
        found = {}
        for process in self._services.values():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                line = process.cmdline()
                if line[1:2] == ["-m"] and not gone(process):
                    found[line[2]] = process
        return found

    def ready_line(self) -> str:
        """The first line on standard output."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], START_S)[0], "not ready in time"
        line = self.line()
        assert line, self.errors()
        _ = self.services
        return line

    def line(self) -> str:
        """The next line on standard output; empty at its end."""
        assert self.process.stdout is not None
        return str(self.process.stdout.readline(), "utf-8")

    def errors(self) -> str:
        """Standard error so far; read without a seek, since the processes write at the position."""
        fd = self._stderr.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode()

    def ended(self) -> int:
        """The exit status, when it has ended; what hangs says where."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            for process in (self._own, *self.services.values()):
                process.send_signal(STACKS_SIGNAL)
            time.sleep(1.0)
            raise AssertionError(self.errors()) from None

    def assert_all_gone(self, seconds: float = END_S) -> None:
        assert self._services, "nothing was ever started"
        wait_until(lambda: all(gone(process) for process in self._services.values()), seconds)

    def close(self) -> None:
        """Whatever a failed test left."""
        for process in (self._own, *self.services.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._stderr.close()


def gone(process: psutil.Process) -> bool:
    """Ended; its new parent may not have reaped it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


@contextlib.contextmanager
def running(*argv: str, **options: Any) -> Iterator[Command]:
    """The options are those of `Command`."""
    command = Command(*argv, **options)
    try:
        yield command
    finally:
        command.close()
