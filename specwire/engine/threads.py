"""The thread that computes, and how many CPU threads its passes run on: no more than other processes leave
cores free.

Threads of one pass meet at the end of each operation. Where more of them are runnable than there are cores,
each meeting waits for one that does not run, and a pass takes 3 to 60 times as long. What others use is
measured while the engine works, since services start and end at any time; torch itself counts all cores. It
counts where threads of this process had to wait for a core: a draft and a target that take turns may use the
same ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from typing import Any, TypeVar

from specwire.telemetry.logs import NOTICE

log = logging.getLogger(__name__)

_NUM_SPINS = 1000
"""About what waking a thread takes. Without, passes of middle-sized models on two quiet cores take a third
longer; with libgomp's 300,000 they take many times as long beside others."""
_SHORTEST_NS, _LONGEST_NS = 500_000_000, 5_000_000_000
"""Times are counted in hundredths of a second; over a long time the engine was idle."""
_REMEMBERED_NS = 60_000_000_000
_NEGLIGIBLE = 0.25
"""Of a core."""
_CONTENDED = 0.1
"""Of the time in which threads of this process ran or were ready to run: so much of it without a core. Beside
a busy process two threads on two cores wait for 0.4 of it; one thread waits for 0.01."""
_CGROUP = Path("/sys/fs/cgroup")
_STAT = Path("/proc/stat")
_PR_SET_NAME = 15
Result = TypeVar("Result")


class ComputeThread:
    """The one thread on which a service computes: runs functions in order, and never keeps a process alive.

    OpenMP keeps a pool of workers for each thread that ever ran a parallel region. With the model loaded on
    one thread and run on another, two pools would compete for the cores, and libgomp would not let workers
    spin, which takes a third of a small model's pass. So loading happens on the engine's own thread too.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the thread and wait for what it returns or raises."""
        future: Future[Result] = Future()

        def settle() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(settle)
        return future.result()

    def start(self, function: Callable[[], None]) -> None:
        """Run a function on the thread, without waiting; it must not raise."""
        self._calls.put(function)

    def join(self) -> None:
        """End the thread once all functions have run."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # Python itself names a thread for the system from 3.14 on
            ctypes.CDLL(None).prctl(_PR_SET_NAME, self._thread.name.encode()[:15], 0, 0, 0)
        while (call := self._calls.get()) is not None:
            call()


def spin_briefly(environ: MutableMapping[str, str]) -> None:
    """Have threads that wait sleep soon. Call it before torch is loaded; a setting of the user's wins."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & environ.keys():
        environ["OMP_WAIT_POLICY"], environ["GOMP_SPINCOUNT"] = "PASSIVE", str(_NUM_SPINS)


@dataclass(frozen=True)
class Cores:
    """Cores that this process may use.

    Attributes:
        num: a container's quota may be a fraction.
        used_s: seconds of processor time that all processes have used of them so far.
    """

    num: float
    used_s: Callable[[], float]


def known_cores() -> list[Cores]:
    """The machine's cores, and those of the container; empty where the system does not say."""
    cpus = {f"cpu{n}" for n in os.sched_getaffinity(0)}
    found = [Cores(len(cpus), lambda: _machine_s(cpus))] if _STAT.exists() else []
    quota = group_quota(_CGROUP)
    return found if quota is None else [*found, Cores(quota, lambda: _group_s(_CGROUP))]


def group_quota(directory: Path) -> float | None:
    """Cores of a container, by its control group's files (v2 or v1); None without a limit."""
    try:
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((directory / "cpu" / name).read_text().strip() for name in names)
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _group_s(directory: Path) -> float:
    if (directory / "cpu.stat").exists():
        found = dict(line.split() for line in (directory / "cpu.stat").read_text().splitlines())
        return int(found["usage_usec"]) / 1e6
    return int((directory / "cpuacct" / "cpuacct.usage").read_text()) / 1e9


