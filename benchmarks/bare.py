"""The floor under many streams: a bare grpc.aio server that sends set messages, and a bare client.

No rounds, no rule, no devices: each stream's messages are known before, and leave as fast as they can.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

from benchmarks.processes import Usage, end, read_line, start_module
from specwire.v1.generation_pb2 import GenerateResponse

Streams = Sequence[Sequence[GenerateResponse]]
"""The messages of each stream, in order."""
_METHOD = "/benchmarks.Bare/Stream"


class BareServer:
    """A server process; a context manager that ends it."""

    def __init__(self, streams: Streams, path: Path) -> None:
        """`path` is where the messages are left for the process."""
        texts = [[message.SerializeToString().hex() for message in messages] for messages in streams]
        path.write_text(json.dumps(texts))
        self._process = start_module("benchmarks.bare", str(path))
        self.address = read_line(self._process)

    @property
    def usage(self) -> Usage:
        """Of the process."""
        return Usage({"bare server": self._process.pid})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process)


async def read_all(address: str, streams: Streams) -> float:
    """Read all streams at once, as many as there are; returns the seconds until the last has ended.

    Raises:
        RuntimeError: not the messages that were to come.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        method = channel.unary_stream(_METHOD, response_deserializer=GenerateResponse.FromString)
        started_s = time.perf_counter()
        found = await asyncio.gather(*(_read(method, i) for i in range(len(streams))))
        elapsed_s = time.perf_counter() - started_s
    if found != [len(messages) for messages in streams]:
        raise RuntimeError("the bare server's streams are not what they should be")
    return elapsed_s


async def _read(method: Any, index: int) -> int:
    call, count = method(str(index).encode()), 0
    while await call.read() is not grpc.aio.EOF:
        count += 1
    return count


# --- in the process -------------------------------------------------------------------------------


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(
            self._stream, response_serializer=GenerateResponse.SerializeToString
        )

    async def _stream(self, request: bytes, context: Any) -> None:
        for message in self._streams[int(request)]:
            await context.write(message)


def _messages(path: Path) -> Streams:
    streams = json.loads(path.read_text())
    return [[GenerateResponse.FromString(bytes.fromhex(message)) for message in one] for one in streams]


async def _serve(streams: Streams) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Handler(streams),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(_messages(Path(sys.argv[1]))))
