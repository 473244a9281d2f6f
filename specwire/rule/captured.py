"""Computations over fixed memory that a device repeats in one launch, and small functions run that way.

On CUDA each operation takes the host some microseconds to launch, and choosing a token takes dozens of them:
together longer than the pass of a small draft model.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Output = TypeVar("Output")
Function = TypeVar("Function", bound=Callable[..., Any])

MOST_ELEMENTS = 1 << 22
"""Of an input: beyond, operations take longer than their launches, and what they leave is not kept."""
_CAPTURE_AT = 2


class Replay(Protocol):
    """How a computation over fixed memory is captured."""

    def capture(self, run: Callable[[], Output]) -> Callable[[], Output]:
        """Returns a function that repeats `run` on the current contents of the memory that it reads.

        The next captured computation may overwrite its result.
        """


class EagerReplay:
    """Runs the computation again: for devices without graphs, and for tests."""

    def capture(self, run: Callable[[], Output]) -> Callable[[], Output]:
        return run


class CudaReplay:
    """CUDA graphs that share one memory pool, since no two of them run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Output]) -> Callable[[], Output]:
        """See `Replay`. Runs it twice first, because libraries initialise themselves in their first calls."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(2):
                run()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, such as a second engine in the same process.
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = run()
        finally:
            torch.cuda.set_stream(here)  # a failed capture may leave its own stream current

        def replay() -> Output:
            graph.replay()
            return output

        return replay


class Captured:
    """A function of rows, captured for each size of its inputs when it is called the second time.

    Sizes are powers of two: further rows hold what was there before, and nobody reads their results.

    Args:
        function: of tensors whose first dimension is the row, and of keywords; returns tensors of that kind.
            A row's results depend on the same row alone, and it reads no value back to the host.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], replay: Replay) -> None:
        self._function = function
        self._replay = replay
        self._num_called: Counter[Any] = Counter()
        self._captured: dict[Any, tuple[tuple[Tensor, ...], Callable[[], tuple[Tensor, ...]]]] = {}

    def __call__(self, *inputs: Tensor, **fixed: Any) -> tuple[Tensor, ...]:
        """The function's results; the next call with inputs of this size overwrites them."""
        num_rows = len(inputs[0])
        padded = 1 << (num_rows - 1).bit_length()
        if not num_rows or padded * max(each[0].numel() for each in inputs) > MOST_ELEMENTS:
            return self._function(*inputs, **fixed)
        key = (padded, *((each.shape[1:], each.dtype) for each in inputs), *sorted(fixed.items()))
        self._num_called[key] += 1
        if self._num_called[key] == _CAPTURE_AT:
            memory = tuple(each.new_zeros((padded, *each.shape[1:])) for each in inputs)
            try:
                run = self._replay.capture(lambda: self._function(*memory, **fixed))
            except Exception as error:
                log.warning("%s is not captured: %s", self._function, str(error).partition("\n")[0])
            else:
                self._captured[key] = memory, run
        if key not in self._captured:
            return self._function(*inputs, **fixed)
        memory, run = self._captured[key]
        for ours, given in zip(memory, inputs, strict=True):
            ours[:num_rows].copy_(given, non_blocking=True)
        return tuple(each[:num_rows] for each in run())


class _Local(threading.local):
    """Of a thread: memory is not shared between engines of one process."""

    def __init__(self) -> None:
        self.of_devices: dict[torch.device, Captured] = {}


def captured(function: Function) -> Function:
    """On CUDA the function is `Captured`; elsewhere it stays what it is."""
    local = _Local()

    @functools.wraps(function)
    def call(*inputs: Tensor, **fixed: Any) -> Any:
        device = inputs[0].device
        if device.type != "cuda":
            return function(*inputs, **fixed)
        if device not in local.of_devices:
            local.of_devices[device] = Captured(function, CudaReplay())
        return local.of_devices[device](*inputs, **fixed)

    return call  # type: ignore[return-value]
