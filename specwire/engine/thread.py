"""The one thread on which a service computes.

OpenMP keeps a pool of workers for each thread that ever ran a parallel region. If the model were loaded on
one thread and run on another, two pools would compete for the cores, and libgomp would stop letting workers
spin: a third of a small model's pass. So loading happens on the engine's own thread too.
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
    """Runs one function after another, in order; a daemon, so that it never keeps a process alive.

    Args:
        name: as debuggers and `top -H` show it.
    """

    def __init__(self, name: str) -> None:
        self._orders: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the thread and wait for what it returns or raises."""
        future: Future[Result] = Future()
        self._orders.put(lambda: _settle(future, function))
        return future.result()

    def start(self, function: Callable[[], None]) -> None:
        """Run a function on the thread, without waiting; it must not raise."""
        self._orders.put(function)

    def join(self) -> None:
        """End the thread when everything before is done."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        _name_for_the_system(self._thread.name)
        while (order := self._orders.get()) is not None:
            order()


def _name_for_the_system(name: str) -> None:
    """Python tells the system the names of its threads from 3.14 on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _settle(future: Future[Result], function: Callable[[], Result]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
