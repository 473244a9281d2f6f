"""The private API of grpc.aio in use; a test pins it, and says what to do when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

_MOST_BYTES = 4096


class Loop(asyncio.SelectorEventLoop):
    """An event loop that handles all operations of gRPC that have ended in one turn.

    grpc.aio writes a byte to a socket for each operation that ends. Its reader handles all that have ended,
    but takes one byte: a turn of the loop for each operation, and under load most find nothing to do.
    """

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        if getattr(getattr(callback, "func", None), "__name__", "") == "_handle_events":
            super().add_reader(fd, handle_events, fd, callback)
        else:
            super().add_reader(fd, callback, *args)


def handle_events(reader: socket.socket, handle: Callable[[], None]) -> None:
    """Leave one byte to grpc.aio's reader, which handles everything."""
    num_bytes = len(reader.recv(_MOST_BYTES, socket.MSG_PEEK))
    if num_bytes > 1:
        reader.recv(num_bytes - 1)
    handle()


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
