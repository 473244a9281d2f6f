"""Arrays as the bytes of messages, and back."""

from __future__ import annotations

import numpy as np

from specwire.errors import InvalidRequestError
from specwire.support import FloatArray, IntArray


def ids_to_bytes(token_ids: IntArray) -> bytes:
    """int64 [n] to little-endian uint32."""
    return token_ids.astype("<u4").tobytes()


def ids_from_bytes(data: bytes, name: str) -> IntArray:
    """Little-endian uint32 to int64 [n]."""
    _check_multiple_of_4(data, name)
    return np.frombuffer(data, dtype="<u4").astype(np.int64)


def floats_to_bytes(values: FloatArray) -> bytes:
    """float32 [n] to little-endian float32."""
    return values.astype("<f4", copy=False).tobytes()


def floats_from_bytes(data: bytes, name: str) -> FloatArray:
    """Little-endian float32 to float32 [n]."""
    _check_multiple_of_4(data, name)
    return np.frombuffer(data, dtype="<f4")


def _check_multiple_of_4(data: bytes, name: str) -> None:
    if len(data) % 4:
        raise InvalidRequestError(name, f"{len(data)} bytes", "is not a whole number of 4-byte entries")
