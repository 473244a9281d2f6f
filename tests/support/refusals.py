"""Errors as tests expect them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from specwire import (
    SpecwireError,
)
from specwire.rpc.statuses import from_rpc_error


def refused(error: type[SpecwireError], *parts: str) -> Any:
    """`pytest.raises` of exactly this type, with all parts in the message."""
    pattern = ".*".join(re.escape(part) for part in parts)
    return pytest.raises(error, match=pattern, check=lambda raised: type(raised) is error)


@contextlib.contextmanager
def our_errors() -> Iterator[None]:
    """Raise what the service raised, rather than grpc's error."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
