"""Replicas of all services as real processes that can be killed, stopped and started again."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from specwire.cli.process import Service, wait_ready
from specwire.config.flags import flag_words
from tests.support.harness import handshake

START_S = 240.0
GRACE_S = 30
_COMMANDS = {
    "verify": ("verify_service",),
    "draft": ("draft_service",),
    "coordinator": ("coordinator",),
    "front": ("specwire.cli", "http"),
}
_MODELS = {"verify": "emulated:step_ms=10", "draft": "emulated:step_ms=1,alpha=0.8"}


class Fleet:
    """Verify and draft services, coordinators before them, and HTTP fronts before those.

    Attributes:
        address: of all coordinators, as a client takes them.
    """

    def __init__(
        self, num_coordinators: int = 1, num_fronts: int = 0, num_models: int = 2, **coordinator_flags: object
    ) -> None:
        """All of them serve; `num_models` of verify, and of draft."""
        self.verifies = [self._service("verify") for _ in range(num_models)]
        self.drafts = [self._service("draft") for _ in range(num_models)]
        wait_ready([*self.verifies, *self.drafts], START_S)
        self.coordinator_flags = {
            "verify_address": ",".join(one.address for one in self.verifies),
            "draft_address": ",".join(one.address for one in self.drafts),
            "num_draft_tokens": "4",
        } | coordinator_flags
        self.coordinators = [self._service("coordinator") for _ in range(num_coordinators)]
        wait_ready(self.coordinators, START_S)
        self.address = ",".join(one.address for one in self.coordinators)
        self.fronts = [self._service("front") for _ in range(num_fronts)]
        wait_ready(self.fronts, START_S)

    @property
    def services(self) -> list[Service]:
        """All of them."""
        return [*self.fronts, *self.coordinators, *self.drafts, *self.verifies]

    def group(self, role: str) -> list[Service]:
        """Those of one role: verify, draft, coordinator or front."""
        return {
            "verify": self.verifies,
            "draft": self.drafts,
            "coordinator": self.coordinators,
            "front": self.fronts,
        }[role]

    def _service(self, role: str, address: str = "127.0.0.1:0") -> Service:
        module, *words = _COMMANDS[role]
        flags = {"address": address, "grace_s": GRACE_S, **self._flags(role)}
        return Service(module, [*words, *flag_words(**flags)])

    def _flags(self, role: str) -> dict[str, object]:
        if role == "coordinator":
            return self.coordinator_flags
        return {"server": self.address, "model_name": "m"} if role == "front" else {"model": _MODELS[role]}

    @contextlib.contextmanager
    def disturbed(self, role: str, index: int, fault: str) -> Iterator[None]:
        """One of them, by kill (SIGKILL), drain (SIGTERM), stop (SIGSTOP) or hang (of its device); what has
        ended is started again, and does not serve yet.

        Raises:
            ProcessLookupError: a device was to hang whose process has ended.
        """
        service = self.group(role)[index]
        if fault in ("stop", "hang"):
            with stopped(service) if fault == "stop" else hung_device(service, role):
                yield
            return
        service.process.send_signal({"kill": signal.SIGKILL, "drain": signal.SIGTERM}[fault])
        try:
            yield
            assert service.process.wait(2 * GRACE_S) == (0 if fault == "drain" else -signal.SIGKILL)
        finally:
            service.kill()
            self.group(role)[index] = self._service(role, service.address)

    async def complete(self) -> None:
        """Wait for those that were started again."""
        starting = [one for one in self.services if not one.address]
        await asyncio.to_thread(wait_ready, starting, START_S)

    def start_coordinator(self, address: str = "127.0.0.1:0") -> Service:
        """Another one, which serves; it is not in `address`."""
        self.coordinators.append(self._service("coordinator", address))
        wait_ready(self.coordinators[-1:], START_S)
        return self.coordinators[-1]

    def num_held(self) -> int:
        """Sequences and pages of all model services."""
        found = 0
        for role in ("verify", "draft"):
            for service in self.group(role):
                status = handshake(role, service.address).status
                found += status.num_sequences + status.num_held_pages
        return found

    def close(self) -> None:
        """By force."""
        for service in self.services:
            service.kill()


@contextlib.contextmanager
def stopped(service: Service) -> Iterator[None]:
    """A process that lives and does nothing."""
    service.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        service.process.send_signal(signal.SIGCONT)  # if it has not been killed meanwhile


_PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 17, 0x4206, 0x4207


@contextlib.contextmanager
def hung_device(service: Service, role: str) -> Iterator[None]:
    """A process whose compute thread alone is stopped: gRPC, health and handshake go on.

    Raises:
        ProcessLookupError: the process has ended.
        PermissionError: the system lets no process trace its children.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    tid = _thread_of(service.process.pid, role)
    while not _sleeps(service.process.pid, tid):  # awake, it may hold the lock that all threads need
        pass
    if libc.ptrace(_PTRACE_SEIZE, tid, None, None) or libc.ptrace(_PTRACE_INTERRUPT, tid, None, None):
        raise OSError(errno := ctypes.get_errno(), os.strerror(errno))
    os.waitpid(tid, _WALL)
    try:
        yield
    finally:
        libc.ptrace(_PTRACE_DETACH, tid, None, None)  # fails when it was killed meanwhile


_WALL = 0x40000000
"""Of waitpid: threads, too."""


def _sleeps(pid: int, tid: int) -> bool:
    return Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def _thread_of(pid: int, name: str) -> int:
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            return int(task.name)
    raise ProcessLookupError(f"no thread {name} in {pid}")
