"""The clock. All code that measures or dates something reads it here, so that a simulation can replace it.

The event loop has a clock of its own, `loop.time()`; a simulation replaces both (`benchmarks/simulation`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

stopwatch_ns: Callable[[], int] = time.perf_counter_ns
"""Monotonic time in nanoseconds, for durations and deadlines: the date can jump."""


def epoch_ns(at_ns: int) -> int:
    """Converts a stopwatch time to nanoseconds since 1970."""
    return time.time_ns() - stopwatch_ns() + at_ns


@contextlib.contextmanager
def simulated(now_ns: Callable[[], int]) -> Iterator[None]:
    """Take the time from `now_ns` while the body runs; it is replaced for the whole process."""
    global stopwatch_ns
    before, stopwatch_ns = stopwatch_ns, now_ns
    try:
        yield
    finally:
        stopwatch_ns = before
