"""One stream to a model service, shared by all sequences of this coordinator there. Knows no grpc.

    sequences ─▶ put, open, close ─▶ collected while the last message is sent ─▶ one message
    sequences ◀─ received, failed ◀─ one message, decoded and checked as a whole

A lone sequence's request goes out at once. When the stream ends, all of its sequences have failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from specwire import clock
from specwire.errors import InternalError, InvalidRequestError, ServiceUnavailableError, SpecwireError
from specwire.proposals.pushes import Arrived, PushWindow
from specwire.rpc.wire import columns
from specwire.rpc.wire import draft as draft_wire
from specwire.rpc.wire import verify as verify_wire
from specwire.v1 import common_pb2, draft_pb2, verify_pb2

log = logging.getLogger(__name__)

MAX_PUSHES = 64
"""Of a sequence, that wait for the link."""
MAX_SHARED_BYTES = 4096
"""Pushed in the message of a request, which waits for them."""


class Call(Protocol):
    """A stream of messages to a model service."""

    async def send(self, request: Any) -> None:
        """Send a message; if the stream has ended, `read` raises why."""

    async def read(self) -> Any:
        """The next message.

        Raises:
            SpecwireError: as the peer raised it, or for a failure of the transport.
        """

    def cancel(self) -> None:
        """End the stream; the peer frees its memory."""


class Codec(NamedTuple):
    """How requests become messages, and messages answers.

    Attributes:
        encode: a message, from sequences to open and to close, and requests.
        decode: a message's answers and errors, each with the sequence that it is for; raises InternalError or
            InvalidRequestError for a message that cannot be right.
    """

    encode: Callable[[Sequence[common_pb2.OpenSequence], Sequence[int], Sequence[Any]], Any]
    decode: Callable[[Any], Iterable[tuple[int, Any]]]


Answers = Iterator[tuple[int, Any]]


def verify_codec(vocab_size: int, source: str = "") -> Codec:
    """Of a verify service with this vocabulary, in tokens."""

    def decode(message: verify_pb2.VerifyResponse) -> Answers:
        for answer in verify_wire.answers_from_proto(message, vocab_size):
            yield answer.sequence_id, answer
        yield from _errors(message)

    return Codec(verify_wire.request_to_proto, decode)


def draft_codec(vocab_size: int, source: str = "") -> Codec:
    """Of a draft service.

    Args:
        vocab_size: of the target, in tokens.
        source: of its proposals: the model's name.
    """

    def decode(message: draft_pb2.DraftResponse) -> Answers:
        for answer in draft_wire.answers_from_proto(message, vocab_size, source):
            yield answer.sequence_id, answer
        if message.HasField("prepared"):
            for each in draft_wire.prepared_from_proto(message.prepared, vocab_size, source):
                yield each.sequence_id, each
        yield from _errors(message)

    return Codec(draft_wire.request_to_proto, decode)


def _errors(message: Any) -> Iterator[tuple[int, SpecwireError]]:
    """Sequences that the service closed, and why."""
    for error in message.errors:
        yield error.sequence_id, columns.error_from_proto(error)


class Receiver(Protocol):
    """One sequence's end of a link.

    Attributes:
        request_bytes: its share of the message with its last request.
    """

    request_bytes: int

    def received(self, answer: Any, num_bytes: int) -> None:
        """An answer, and its share of the message that it came with. Must not raise."""

    def failed(self, error: SpecwireError) -> None:
        """The sequence is closed: nothing more is received. Must not raise."""


class SharedLink:
    """One stream, and the sequences that are open on it.

    Attributes:
        error: why it has ended; None while it is open.
        num_received: messages so far.
    """

    def __init__(self, call: Call, codec: Codec) -> None:
        """Begin to send and to receive."""
        self.num_received = 0
        self.error: SpecwireError | None = None
        self._call = call
        self._codec = codec
        self._receivers: dict[int, Receiver] = {}
        self._last_id = 0
        self._opened: dict[int, common_pb2.OpenSequence] = {}
        self._closed: list[int] = []
        self._orders: list[Any] = []
        self._pushes: dict[int, deque[tuple[Any, int]]] = {}  # with their bytes; sequences take turns
        self._window, self._arrived = PushWindow(), Arrived()
        self._is_retired = False
        self._ready = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._ending(work)) for work in (self._send_all, self._receive_all)
        ]

    def open(self, opening: common_pb2.OpenSequence, receiver: Receiver, timeout_s: float | None) -> int:
        """Open a sequence; returns its id.

        Args:
            timeout_s: its deadline, in seconds from now; None for none.
        """
        self._last_id += 1
        message = common_pb2.OpenSequence()
        message.CopyFrom(opening)
        message.sequence_id = self._last_id
        message.timeout_ms = 0 if timeout_s is None else max(1, int(timeout_s * 1e3))
        self._receivers[self._last_id] = receiver
        self._opened[self._last_id] = message
        self._ready.set()
        return self._last_id

    def put(self, order: Any) -> None:
        """Send a request with the next message; what still waits to be pushed is out of date."""
        self._orders.append(order)
        if self._pushes and self._window.room <= 0:
            self._pushes.pop(order.sequence_id, None)
        self._ready.set()

    def push(self, order: Any, num_bytes: int) -> None:
        """Send what the peer may use later, when the link has room; of a sequence, the last 64 wait.

        Args:
            num_bytes: about its size.
        """
        waiting = self._pushes.setdefault(order.sequence_id, deque(maxlen=MAX_PUSHES))
        waiting.append((order, num_bytes))
        if self._window.room > 0:
            self._ready.set()

    def close_sequence(self, sequence_id: int) -> None:
        """Close a sequence; the peer frees its memory, and never learns of one that it was not sent."""
        self._pushes.pop(sequence_id, None)
        if self._receivers.pop(sequence_id, None) is not None:
            if self._opened.pop(sequence_id, None) is None:
                self._closed.append(sequence_id)
            self._ready.set()
            self._end_if_unused()

    def retire(self) -> None:
        """End it after its last sequence: new ones are opened elsewhere."""
        self._is_retired = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_retired and not self._receivers:
            self.close()

    def close(self) -> None:
        """End the stream with all its sequences."""
        self._end(ServiceUnavailableError("the stream was closed"))

    def _end(self, error: SpecwireError) -> None:
        if self.error is not None:
            return
        self.error = error
        self._call.cancel()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.failed(error)

    # --- messages -------------------------------------------------------------------------------------

    async def _ending(self, work: Callable[[], Awaitable[None]]) -> None:
        """End the stream with one of its tasks, be it by a defect: sequences would wait in vain."""
        error: SpecwireError = InternalError("the stream to a model service failed; the log has the details")
        try:
            await work()
        except SpecwireError as found:
            error = found
        except Exception:
            log.exception("a stream to a model service failed")
        finally:
            self._end(error)

    async def _send_all(self) -> None:
        while True:
            await self._ready.wait()
            self._ready.clear()
            message = self._next_message()
            if message is not None:
                await self._call.send(message)

    def _next_message(self) -> Any:
        """All that is ready; None if it was closed again before it was sent."""
        opened, self._opened = self._opened, {}
        closed, self._closed = self._closed, []
        orders = [order for order in self._orders if order.sequence_id in self._receivers]
        self._orders = []
        pushes = self._next_pushes(shares=bool(orders))
        if not (opened or closed or orders or pushes or self._arrived.is_due):
            return None
        message = self._codec.encode([*opened.values()], closed, [*orders, *pushes])
        if self._arrived.num_bytes:
            message.num_arrived_bytes = self._arrived.report()
        if pushes:
            self._window.sent(message.ByteSize(), clock.stopwatch_ns())
        if self._pushes and self._window.room > 0:
            self._ready.set()
        share = message.ByteSize() // max(1, len(orders))
        for order in orders:
            self._receivers[order.sequence_id].request_bytes = share
        return message

    def _next_pushes(self, *, shares: bool) -> list[Any]:
        """What the link has room for; sequences take turns.

        Args:
            shares: the message has requests, which are not to wait for much.
        """
        found: list[Any] = []
        room = min(self._window.room, MAX_SHARED_BYTES) if shares else self._window.room
        for sequence_id in [*self._pushes]:
            waiting = self._pushes.pop(sequence_id)
            while waiting and room > (waiting[0][1] if shares else 0):
                order, num_bytes = waiting.popleft()
                found.append(order)
                room -= num_bytes
            if waiting:
                self._pushes[sequence_id] = waiting
            if room <= 0:
                break
        return found

    async def _receive_all(self) -> None:
        while self.error is None:
            self._dispatch(await self._call.read())

    def _dispatch(self, message: Any) -> None:
        """Raises:
        SpecwireError: the message cannot be right, so nothing of the peer can be trusted.
        """
        try:
            answers = list(self._codec.decode(message))
            self._note_pushes(message)
        except (InternalError, InvalidRequestError) as error:
            raise ServiceUnavailableError(f"the service sent {error}") from None
        self.num_received += 1
        share = message.ByteSize() // max(1, len(answers))
        for sequence_id, answer in answers:
            receiver = self._receivers.get(sequence_id)
            if receiver is None:
                if not 0 < sequence_id <= self._last_id:  # whose answer it is cannot be known
                    problem = f"the service answers sequence {sequence_id}, which was never opened"
                    raise ServiceUnavailableError(problem)
                continue  # closed while it was under way
            if isinstance(answer, SpecwireError):
                del self._receivers[sequence_id]
                self._pushes.pop(sequence_id, None)
                receiver.failed(answer)
            else:
                receiver.received(answer, share)
        self._end_if_unused()

    def _note_pushes(self, message: Any) -> None:
        """How much of what is pushed has arrived, here and there.

        Raises:
            InvalidRequestError: more than was sent.
        """
        if isinstance(message, draft_pb2.DraftResponse):
            if message.HasField("prepared"):
                self._arrived.add(message.ByteSize())
                if self._arrived.is_due:
                    self._ready.set()
        elif message.num_arrived_bytes:
            self._window.arrived(message.num_arrived_bytes, clock.stopwatch_ns())
            if self._pushes:
                self._ready.set()

    async def ended(self) -> None:
        """Wait until its tasks have ended, after `close`."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)
