"""A service process: its start, the address that it serves, its errors and its end."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from specwire import parent
from specwire.config.flags import ENV_PREFIX
from specwire.errors import ConfigError, ServiceUnavailableError
from specwire.telemetry import logs

log = logging.getLogger(__name__)

READY = "ready "
STOP_MARGIN_S = 5.0
"""To end after a grace period, in seconds, before it is ended by force."""
_STACKS_S = 0.5
_UNNAMED_FILE = re.compile("/dev/fd/([0-9]+)")
"""A file that a service inherits, as `supervisor` passes tokens."""


class Service:
    """One service process. It ends with the thread that starts it."""

    def __init__(self, module: str, flags: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """Start `python -m module flags`; wait with `ready`.

        Args:
            module: draft_service, verify_service or coordinator.
            environ: added to this process's environment, whose `SPECWIRE_*` variables are not the service's.
        """
        self.module = module
        self._flags = flags
        self._environ = dict(environ or {})
        self.start()

    def start(self, *more: str) -> None:
        """Start a process, with more flags; the one before has ended."""
        self.address = ""
        self._error = ""
        self._is_terminated = False
        words = [*self._flags, *more]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        self.process = subprocess.Popen(
            parent.python("-m", self.module, *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # a selector does not see buffered lines
            env=inherited | parent.environment() | self._environ,
            pass_fds=[int(found[1]) for word in words if (found := _UNNAMED_FILE.fullmatch(word))],
            start_new_session=True,  # Ctrl-C reaches this process only, which stops the services in order
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self._forwarder = threading.Thread(target=self._forward_errors, args=[self.process], daemon=True)
        self._forwarder.start()

    def ready(self, timeout_s: float) -> str:
        """Wait for the line `ready HOST:PORT`; returns the address. Errors as for `wait_ready`."""
        wait_ready([self], timeout_s)
        return self.address

    def read_address(self) -> bool:
        """Read one line of the process's standard output; True if it is the `ready` line. Raises ConfigError
        if the process ended."""
        line = self.output.readline().decode()
        if not line:
            status = self.process.wait()
            self._forwarder.join(1.0)
            raise ConfigError(self._error or f"{self.module} ended with status {status} instead of serving")
        if line.startswith(READY):
            self.address = line.removeprefix(READY).split()[0]
        return bool(self.address)

    def has_output(self) -> bool:
        """Whether its standard output has more, or has ended."""
        return bool(select.select([self.output], [], [], 0)[0])

    def shows_life(self) -> bool:
        """Whether its standard output has more since the last call, or has ended; once it serves."""
        has_more = self.has_output()
        if has_more:
            os.read(self.output.fileno(), select.PIPE_BUF)
        return has_more

    def terminate(self) -> None:
        """Send SIGTERM; returns at once. A second one ends the requests that the first one lets finish."""
        self._is_terminated = True
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def stop(self, timeout_s: float = 10.0 + STOP_MARGIN_S) -> int:
        """Stop gracefully, then by force, after printing its stacks; returns the exit status."""
        if not self._is_terminated:
            self.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("%s has not ended in time: ended by force", self.module)
            self.process.send_signal(logs.STACKS_SIGNAL)
            self.wait(_STACKS_S)
            return self.kill()

    def wait(self, timeout_s: float) -> None:
        """Wait until it ends, or for as long as the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)

    def kill(self) -> int:
        """Kill it, if it runs; returns the exit status."""
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()

    def _forward_errors(self, process: subprocess.Popen[bytes]) -> None:
        """Forward standard error, except for the error that ends a service that did not start: it is raised
        here instead."""
        assert process.stderr is not None
        for data in process.stderr:
            line = data.decode(errors="replace")
            if not self.address and (error := logs.reported(line)):
                self._error = error
            else:
                # A full disk, or a reader that has ended: read on, or the process would wait for us to.
                with contextlib.suppress(OSError, ValueError):
                    logs.forward(line, self.module)


def end_on_signals(terminated: int = 128 + signal.SIGTERM) -> None:
    """Handle SIGINT explicitly too, as shells start background commands with it ignored. `terminated` is the
    exit status after SIGTERM."""
    logs.show_stacks_on_signal()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(terminated))


def wait_ready(services: Sequence[Service], timeout_s: float = math.inf) -> None:
    """Wait until all of them serve; the first failure is raised while others still load.

    Raises:
        ConfigError: a process ended, with its own error if it printed one.
        ServiceUnavailableError: at the timeout.
    """
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for service in services:
            selector.register(service.output, selectors.EVENT_READ, service)
        while waiting := [key.data for key in selector.get_map().values()]:
            left_s = max(0.0, deadline - time.monotonic())
            events = selector.select(None if left_s == math.inf else left_s)
            if not events:
                names = " and ".join(service.module for service in waiting)
                raise ServiceUnavailableError(f"{names} not ready within {timeout_s:g} s")
            for key, _ in events:
                if key.data.read_address():
                    selector.unregister(key.fileobj)
