"""`python -m tests.support.flood ADDRESS METHOD NUM CONNECTIONS MAX_OPEN [TOKEN]`: streams without end.

Each sends one empty message to a method of Health, and none to any other. When no more than MAX_OPEN are
left, and again when none is, it writes a line of JSON: how many are open, and how the others ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio

WATCH = "/grpc.health.v1.Health/Watch"
GENERATE = "/specwire.v1.GenerationService/Generate"
LONGEST_S = 120.0
_SETTLE_S = 30.0


class Flood:
    """The process, seen from outside."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def counts(self) -> Counter[str]:
        """Of the next line: "open" streams, those that were "answered", and those that ended, by status."""
        assert self._process.stdout is not None
        return Counter(json.loads(self._process.stdout.readline()))


@contextlib.contextmanager
def flood(
    address: str, method: str, num: int, *, num_connections: int, max_open: int, token: str = ""
) -> Iterator[Flood]:
    """Streams that last as long as the body.

    Args:
        num: of streams, over so many connections.
        max_open: of them, that are expected to stay.
    """
    words = [address, method, str(num), str(num_connections), str(max_open), *([token] if token else [])]
    process = subprocess.Popen([sys.executable, "-m", __name__, *words], stdout=subprocess.PIPE)
    ending = threading.Timer(LONGEST_S, process.kill)
    ending.start()
    try:
        yield Flood(process)
    finally:
        ending.cancel()
        process.kill()
        process.communicate()


async def main(address: str, method: str, num: int, num_connections: int, max_open: int, token: str) -> None:
    """Open all, and count how they end."""
    metadata = [("authorization", f"Bearer {token}")] if token else None
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(num_connections)]
    counts: Counter[str] = Counter(open=num)
    tasks = [
        asyncio.create_task(_one(channels[i % num_connections], method, metadata, counts)) for i in range(num)
    ]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SETTLE_S):
            while counts["open"] > max_open:  # noqa: ASYNC110 - of thousands of tasks
                await asyncio.sleep(0.01)
    print(json.dumps(counts), flush=True)
    await asyncio.wait(tasks)
    print(json.dumps(counts), flush=True)


async def _one(channel: grpc.aio.Channel, method: str, metadata: Any, counts: Counter[str]) -> None:
    if method == WATCH:
        call = channel.unary_stream(method)(b"", metadata=metadata)
    else:
        call = channel.stream_stream(method)(metadata=metadata)
    try:
        if await call.read() is not grpc.aio.EOF:
            counts["answered"] += 1
            await call.read()
        counts[(await call.code()).name] += 1
    except grpc.RpcError as error:
        counts[error.code().name] += 1
    counts["open"] -= 1


if __name__ == "__main__":
    address, method, num, num_connections, max_open, *token = sys.argv[1:]
    os.nice(10)  # it would be on another machine
    asyncio.run(main(address, method, int(num), int(num_connections), int(max_open), "".join(token)))
