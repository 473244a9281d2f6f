"""The private API of grpc.aio in use; a test pins it, and says what to do when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio


async def send(call: Any, request: Any) -> None:
    """Write to a stream that this side opened. If the stream has ended, return: its reader gets the status.

    A `call.write` that fails, as on a stream that the server has just ended, sets the status of the call to
    INTERNAL, which hides the true status and all unread messages.
    """
    try:
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError):
            await call.wait_for_connection()
            await call._cython_call.send_serialized_message(request.SerializeToString())
    except asyncio.CancelledError:
        call.cancel()
        raise
