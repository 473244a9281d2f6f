"""What time it is. All code that measures or dates something asks here, so that simulated time reaches it.

The event loop has a clock of its own, `loop.time()`; a simulation replaces both (`benchmarks/simulation`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_stopwatch_ns: Callable[[], int] = time.perf_counter_ns
_epoch_ns: Callable[[], int] = time.time_ns


def stopwatch_ns() -> int:
    """For durations: nanoseconds since some moment."""
    return _stopwatch_ns()


def epoch_ns() -> int:
    """For dates: nanoseconds since 1970."""
    return _epoch_ns()


@contextlib.contextmanager
def simulated(now_ns: Callable[[], int]) -> Iterator[None]:
    """Ask `now_ns` while the body runs; for a process that does nothing else."""
    global _stopwatch_ns, _epoch_ns
    before = _stopwatch_ns, _epoch_ns
    _stopwatch_ns = _epoch_ns = now_ns
    try:
        yield
    finally:
        _stopwatch_ns, _epoch_ns = before
