"""Copies of small arrays: to the device without waiting, back to the host all at once.

A copy from pageable memory may wait until the device has finished all earlier work, which in the middle of a
step costs as much as the step. A copy from pinned memory does not, and torch reuses pinned memory only once
the copies from it are complete. Each copy back waits for the device, so all results of a step share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device | str) -> Tensor:
    """The array on the device, with its own dtype; on a CPU it shares memory."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[npt.NDArray[Any]]:
    """Tensors of one device as arrays on the host, in one copy; on a CPU they share memory."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    packed = pack(tensors)
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=packed.is_cuda)
    return unpack(host.copy_(packed).numpy(), tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """uint8 [sum of bytes], on their device: the tensors concatenated, the widest element types first."""
    return torch.cat([tensors[i].contiguous().flatten().view(torch.uint8) for i in _by_width(tensors)])


def unpack(packed: npt.NDArray[np.uint8], like: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Views of what `pack` returned, with the dtypes and shapes of `like`."""
    arrays: dict[int, npt.NDArray[Any]] = {}
    start = 0
    for i in _by_width(like):
        end = start + like[i].nbytes
        dtype = torch.empty(0, dtype=like[i].dtype).numpy().dtype
        arrays[i] = packed[start:end].view(dtype).reshape(like[i].shape)
        start = end
    return [arrays[i] for i in range(len(like))]


def _by_width(tensors: Sequence[Tensor]) -> list[int]:
    """Order by element size, so that every element is aligned to its own size."""
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
