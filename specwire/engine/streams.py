"""A coordinator's stream to a model service: its open sequences, and the answers that go back.

    message ─▶ close, open ─▶ jobs of all its requests, submitted together ─▶ engine
    message ◀─ all that is ready when the last one was written ◀─ results of a forward pass

A sequence lives until the coordinator closes it, its deadline, an error of its own, or the end of the stream.
Draft and verify service differ in what a request is; the rest is here. Knows no grpc.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from specwire.config.security.bearer import Principal
from specwire.engine.boot import ModelService
from specwire.engine.jobs import TokenSequence
from specwire.errors import DeadlineExceededError, InternalError, InvalidRequestError, SpecwireError
from specwire.rpc.draining import Drain
from specwire.rpc.slots import Slots
from specwire.rpc.wire import columns
from specwire.v1 import common_pb2

log = logging.getLogger(__name__)

_WRITE_S = 2.0

State = TypeVar("State")
Answer = TypeVar("Answer")


@dataclass(eq=False)
class OpenSequence(Generic[State]):
    """One open sequence.

    Attributes:
        tokens, state: in the engine, and what the service keeps for it.
        resources: freed when it is closed.
        num_unanswered: requests that an answer is still to come to.
        held: requests that wait for its grammar; None once it is compiled.
    """

    sequence_id: int
    tokens: TokenSequence
    state: State
    resources: contextlib.ExitStack
    num_unanswered: int = 0
    held: list[Callable[[], None]] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What limits the sequences of all streams of a service: they are running requests of the server that
    drains, and those of authenticated callers hold slots."""

    drain: Drain = field(default_factory=Drain)
    slots: Slots = field(default_factory=lambda: Slots("sequences"))


@dataclass(slots=True)
class _Failing:
    """See `ModelStream.failing`. As a generator it would be a tenth of what a request costs here."""

    stream: ModelStream[Any, Any]
    sequence_id: int

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, SpecwireError):
            self.stream.fail(self.sequence_id, error)
        elif isinstance(error, Exception):
            log.error("a request failed", exc_info=error)
            hidden = InternalError("the request failed; the service's log has the details")
            self.stream.fail(self.sequence_id, hidden)
        return isinstance(error, Exception)