def _machine_s(cpus: set[str]) -> float:
    """All time of these that was neither idle nor spent waiting for devices."""
    lines = (line.split() for line in _STAT.read_text().splitlines())
    ticks = (sum(map(int, [*line[1:4], *line[6:9]])) for line in lines if line[0] in cpus)
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def delayed_s() -> float:
    """Seconds that threads of this process were ready to run without a core; inf where no system says it."""
    delays = []
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has just ended
            delays.append(int(path.read_text().split()[1]))
    return sum(delays) / 1e9 if delays else math.inf


class ThreadCount:
    """The threads of an engine's passes. Engine thread only.

    Others use the most that they used in any half second of the last minute in which threads had to wait, so
    the number changes seldom; what this process uses does not count, so that it does not follow itself.

    Attributes:
        most: where all cores are free.
        num: at present.
    """

    def __init__(
        self,
        most: int,
        apply: Callable[[int], None],
        *,
        is_fixed: bool,
        cores: Sequence[Cores],
        own_s: Callable[[], float] = time.process_time,
        delayed_s: Callable[[], float] = delayed_s,
    ) -> None:
        """Applies the number to begin with.

        Args:
            apply: torch's `set_num_threads`; it counts for the thread that calls it.
            is_fixed: `most` was given: too many are said, and not changed.
            own_s: processor time of this process, in seconds.
            delayed_s: see there.
        """
        self.most, self._apply, self._is_fixed = most, apply, is_fixed
        self._cores, self._own_s, self._delayed_s = cores, own_s, delayed_s
        self._before: tuple[int, float, float, list[float]] | None = None
        self._seen: deque[tuple[int, list[float]]] = deque()
        self._is_said = False
        self.num = most if is_fixed else self._fitting([0.0] * len(cores))
        apply(self.num)

    def before_step(self, now_ns: int) -> None:
        if self.most == 1 or not self._cores:
            return
        if self._before is not None and now_ns - self._before[0] < _SHORTEST_NS:
            return
        before, self._before = self._before, self._sample(now_ns)
        if before is None or now_ns - before[0] > _LONGEST_NS:
            return
        _, own_s, delayed_s, used_s = self._before
        wall_s, own_s, delayed_s = (now_ns - before[0]) / 1e9, own_s - before[1], delayed_s - before[2]
        others = [(after - at - own_s) / wall_s for at, after in zip(before[3], used_s, strict=True)]
        is_contended = not delayed_s <= _CONTENDED * (own_s + delayed_s)  # or not a number
        # With fewer threads none has to wait, however busy the others still are.
        if is_contended or (self._seen and min(map(sub, others, self._worst())) > -_NEGLIGIBLE):
            self._seen.append((now_ns, others))
        while self._seen and now_ns - self._seen[0][0] > _REMEMBERED_NS:
            self._seen.popleft()
        self._fit(self._worst())

    def _worst(self) -> list[float]:
        """Cores that others used at most, of each kind."""
        return [
            max((others[kind] for _, others in self._seen), default=0.0) for kind in range(len(self._cores))
        ]

    def _sample(self, now_ns: int) -> tuple[int, float, float, list[float]]:
        return now_ns, self._own_s(), self._delayed_s(), [each.used_s() for each in self._cores]

    def _fit(self, others: Sequence[float]) -> None:
        num = self._fitting(others)
        if num < self.most and not self._is_said:
            self._is_said = True
            self._say(num, others)
        if num != self.num and not self._is_fixed:
            self.num = num
            self._apply(num)

    def _fitting(self, others: Sequence[float]) -> int:
        """Threads that find a core each while others use so many of each kind."""
        free = (
            math.floor(each.num - used + _NEGLIGIBLE) for each, used in zip(self._cores, others, strict=True)
        )
        return max(1, min([self.most, *free]))

    def _say(self, num: int, others: Sequence[float]) -> None:
        used, there = min(zip(others, self._cores, strict=True), key=lambda each: each[1].num - each[0])
        what = f"other processes use {used:.1f} of {there.num:g} cores"
        if self._is_fixed:
            log.warning(
                "%s: passes on %d threads may take many times as long; give --num-threads %d",
                *(what, self.most, num),
            )
        else:
            log.log(
                NOTICE,
                "%s: passes run on %d of %d threads while they do; --num-threads fixes a number",
                *(what, num, self.most),
            )
