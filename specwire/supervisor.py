"""The three services of this machine as child processes: `specwire up`, `specwire demo`, tests, benchmarks.

Children die with their parent, however it dies (PR_SET_PDEATHSIG), and are ended in an order in which
nobody loses a service it still talks to.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from specwire.config import EMBEDDED, UpConfig
from specwire.errors import ConfigError, ServiceUnavailableError
from specwire.flags import ENV_PREFIX

_PR_SET_PDEATHSIG = 1
_STOP_TIMEOUT_S = 15.0
READY = "ready "


class Service:
    """One service process."""

    def __init__(self, module: str, flags: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """Start `python -m module flags`; wait with `ready`.

        Args:
            module: draft_service, verify_service or coordinator.
            environ: added to this process's environment; its `SPECWIRE_*` variables are not passed on,
                since the flags say everything.
        """
        self.module = module
        self.address = ""
        own = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=own | dict(environ or {}),
            start_new_session=True,  # Ctrl-C reaches us alone, and we end the services in order
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - runs one system call
        )

    def ready(self, timeout_s: float) -> str:
        """Wait for the line `ready HOST:PORT`; returns the address.

        Raises:
            ConfigError: the process ended instead; its own message is on standard error.
            ServiceUnavailableError: the time is over.
        """
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                line = self.process.stdout.readline().decode()
                if line.startswith(READY):
                    self.address = line.removeprefix(READY).strip()
                    return self.address
                if not line:
                    raise ConfigError(
                        f"{self.module} ended with status {self.process.wait()} instead of serving"
                    )
        raise ServiceUnavailableError(f"{self.module} was not ready within {timeout_s:g} s")

    def stop(self) -> int:
        """End gracefully, then by force; returns the exit status."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            return self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Stack:
    """Draft, verify and coordinator together; a context manager that leaves no process behind."""

    def __init__(self, config: UpConfig, environ: Mapping[str, str] | None = None) -> None:
        """Start all three and wait until they serve.

        Raises:
            ConfigError, ServiceUnavailableError: one of them did not come up; the others are ended.
        """
        self.services: list[Service] = []
        try:
            self._start(config, environ)
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        """`HOST:PORT` of the coordinator."""
        return self.coordinator.address

    def _start(self, config: UpConfig, environ: Mapping[str, str] | None) -> None:
        self.verify = self._service("verify_service", _verify_flags(config), environ)
        self.draft = (
            self._service("draft_service", _draft_flags(config), environ) if config.draft != "none" else None
        )
        addresses = ["--verify-address", self.verify.ready(config.start_timeout_s)]
        if self.draft is not None:
            addresses += ["--draft-address", self.draft.ready(config.start_timeout_s)]
        flags = _flags(
            address=config.address, num_draft_tokens=config.num_draft_tokens, log_level=config.log_level
        )
        self.coordinator = self._service("coordinator", [*flags, *addresses], environ)
        self.coordinator.ready(config.start_timeout_s)

    def _service(self, module: str, flags: Sequence[str], environ: Mapping[str, str] | None) -> Service:
        service = Service(module, flags, environ)
        self.services.append(service)
        return service

    def wait(self) -> Service:
        """Block until a service ends by itself; returns it."""
        while True:
            for service in self.services:
                if service.process.poll() is not None:
                    return service
            time.sleep(0.1)

    def stop(self) -> None:
        """End the coordinator first, then the model services."""
        for service in reversed(self.services):
            service.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _flags(**values: object) -> list[str]:
    return [text for name, value in values.items() for text in ("--" + name.replace("_", "-"), str(value))]


def _verify_flags(config: UpConfig) -> list[str]:
    return _flags(model=config.target, dtype=config.dtype, device=config.device, **_shared(config))


def _draft_flags(config: UpConfig) -> list[str]:
    if config.draft == EMBEDDED and config.target != EMBEDDED:
        raise ConfigError(
            f"--draft is needed with --target {config.target}: the embedded draft does not fit it"
        )
    return _flags(model=config.draft, dtype=config.draft_dtype, device=config.draft_device, **_shared(config))


def _shared(config: UpConfig) -> dict[str, object]:
    return {
        "num_kv_tokens": config.num_kv_tokens,
        "num_threads": config.num_threads,
        "log_level": config.log_level,
    }


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
