"""What time it is. All code that measures or dates something asks here, so that simulated time reaches it.

The event loop has a clock of its own, `loop.time()`; a simulation replaces both (`benchmarks/simulation`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_stopwatch_ns: Callable[[], int] = time.perf_counter_ns


def stopwatch_ns() -> int:
    """Nanoseconds since some moment; for all that is measured or waited for, since dates can jump."""
    return _stopwatch_ns()


def epoch_ns(at_ns: int) -> int:
    """The date of a moment of the stopwatch, in nanoseconds since 1970."""
    return time.time_ns() - _stopwatch_ns() + at_ns


@contextlib.contextmanager
def simulated(now_ns: Callable[[], int]) -> Iterator[None]:
    """Ask `now_ns` while the body runs; for a process that does nothing else."""
    global _stopwatch_ns
    before, _stopwatch_ns = _stopwatch_ns, now_ns
    try:
        yield
    finally:
        _stopwatch_ns = before
