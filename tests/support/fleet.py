"""Replicas of draft and verify as real processes that can be killed, stopped and started again, and the load
that looks at what its clients see of it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specwire import AsyncClient, Fate, Rule, SamplingParams
from specwire.cli.supervisor import Service, wait_ready

START_S = 240.0
_MODULES = {"verify": "verify_service", "draft": "draft_service", "coordinator": "coordinator"}
_MODELS = {"verify": "emulated:step_ms=10", "draft": "emulated:step_ms=1,alpha=0.8"}


class Restarted(Service):
    """Started while threads of gRPC run, which a child that is forked and runs Python before it becomes the
    service may trip over: so this one asks for itself to die with us."""

    @staticmethod
    def _start(
        module_and_flags: list[str], environ: dict[str, str], pass_fds: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", _DIE_WITH_PARENT, *module_and_flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environ,
            pass_fds=pass_fds,
        )


_DIE_WITH_PARENT = """
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Fleet:
    """Two verify and two draft services, and coordinators before them.

    Attributes:
        address: of all coordinators, as a client takes them.
    """

    def __init__(self, num_coordinators: int = 1, **coordinator_flags: object) -> None:
        """All of them serve."""
        self.verifies = [self._service("verify") for _ in range(2)]
        self.drafts = [self._service("draft") for _ in range(2)]
        wait_ready([*self.verifies, *self.drafts], START_S)
        self._coordinator_flags = {
            "verify_address": ",".join(one.address for one in self.verifies),
            "draft_address": ",".join(one.address for one in self.drafts),
            "num_draft_tokens": "4",
        } | coordinator_flags
        self.coordinators = [self._service("coordinator") for _ in range(num_coordinators)]
        wait_ready(self.coordinators, START_S)
        self.address = ",".join(one.address for one in self.coordinators)

    @property
    def services(self) -> list[Service]:
        """All of them."""
        return [*self.coordinators, *self.drafts, *self.verifies]

    def group(self, role: str) -> list[Service]:
        """Those of one role: verify, draft or coordinator."""
        return {"verify": self.verifies, "draft": self.drafts, "coordinator": self.coordinators}[role]

    def _service(self, role: str, address: str = "127.0.0.1:0", start: type[Service] = Service) -> Service:
        flags = {"model": _MODELS[role], "grace_s": 30} if role in _MODELS else self._coordinator_flags
        return start(_MODULES[role], _words({"address": address, **flags}))

    def restart(self, role: str, index: int) -> Service:
        """Start one again where it was; it does not serve yet."""
        group = self.group(role)
        group[index].kill()  # of a stopped process, too
        group[index] = self._service(role, group[index].address, Restarted)
        return group[index]

    async def complete(self) -> None:
        """Wait for those that were started again."""
        starting = [one for one in self.services if not one.address]
        await asyncio.to_thread(wait_ready, starting, START_S)

    def close(self) -> None:
        """By force."""
        for service in self.services:
            service.kill()


def _words(flags: dict[str, object]) -> list[str]:
    return [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), str(value))]


@contextlib.contextmanager
def stopped(service: Service) -> Iterator[None]:
    """A process that lives and does nothing."""
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(service.process.pid, signal.SIGCONT)


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
    if libc.ptrace(_PTRACE_SEIZE, tid, None, None) or libc.ptrace(_PTRACE_INTERRUPT, tid, None, None):
        raise OSError(errno := ctypes.get_errno(), os.strerror(errno))
    os.waitpid(tid, _WALL)
    try:
        yield
    finally:
        libc.ptrace(_PTRACE_DETACH, tid, None, None)  # fails when it was killed meanwhile


_WALL = 0x40000000
"""Of waitpid: threads, too."""


def _thread_of(pid: int, name: str) -> int:
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            return int(task.name)
    raise ProcessLookupError(f"no thread {name} in {pid}")


@dataclass(frozen=True)
class Load:
    """Clients with so many requests each, one after the other; the seed names a request."""

    num_clients: int
    num_requests: int
    num_tokens: int = 60

    def params(self, client: int, request: int) -> SamplingParams:
        """Of one request; its text is fixed by them."""
        seed = 1000 * client + request % 5
        return SamplingParams(max_tokens=self.num_tokens, seed=seed, rule=Rule.GUMBEL)


@dataclass
class Seen:
    """What the clients saw.

    Attributes:
        texts: token ids by seed; a request that says something else than one before it is an error.
        errors: what went wrong, in words.
        num_accepted: draft tokens in the chunks so far.
        longest_gap_s: longest time between two chunks, or between a request and its first.
    """

    num_done: int = 0
    num_chunks: int = 0
    num_accepted: int = 0
    longest_gap_s: float = 0.0
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


async def run(
    address: str, load: Load, disturb: Callable[[Seen], Coroutine[Any, Any, None]] | None = None
) -> Seen:
    """The load, with something happening meanwhile."""
    seen = Seen()
    async with AsyncClient(address, timeout_s=60.0) as client:
        disturbing = asyncio.create_task(disturb(seen)) if disturb else None
        await asyncio.gather(*[_client(client, load, i, seen) for i in range(load.num_clients)])
        if disturbing:
            await disturbing
    return seen


async def _client(client: AsyncClient, load: Load, index: int, seen: Seen) -> None:
    for request in range(load.num_requests):
        try:
            await _request(client, load.params(index, request), seen)
        except Exception as error:
            seen.errors.append(f"{type(error).__name__}: {error}")


async def _request(client: AsyncClient, params: SamplingParams, seen: Seen) -> None:
    token_ids: list[int] = []
    last_s = time.monotonic()
    assert params.seed is not None
    prompt = [params.seed % 60 + 1, 2, 3]
    async with client.stream(params=params, prompt_token_ids=prompt) as stream:
        async for chunk in stream:
            now_s = time.monotonic()
            seen.longest_gap_s, last_s = max(seen.longest_gap_s, now_s - last_s), now_s
            seen.num_chunks += 1
            if chunk.first_index != len(token_ids):
                seen.errors.append(f"index {chunk.first_index} instead of {len(token_ids)}")
            token_ids += [token.token_id for token in chunk.tokens]
            seen.num_accepted += sum(token.fate is Fate.ACCEPTED for token in chunk.tokens)
        done = stream.completion
    if len(token_ids) != params.max_tokens or done.token_ids != tuple(token_ids):
        seen.errors.append(f"{len(token_ids)} tokens, and {len(done.token_ids)} in the completion")
    if seen.texts.setdefault(params.seed, tuple(token_ids)) != tuple(token_ids):
        seen.errors.append(f"another text for seed {params.seed}")
    seen.num_done += 1
