"""Small arrays between host and device: to it without waiting, back in one piece.

A copy from ordinary memory may wait until the device is done with everything before, which in the middle of
a step costs as much as the step. Pinned memory does not, and torch gives it out again only when the copies
from it are done. Each copy back waits for the device, so all that a step has to say comes in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device | str) -> Tensor:
    """The array on the device, in its own type; on a CPU the same memory."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[npt.NDArray[Any]]:
    """The same arrays on the host, from one device, by one copy; on a CPU the same memory."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    packed = pack(tensors)
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=packed.is_cuda)
    return unpack(host.copy_(packed).numpy(), tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """uint8 [sum of bytes], on their device: the tensors one after another, the widest numbers first."""
    return torch.cat([tensors[i].contiguous().flatten().view(torch.uint8) for i in _by_width(tensors)])


def unpack(packed: npt.NDArray[np.uint8], like: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Arrays of the types and shapes of `like`, over the memory of what `pack` made of tensors like them."""
    arrays: dict[int, npt.NDArray[Any]] = {}
    start = 0
    for i in _by_width(like):
        end = start + like[i].nbytes
        arrays[i] = packed[start:end].view(_numpy_type(like[i].dtype)).reshape(like[i].shape)
        start = end
    return [arrays[i] for i in range(len(like))]


def _by_width(tensors: Sequence[Tensor]) -> list[int]:
    """Every number then begins at a multiple of its own size."""
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())


def _numpy_type(dtype: torch.dtype) -> npt.DTypeLike:
    return torch.empty(0, dtype=dtype).numpy().dtype


def indices(values: Sequence[int], device: torch.device | str) -> Tensor:
    """int64 [n] on the device."""
    return to_device(np.array(values, dtype=np.int64), device)
