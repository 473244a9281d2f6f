"""Malformed messages: bytes changed at random, or fields set to what they must not be.

Everything is drawn from the generator that is handed in, so a seed names a message.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_INT_EXTREMES = (0, 1, -1, 2, 15, 16, 63, 64, 65, 335, 336, 337, 4096, 2**20, 2**31 - 1, -(2**31))
_LONG_EXTREMES = (*_INT_EXTREMES, 2**53, 2**63 - 1, -(2**63))
_FLOAT_EXTREMES = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    2.0,
    1e-300,
    5e-324,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
)
_TEXTS = (
    "",
    "\x00",
    "x" * 5000,
    "</s>",
    "{{ 1 / 0 }}",
    "\U0001f44b\u200d\ufffd",
    "00-" + "0" * 32 + "-" + "f" * 16,
)
_BYTES = (b"", b"\x00", b"\xff" * 3, b"\xff" * 4, bytes(8), b"\x07\x00\x00\x00" * 2, bytes(range(256)) * 8)
_ENTRIES = (bytes(4), b"\x01\0\0\0", b"\xff" * 4, b"\xff\xff\xff\x7f", b"\0\0\xc0\x7f", b"\0\0\0\x80")
"""Of a column: 0, 1, -1 or the largest id, the largest int32, NaN as float32, -0.0 or the smallest int32."""
_MANY = 3000

_NUMBERS: dict[int, Sequence[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _INT_EXTREMES,
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 99, -1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: _LONG_EXTREMES,
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**53, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: _FLOAT_EXTREMES,
    FieldDescriptor.CPPTYPE_FLOAT: _FLOAT_EXTREMES,
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
}

Draws = random.Random


# --- bytes ----------------------------------------------------------------------------------------


def mutated_bytes(data: bytes, others: Sequence[bytes], draws: Draws) -> bytes:
    """One change or a few: bits flipped, parts lost, doubled, put in, or taken from another message."""
    for _ in range(draws.choice((1, 1, 1, 2, 4))):
        data = draws.choice(_BYTE_CHANGES)(data, draws.choice(others), draws)
    return data


def _place(data: bytes, draws: Draws) -> int:
    return draws.randint(0, len(data))


def _flip(data: bytes, _other: bytes, draws: Draws) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    for _ in range(draws.randint(1, 3)):
        changed[draws.randrange(len(changed))] ^= 1 << draws.randrange(8)
    return bytes(changed)


def _truncate(data: bytes, _: bytes, draws: Draws) -> bytes:
    return data[: _place(data, draws)]


def _splice(data: bytes, other: bytes, draws: Draws) -> bytes:
    return data[: _place(data, draws)] + other[_place(other, draws) :]


def _double(data: bytes, _: bytes, draws: Draws) -> bytes:
    start, end = sorted((_place(data, draws), _place(data, draws)))
    return data[:end] + data[start:]


def _insert(data: bytes, _: bytes, draws: Draws) -> bytes:
    place = _place(data, draws)
    return data[:place] + draws.randbytes(draws.randint(1, 12)) + data[place:]


def _append(data: bytes, other: bytes, _: Draws) -> bytes:
    return data + other


_BYTE_CHANGES: Sequence[Callable[[bytes, bytes, Draws], bytes]] = (
    _flip, _flip, _truncate, _splice, _double, _insert, _append,
)  # fmt: skip


# --- fields ---------------------------------------------------------------------------------------


def mutated_message(message: Message, draws: Draws) -> Message:
    """One field or a few, at any depth, set to an extreme, emptied, repeated, or filled."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(draws.choice((1, 1, 1, 2, 3))):
        _change_field(changed, draws)
    return changed


def mutated_conversation(messages: Sequence[Message], draws: Draws) -> list[Message]:
    """What is said on one stream: messages changed, left out, said again, or in another order."""
    changed = [mutated_message(m, draws) if draws.random() < 0.4 else m for m in messages]
    for _ in range(draws.choice((0, 0, 1, 2))):
        place = draws.randint(0, len(changed))
        match draws.randrange(4):
            case 0:
                del changed[place : place + 1]
            case 1:
                changed.insert(place, draws.choice(list(messages)))
            case 2:
                changed.insert(place, type(messages[0])())
            case 3:
                draws.shuffle(changed)
    return changed


def _change_field(message: Message, draws: Draws) -> None:
    fields: Sequence[Any] = message.DESCRIPTOR.fields
    if not fields:
        return
    field = draws.choice(fields)
    if draws.random() < 0.15:
        message.ClearField(field.name)
    elif field.message_type and field.message_type.GetOptions().map_entry:
        _change_map(getattr(message, field.name), field.message_type, draws)
    elif field.is_repeated:
        _change_repeated(message, field, draws)
    elif field.message_type:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if draws.random() < 0.8:
            _change_field(inner, draws)
    elif field.type == FieldDescriptor.TYPE_BYTES and draws.random() < 0.7:
        setattr(message, field.name, _changed_column(getattr(message, field.name), draws))
    else:
        setattr(message, field.name, _extreme(field, draws))


def _changed_column(data: bytes, draws: Draws) -> bytes:
    """With another entry, and as long as before."""
    place = 4 * draws.randrange(len(data) // 4) if len(data) >= 4 else 0
    return (data[:place] + draws.choice(_ENTRIES) + data[place + 4 :])[: len(data)]


def _change_map(entries: Any, entry: Descriptor, draws: Draws) -> None:
    keys, values = entry.fields
    for _ in range(draws.choice((1, 1, 3, 400))):
        entries[_extreme(keys, draws)] = _extreme(values, draws)


def _change_repeated(message: Message, field: FieldDescriptor, draws: Draws) -> None:
    values = getattr(message, field.name)
    if field.message_type:
        if values and draws.random() < 0.5:
            _change_field(draws.choice(list(values)), draws)
        for _ in range(draws.choice((0, 1, 50))):
            values.add()
        return
    match draws.randrange(4):
        case 0 if values:
            values[draws.randrange(len(values))] = _extreme(field, draws)
        case 1:
            values.extend(list(values))
        case 2:
            values.extend([_extreme(field, draws)] * draws.choice((1, 65, _MANY)))
        case _:
            values.append(_extreme(field, draws))


def _extreme(field: FieldDescriptor, draws: Draws) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return draws.choice(_TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draws.choice(_BYTES)
    return draws.choice(_NUMBERS[field.cpp_type])
