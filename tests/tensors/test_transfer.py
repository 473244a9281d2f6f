"""What goes to a device and comes back is the same; packed as it is where the device is not the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specwire.rule.transfer import pack, to_device, to_host, unpack

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TENSORS = {
    "tokens": torch.tensor([3, -1, 2**40]),
    "few": torch.tensor([True, False, True]),
    "probs": torch.rand(3, 5),
    "none": torch.zeros(0, 7, dtype=torch.float64),
    "masses": torch.rand(3, dtype=torch.float64),
    "column": torch.arange(12).reshape(3, 4)[:, 1],
}


def test_packed_and_unpacked_again() -> None:
    tensors = list(TENSORS.values())
    packed = pack(tensors)
    assert packed.nbytes == sum(tensor.nbytes for tensor in tensors)
    for tensor, array in zip(tensors, unpack(packed.numpy(), tensors), strict=True):
        assert array.flags.aligned
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array, tensor.numpy())


@pytest.mark.parametrize("device", DEVICES)
def test_there_and_back(device: str) -> None:
    arrays = [tensor.numpy() for tensor in TENSORS.values()]
    for array, back in zip(arrays, to_host(*(to_device(array, device) for array in arrays)), strict=True):
        np.testing.assert_array_equal(back, array)


def test_on_a_cpu_nothing_is_copied() -> None:
    (array,) = to_host(TENSORS["probs"])
    assert array.ctypes.data == TENSORS["probs"].data_ptr()
