"""What is used of grpc.aio beyond its public interface; `tests/test_private_apis.py` pins it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio


async def send(call: Any, request: Any) -> None:
    """Write to a stream that one's own side opened; if it has ended, its reader is the one to learn why.

    `call.write` does not leave it at that. When it fails, as it does on a stream that the server has just
    ended, it makes INTERNAL the status of the call, which hides the true one and all that is still unread.
    """
    try:
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError):
            await call.wait_for_connection()
            await call._cython_call.send_serialized_message(request.SerializeToString())
    except asyncio.CancelledError:
        call.cancel()
        raise