class ModelStream(abc.ABC, Generic[State, Answer]):
    """One stream, while it is served.

    Attributes:
        service: model and engine.
        sequences: those that are open, by id.
        is_half_closed: the coordinator sends no more messages.
    """

    def __init__(
        self, service: ModelService, write: Callable[[Any], Any], limits: Limits, caller: Principal
    ) -> None:
        """Nothing is open yet; `write` is a coroutine function that writes a message."""
        self.service = service
        self.sequences: dict[int, OpenSequence[State]] = {}
        self.is_half_closed = False
        self._has_failed = False
        self._write = write
        self._limits = limits
        self._caller = caller
        self._last_id = 0
        self._answers: list[Answer] = []
        self._errors: list[common_pb2.SequenceError] = []
        self._changed = asyncio.Event()

    @abc.abstractmethod
    def opened(self, message: common_pb2.OpenSequence, tokens: TokenSequence) -> State:
        """The state of a sequence that has just been opened; closed with it if it has a `close`."""

    @abc.abstractmethod
    def received(self, message: Any) -> None:
        """Handle the requests of a message, whose sequences are open by now."""

    @abc.abstractmethod
    def encoded(self, answers: Sequence[Answer], errors: Sequence[common_pb2.SequenceError]) -> Any:
        """The message that carries these, and is written now."""

    async def serve(self, messages: AsyncIterator[Any]) -> None:
        """Until all requests are answered and no more come, or the service shuts down and no sequence is
        open."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_all)
            stack.enter_context(self._limits.drain.closing(self._changed.set))
            reading = asyncio.create_task(self._read(messages))
            stack.callback(reading.cancel)
            writing = asyncio.create_task(self._write_all())
            stack.callback(writing.cancel)
            await asyncio.wait([reading, writing], return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and (error := reading.exception()):
                await self._end_writes(writing)
                raise error
            await writing

    async def _end_writes(self, writing: asyncio.Task[None]) -> None:
        """Free all sequences, and wait for a message that is being written: gRPC sends no status before."""
        self._has_failed = True
        self._close_all()
        self.changed()
        await asyncio.wait([writing], timeout=_WRITE_S)
        if not writing.done():
            raise asyncio.CancelledError  # the peer reads nothing, no status either
        with contextlib.suppress(Exception):  # the peer is gone
            writing.result()

    async def _read(self, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            columns.check_size(message)
            with self.service.engine.together():
                self._close(message.close)
                for opening in message.open:
                    self._open(opening)
                self.received(message)
        self.is_half_closed = True
        self._changed.set()

    async def _write_all(self) -> None:
        """One message at a time, with all that is ready."""
        while not self._has_failed:
            self._changed.clear()
            message = self.next_message()
            if message is not None:
                await self.write(message)
                continue
            is_drained = self._limits.drain.is_closed and not self.sequences
            is_waited_for = any(each.num_unanswered or each.held for each in self.sequences.values())
            if is_drained or (self.is_half_closed and not is_waited_for):
                return
            await self._changed.wait()

    def next_message(self) -> Any:
        """All that is ready, in one message; None if nothing is."""
        if not (self._answers or self._errors):
            return None
        answers, self._answers = self._answers, []
        errors, self._errors = self._errors, []
        return self.encoded(answers, errors)

    async def write(self, message: Any) -> None:
        """Returns when there is room for the next one."""
        await self._write(message)

    # --- what goes back -------------------------------------------------------------------------------

    def answer(self, answers: Sequence[Answer]) -> None:
        """Send these as soon as the last message was written."""
        self._answers += answers
        self.changed()

    def changed(self) -> None:
        """Something is ready, or nothing is waited for any more."""
        self._changed.set()

    def fail(self, sequence_id: int, error: SpecwireError) -> None:
        """Close a sequence with an error; one that is not open any more is left alone."""
        if sequence_id in self.sequences:
            self._close([sequence_id])
            self._report(sequence_id, error)

    def _report(self, sequence_id: int, error: SpecwireError) -> None:
        self._errors.append(columns.error_to_proto(sequence_id, error))
        self._changed.set()

    def of(self, sequence_id: int) -> OpenSequence[State] | None:
        """The sequence of a request; None if it was closed, as by an error that is on its way, or never
        opened, which is reported."""
        found = self.sequences.get(sequence_id)
        if found is None and not 0 < sequence_id <= self._last_id:
            self._report(sequence_id, InvalidRequestError("sequence_ids", sequence_id, "was never opened"))
        return found

    def failing(self, sequence_id: int) -> _Failing:
        """An error in the body ends this sequence, and no other. A defect is logged."""
        return _Failing(self, sequence_id)

    # --- sequences ------------------------------------------------------------------------------------

    def _open(self, message: common_pb2.OpenSequence) -> None:
        """Raises InvalidRequestError where the id was used before, which is no error of one sequence."""
        sequence_id = message.sequence_id
        if sequence_id <= self._last_id:
            raise InvalidRequestError(
                "sequence_id", sequence_id, f"must be over {self._last_id}, the last one"
            )
        self._last_id = sequence_id
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._limits.drain.request())
                stack.callback(self._changed.set)  # it may have been the last one of a service that drains
                # The slots of an authenticated caller; others share those of the service.
                all_slots = self.service.max_sequences
                most = self._caller.capacity((all_slots, 0))
                slots = {self._caller.name: most} if most < all_slots else {}
                stack.enter_context(self._limits.slots.held(slots))
                tokens = stack.enter_context(self.service.opened(message))
                state = self.opened(message, tokens)
                if hasattr(state, "close"):
                    stack.callback(state.close)
            except SpecwireError as error:
                self._report(sequence_id, error)
                return
            if message.timeout_ms > 0:
                timer = asyncio.get_running_loop().call_later(
                    message.timeout_ms / 1e3,
                    self.fail,
                    sequence_id,
                    DeadlineExceededError("the deadline passed"),
                )
                stack.callback(timer.cancel)
            opened = OpenSequence(sequence_id, tokens, state, stack.pop_all())
            self.sequences[sequence_id] = opened
        if tokens.grammar is not None:
            self._hold_back(opened, tokens.grammar.compiled)

    def _hold_back(self, sequence: OpenSequence[State], compiled: Future[Any]) -> None:
        """Keep its requests until its grammar is compiled."""
        if not compiled.done() or compiled.exception() is not None:
            sequence.held = []
            asyncio.wrap_future(compiled).add_done_callback(partial(self._release, sequence))

    def _release(self, sequence: OpenSequence[State], compiled: asyncio.Future[Any]) -> None:
        held, sequence.held = sequence.held or (), None
        error = None if compiled.cancelled() else compiled.exception()
        if self.sequences.get(sequence.sequence_id) is not sequence:
            return
        with self.failing(sequence.sequence_id), self.service.engine.together():
            if error is not None:
                raise error
            for handle in held:
                handle()

    @staticmethod
    def when_ready(sequence: OpenSequence[State], handle: Callable[[], None]) -> None:
        """Handle a request, now or when the grammar of its sequence is compiled."""
        if sequence.held is None:
            handle()
        else:
            sequence.held.append(handle)

    def _close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            if found := self.sequences.pop(sequence_id, None):
                found.resources.close()

    def _close_all(self) -> None:
        with self.service.engine.together():
            self._close([*self.sequences])
