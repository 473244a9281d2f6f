"""Emulated devices in service processes, and the processor time of processes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from specwire.cli.supervisor import Stack
from specwire.config.fields import AUTO
from specwire.config.flags import env_name
from specwire.config.models import EMULATED
from specwire.config.stack import UpConfig

LOOP, ENGINE, GRPC = THREADS = ("loop", "engine", "gRPC")
Name = TypeVar("Name", bound=Hashable)
_ENGINES = ("verify", "draft")
"""Names of the engines' threads."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Emulated devices and how much they guess.

    Attributes:
        target_ms, draft_ms: a forward pass of each, in milliseconds; it costs no processor time.
        alpha: probability that a draft token is accepted.
        runner_up: where the target's token is not the draft's first choice, probability that it is the next.
        num_draft_tokens: a round.
        num_outcomes: prepared for; "auto" lets each stack find out by itself what pays.
    """

    target_ms: float = 30.0
    draft_ms: float = 2.0
    alpha: float = 0.8
    runner_up: float = 0.0
    num_draft_tokens: int = 4
    num_outcomes: str = AUTO

    @property
    def target(self) -> str:
        """The target's `--model`."""
        return f"{EMULATED}step_ms={self.target_ms:g}"

    @property
    def draft(self) -> str:
        """The draft's `--model`."""
        return f"{EMULATED}step_ms={self.draft_ms:g},alpha={self.alpha:g},runner_up={self.runner_up:g}"

    def stack(self, *, num_kv_tokens: int, **limits: int) -> Stack:
        """Three service processes on these devices.

        Args:
            num_kv_tokens: of each of the two KV caches.
            limits: fields of the services' configs (`max_running=1000`) that the supervisor has no flags
                for; they reach the services as environment variables.
        """
        config = UpConfig(
            target=self.target,
            draft=self.draft,
            address="127.0.0.1:0",
            num_draft_tokens=str(self.num_draft_tokens),
            num_outcomes=self.num_outcomes,
            num_kv_tokens=num_kv_tokens,
            grace_s=1.0,
        )
        return Stack(config, {env_name(name): str(value) for name, value in limits.items()})


class Usage:
    """Processor time of some processes, by name."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}

    def cpu_s(self) -> dict[str, float]:
        """Processor time since the start, in seconds, user and system."""
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: time.user + time.system for name, time in times.items()}

    def thread_cpu_s(self) -> dict[tuple[str, str], float]:
        """The same by process and kind of thread: `loop` is the main thread, with the event loop, `engine`
        the one that computes, and `gRPC` all others."""
        spent_s: dict[tuple[str, str], float] = {}
        for name, process in self._processes.items():
            for thread in process.threads():
                key = name, _kind(process.pid, thread.id)
                spent_s[key] = spent_s.get(key, 0.0) + thread.user_time + thread.system_time
        return spent_s


def _kind(pid: int, thread_id: int) -> str:
    if thread_id == pid:
        return LOOP
    path = Path(f"/proc/{pid}/task/{thread_id}/comm")
    return ENGINE if path.exists() and path.read_text().strip() in _ENGINES else GRPC


def difference(after: Mapping[Name, float], before: Mapping[Name, float]) -> dict[Name, float]:
    """after - before, name by name; what was not there before was 0."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
