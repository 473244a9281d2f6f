"""The floor under a round: bare grpc.aio stream round trips between two processes, no work in them.

A specwire round makes two such exchanges, one with the draft service and one with the verify service.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc
import grpc.aio

from benchmarks.pipes import ask, end, read_line, start_module
from benchmarks.processes import Usage, difference

MESSAGE_BYTES = 1024
_METHOD = "/benchmarks.Echo/Echo"
_WARM_UP = 100


class EchoPair:
    """A server and a client process; a context manager that ends both.

    The client is a process of its own too: grpc.aio shares one poller among the event loops of a
    process, and the benchmark's own process has one already.
    """

    def __init__(self) -> None:
        self._server = start_module("benchmarks.echo", "serve")
        self._client = start_module("benchmarks.echo", "ask", read_line(self._server))

    def round_trips_s(self, count: int) -> list[float]:
        """Seconds of each of `count` round trips, one after another on one stream."""
        times_s: list[float] = ask(self._client, {"count": count})
        return times_s

    def cpu_ms(self, count: int, num_streams: int, message_bytes: int) -> float:
        """Processor time of both ends for a message there and back, in milliseconds; opening is counted too.

        Args:
            count: of them on each stream, one after another.
            num_streams: at once, on one channel.
        """
        usage = Usage({"server": self._server.pid, "client": self._client.pid})
        before = usage.cpu_s()
        ask(self._client, {"count": count, "num_streams": num_streams, "message_bytes": message_bytes})
        spent_s = difference(usage.cpu_s(), before)
        return sum(spent_s.values()) / (num_streams * (_warm_up(num_streams) + count)) * 1e3

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._client, self._server):
            end(process)


# --- in the processes -----------------------------------------------------------------------------


async def _ask(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        for line in sys.stdin:
            print(json.dumps(await _round_trips_s(channel, **json.loads(line))), flush=True)


async def _round_trips_s(
    channel: Any, count: int, num_streams: int = 1, message_bytes: int = MESSAGE_BYTES
) -> list[float]:
    """Of all streams."""
    message, warm_up = bytes(message_bytes), _warm_up(num_streams)
    streams = (_of_one_stream_s(channel, message, count, warm_up) for _ in range(num_streams))
    return [time_s for times_s in await asyncio.gather(*streams) for time_s in times_s]


async def _of_one_stream_s(channel: Any, message: bytes, count: int, warm_up: int) -> list[float]:
    times_s = []
    call = channel.stream_stream(_METHOD)()
    for _ in range(warm_up + count):
        started_s = time.perf_counter()
        await call.write(message)
        await call.read()
        times_s.append(time.perf_counter() - started_s)
    call.cancel()
    return times_s[warm_up:]


def _warm_up(num_streams: int) -> int:
    """Uncounted round trips of each stream."""
    return _WARM_UP // num_streams


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, handler_call_details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(_echo)


async def _echo(requests: AsyncIterator[bytes], context: Any) -> None:
    async for request in requests:
        await context.write(request)


async def _serve() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve() if sys.argv[1] == "serve" else _ask(sys.argv[2]))
