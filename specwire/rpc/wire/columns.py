"""Columns of a message: one entry for each of many requests or answers, or for each of their tokens. No I/O.

Entries of tokens are packed as little-endian bytes, which numpy reads at once.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, TypeVar

import numpy as np

from specwire import errors
from specwire.core import MAX_AT_ONCE, Timings
from specwire.errors import InternalError, InvalidRequestError, SpecwireError
from specwire.support import FloatArray, IntArray
from specwire.v1 import common_pb2

Entry = TypeVar("Entry")
MAX_TRACEPARENT_LEN = 256
_NO_USUAL: Mapping[str, Any] = {}


def pack(lists: Iterable[Sequence[int]], dtype: str = "<u4") -> bytes:
    """All entries of some lists."""
    return np.fromiter(chain.from_iterable(lists), dtype=np.int64).astype(dtype).tobytes()


def join(arrays: Sequence[IntArray | FloatArray], dtype: str) -> bytes:
    """All entries of some arrays."""
    return np.concatenate(arrays).astype(dtype, copy=False).tobytes() if arrays else b""


def unpack(name: str, data: bytes, num_entries: int | None, dtype: str = "<u4") -> Any:
    """[num_entries] of this type, as it is in the message; None for all that there are."""
    size = np.dtype(dtype).itemsize
    if num_entries is None and len(data) % size:
        problem = f"is not a whole number of {size}-byte entries"
        raise InvalidRequestError(name, f"{len(data)} bytes", problem)
    if num_entries is not None and len(data) != num_entries * size:
        raise InvalidRequestError(name, f"{len(data)} bytes", f"must have {num_entries} entries")
    return np.frombuffer(data, dtype=dtype)


def split(entries: Sequence[Entry], counts: Sequence[int]) -> list[Sequence[Entry]]:
    """Consecutive parts of these lengths."""
    ends = [*accumulate(counts)]
    return [entries[end - count : end] for end, count in zip(ends, counts, strict=True)]


def add(
    message: Any, nouns: Sequence[Any], attributes: Mapping[str, str], usual: Mapping[str, Any] = _NO_USUAL
) -> None:
    """Columns that have, by their names, this attribute of each noun; one stays empty where all have the
    usual one."""
    for name, attribute in attributes.items():
        entries = list(map(operator.attrgetter(attribute), nouns))
        if name not in usual or entries.count(usual[name]) < len(entries):
            getattr(message, name).extend(entries)


def read(
    message: Any, num_entries: int, names: Collection[str], usual: Mapping[str, Any] = _NO_USUAL
) -> list[Sequence[Any]]:
    """These columns, in this order, once each is found to have so many entries, or none of usual ones."""
    found: list[Sequence[Any]] = [getattr(message, name) for name in names]
    for i, name in enumerate(names):
        if not found[i] and name in usual:
            found[i] = [usual[name]] * num_entries
        elif len(found[i]) != num_entries:
            raise InvalidRequestError(name, len(found[i]), f"must have {num_entries} entries")
    return found


def add_lists(message: Any, lens_name: str, name: str, lists: Sequence[Sequence[int]], dtype: str) -> None:
    """Lists as two columns: how many entries each has, and the entries of all."""
    getattr(message, lens_name).extend(map(len, lists))
    setattr(message, name, pack(lists, dtype))


def read_lists(message: Any, num_lists: int, lens_name: str, name: str, dtype: str) -> tuple[list[int], Any]:
    """How many entries each list has, and the entries of all, as an array."""
    counts = list(read(message, num_lists, [lens_name])[0])
    if min(counts, default=0) < 0:
        raise InvalidRequestError(lens_name, min(counts), "must be at least 0")
    return counts, unpack(name, getattr(message, name), sum(counts), dtype)


def checked_traceparents(found: Sequence[str]) -> Sequence[str]:
    """One for each request; empty where it is not traced."""
    longest = max(map(len, found), default=0)
    if longest > MAX_TRACEPARENT_LEN:
        raise InvalidRequestError("traceparent", f"{longest} characters", f"over {MAX_TRACEPARENT_LEN}")
    return found


def check_size(message: Any) -> None:
    """Refuse more openings or requests than other streams can wait for."""
    for name in ("open", "sequence_ids"):
        if (num := len(getattr(message, name))) > MAX_AT_ONCE:
            raise InvalidRequestError(name, num, f"over {MAX_AT_ONCE} in a message")


# --- timings and errors -------------------------------------------------------------------------------


def timings_to_proto(timings: Sequence[Timings]) -> common_pb2.Timings:
    """One entry for each answer."""
    return common_pb2.Timings(**dict(zip(Timings._fields, zip(*timings, strict=True), strict=False)))


def timings_from_proto(message: common_pb2.Timings, num_entries: int) -> list[Timings]:
    """One for each answer."""
    return list(map(Timings, *read(message, num_entries, Timings._fields)))


def error_to_proto(sequence_id: int, error: SpecwireError) -> common_pb2.SequenceError:
    """What ended a sequence."""
    return common_pb2.SequenceError(
        sequence_id=sequence_id, reason=error.reason, message=str(error), fields=error.details()
    )


def error_from_proto(message: common_pb2.SequenceError) -> SpecwireError:
    """The error that the peer raised."""
    try:
        return errors.rebuild(message.reason, dict(message.fields), message.message)
    except (KeyError, ValueError):  # not an error of ours, or with other fields
        return InternalError(f"{message.reason}: {message.message}")
