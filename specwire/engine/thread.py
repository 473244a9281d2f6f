"""The one thread on which a service computes.

OpenMP keeps a pool of workers for each thread that ever ran a parallel region. With the model loaded on one
thread and run on another, two pools would compete for the cores, and libgomp would not let workers spin,
which takes a third of a small model's pass. So loading happens on the engine's own thread too.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")
_PR_SET_NAME = 15


class ComputeThread:
    """Runs functions in order; a daemon thread, so that it never keeps a process alive."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the thread and wait for what it returns or raises."""
        future: Future[Result] = Future()
        self._calls.put(lambda: settle(future, function))
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


def settle(future: Future[Result], function: Callable[[], Result]) -> None:
    """Run a function; the future gets what it returns or raises."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
