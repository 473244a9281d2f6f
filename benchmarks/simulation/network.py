"""Streams between simulated processes: what a message costs at both ends, and how long it is on its way.

sender ──▶ half a round trip, jitter ──▶ receiver ──▶ handler
one after    never overtaking             one after
the other                                 the other
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from specwire.errors import RequestCancelledError, ServiceUnavailableError, SpecwireError
from specwire.v1 import draft_pb2


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """What gRPC and Python take, in milliseconds.

    Attributes:
        message_ms: processor time for each message that is sent or received; a process does one after the
            other, on a core of its own.
        wake_ms: until a process notices a message that has arrived, besides.
        round_ms: of the coordinator between the end of a round and the next one's first message, besides.
        proposal_us: processor time of the draft service for each proposal, forks and bookkeeping included.
    """

    message_ms: float = 0.0
    wake_ms: float = 0.0
    round_ms: float = 0.0
    proposal_us: float = 0.0


class Process:
    """A process whose event loop does one thing after the other."""

    def __init__(self, message_ms: float) -> None:
        self._message_s = message_ms / 1e3
        self._free_at_s = 0.0

    def handle_message(self, now_s: float) -> float:
        """When a message that came up now has been sent, or received."""
        return self.work(now_s, self._message_s)

    def work(self, now_s: float, work_s: float) -> float:
        """When work that came up now is done."""
        self._free_at_s = max(self._free_at_s, now_s) + work_s
        return self._free_at_s


@dataclass(frozen=True, kw_only=True)
class Link:
    """Between two processes.

    Attributes:
        rtt_ms: there and back.
        jitter_ms: of each message, uniform in [0, jitter_ms].
        mbit_per_s: of each stream and direction; 0 for no limit.
    """

    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    mbit_per_s: float = 0.0

    def transmission_s(self, message: Any) -> float:
        """How long a message occupies the line."""
        return 8e-6 * message.ByteSize() / self.mbit_per_s if self.mbit_per_s else 0.0


class Line:
    """One direction of a stream: messages arrive in the order in which they were put."""

    def __init__(
        self, sender: Process, receiver: Process, link: Link, wake_ms: float, deliver: Callable[[Any], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sender, self._receiver, self._link = sender, receiver, link
        self._delay_s, self._jitter_s = (link.rtt_ms / 2 + wake_ms) / 1e3, link.jitter_ms / 1e3
        self._random = random.Random(0)
        self._deliver = deliver
        self._under_way: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._last_s = self._free_s = 0.0

    def put(self, message: Any, *, work_s: float = 0.0, later_s: float = 0.0) -> None:
        """Send a message, `work_s` of the sender's time and then `later_s` from now."""
        self._sender.work(self._loop.time(), work_s)
        leaves_s = self._sender.handle_message(self._loop.time()) + later_s
        jitter_s = self._random.uniform(0, self._jitter_s) if self._jitter_s else 0.0
        if not isinstance(message, SpecwireError):
            self._free_s = leaves_s = max(leaves_s, self._free_s) + self._link.transmission_s(message)
        self._last_s = max(self._last_s, leaves_s + self._delay_s + jitter_s)
        self._under_way.append(message)
        self._loop.call_at(self._last_s, self._arrive)

    def _arrive(self) -> None:
        self._arrived.append(self._under_way.popleft())
        self._loop.call_at(self._receiver.handle_message(self._loop.time()), self._hand_over)

    def _hand_over(self) -> None:
        self._deliver(self._arrived.popleft())


def _num_proposals(response: Any) -> int:
    """In an answer of the draft."""
    if not isinstance(response, draft_pb2.DraftResponse):
        return 0
    return len(response.proposals.num_tokens) + len(response.prepared.sequence_ids)


Handler = Callable[[AsyncIterator[Any], Any], Awaitable[None]]
"""A servicer's streaming method, bound: takes the requests and a context to write to."""


class VirtualCall:
    """A `coordinator.peers.link.Call` to a handler in another simulated process."""

    def __init__(
        self,
        client: Process,
        service: Process,
        handler: Handler,
        *,
        link: Link,
        overheads: Overheads,
        later_ms: float = 0.0,
    ) -> None:
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._responses: asyncio.Queue[Any] = asyncio.Queue()
        wake_ms, self._proposal_s = overheads.wake_ms, overheads.proposal_us / 1e6
        self._up = Line(client, service, link, wake_ms, self._requests.put_nowait)
        self._down = Line(service, client, link, wake_ms, self._responses.put_nowait)
        self._later_s = later_ms / 1e3
        self._one_way_s = link.rtt_ms / 2e3
        self._service = asyncio.create_task(self._serve(handler))

    async def send(self, request: Any) -> None:
        """See `Call`."""
        self._up.put(request, later_s=self._later_s)

    async def read(self) -> Any:
        """See `Call`."""
        response = await self._responses.get()
        if isinstance(response, SpecwireError):
            self._responses.put_nowait(response)
            raise response
        return response

    def cancel(self) -> None:
        """See `Call`."""
        asyncio.get_running_loop().call_later(self._one_way_s, self._service.cancel)
        self._responses.put_nowait(ServiceUnavailableError("the stream was cancelled"))

    async def write(self, response: Any) -> None:
        """The service's side: it is the handler's context, too."""
        self._down.put(response, work_s=self._proposal_s * _num_proposals(response))

    def invocation_metadata(self) -> tuple[()]:
        """The service's side, too: no headers."""
        return ()

    def peer(self) -> str:
        """All are one coordinator."""
        return "simulation"

    async def _serve(self, handler: Handler) -> None:
        try:
            await handler(self._incoming(), self)
        except SpecwireError as error:
            self._down.put(error)
        except asyncio.CancelledError:
            self._down.put(RequestCancelledError("the stream was cancelled"))

    async def _incoming(self) -> AsyncIterator[Any]:
        while True:
            yield await self._requests.get()
