"""Small arrays from the host to a device, without waiting for it.

`tensor.to(device)` from ordinary memory waits until the device is done with everything before, which in the
middle of a step costs as much as the step. A copy that does not wait is as safe: ordinary memory is staged
before the call returns, so the array may be reused at once.
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
    return torch.from_numpy(array).to(device, non_blocking=True)


def indices(values: Sequence[int], device: torch.device | str) -> Tensor:
    """int64 [n] on the device."""
    return to_device(np.array(values, dtype=np.int64), device)
