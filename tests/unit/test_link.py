"""The stream that sequences share: what goes out together, and which of them a failure concerns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator.peers.link import MAX_PUSHES, SharedLink, verify_codec
from specwire import ServiceUnavailableError
from specwire.core import Load, Proposal, SamplingParams, Timings, Verdict
from specwire.errors import InternalError, ResourceExhaustedError, SpecwireError
from specwire.rpc.wire import columns
from specwire.rpc.wire import model as wire
from specwire.rpc.wire import verify as verify_wire
from specwire.rpc.wire.verify import AheadOrder, VerifyAnswer, VerifyOrder
from specwire.v1 import common_pb2, verify_pb2

VOCAB_SIZE = 8
OPENING = wire.open_sequence(SamplingParams(temperature=0, seed=1), 3)


class Scripted:
    """A call that takes down what is sent, and reads what a test puts.

    Attributes:
        may_send: while it is not set, no message is through.
    """

    def __init__(self) -> None:
        self.sent: asyncio.Queue[verify_pb2.VerifyRequest] = asyncio.Queue()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.is_cancelled = False
        self._answers: asyncio.Queue[verify_pb2.VerifyResponse | Exception] = asyncio.Queue()
        self.put = self._answers.put_nowait

    async def send(self, request: Any) -> None:
        self.sent.put_nowait(request)
        await self.may_send.wait()

    async def read(self) -> Any:
        found = await self._answers.get()
        if isinstance(found, Exception):
            raise found
        return found

    def cancel(self) -> None:
        self.is_cancelled = True

    def answer(self, *sequence_ids: int, failed: dict[int, SpecwireError] | None = None) -> None:
        """One message."""
        errors = [columns.error_to_proto(number, error) for number, error in (failed or {}).items()]
        verdict = Verdict(3, [5])
        answers = [VerifyAnswer(number, 1, verdict, Timings(), 0) for number in sequence_ids]
        self.put(verify_wire.response_to_proto(answers, errors, Load(), "i"))


class Opener:
    """One sequence's end."""

    def __init__(self, link: SharedLink, timeout_s: float | None = None) -> None:
        self.request_bytes = 0
        self.answers: list[VerifyAnswer] = []
        self.num_bytes = 0
        self.error: SpecwireError | None = None
        self.changed = asyncio.Event()
        self._link = link
        self.number = link.open(OPENING, self, timeout_s)

    def ask(self) -> None:
        self._link.put(VerifyOrder(self.number, 1, 0, [3, 4, 5]))

    def close(self) -> None:
        self._link.close_sequence(self.number)

    def received(self, answer: Any, num_bytes: int) -> None:
        self.answers.append(answer)
        self.num_bytes = num_bytes
        self.changed.set()

    def failed(self, error: SpecwireError) -> None:
        assert self.error is None, "once"
        self.error = error
        self.changed.set()

    async def change(self) -> None:
        await asyncio.wait_for(self.changed.wait(), 10)
        self.changed.clear()


class Opened:
    """A link to a scripted call."""

    def __init__(self) -> None:
        self.call = Scripted()
        self.link = SharedLink(self.call, verify_codec(VOCAB_SIZE))

    def sequences(self, num: int) -> list[Opener]:
        """With a request each."""
        made = [Opener(self.link) for _ in range(num)]
        for each in made:
            each.ask()
        return made

    async def next_message(self) -> verify_pb2.VerifyRequest:
        return await asyncio.wait_for(self.call.sent.get(), 10)

    async def next_sent(self) -> tuple[list[int], list[int], list[int]]:
        """The next message: sequences that it opens and closes, and those of its requests."""
        message = await self.next_message()
        return [each.sequence_id for each in message.open], [*message.close], [*message.sequence_ids]


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    made = Opened()
    yield made
    made.link.close()
    await made.link.ended()
    assert all(task.done() for task in made.link._tasks)


# --- what is sent -----------------------------------------------------------------------------------


class TestPushes:
    """Proposals ahead: they leave when nothing that was asked for does, as far as the link has room."""

    @staticmethod
    def push(opened: Opened, *ahead_ids: int, num_bytes: int = 16 << 10) -> None:
        for ahead_id in ahead_ids:
            opened.link.push(AheadOrder(1, ahead_id, [5] * 4000, Proposal(3, [4])), num_bytes)

    @staticmethod
    async def next_sent(opened: Opened) -> tuple[int, list[int]]:
        """The number of requests of the next message, and its pushes."""
        message = await opened.next_message()
        return len(message.sequence_ids), [*message.ahead.ahead_ids]

    @pytest.fixture
    async def held(self, opened: Opened) -> Opener:
        """A sequence whose first request is on its way, and nothing follows until `may_send` is set."""
        opened.call.may_send.clear()
        (alone,) = opened.sequences(1)
        assert await self.next_sent(opened) == (1, [])
        return alone

    @pytest.mark.parametrize(
        ("num_bytes", "sent"), [(16 << 10, [(1, []), (0, [1, 2])]), (100, [(1, [1, 2])])]
    )
    async def test_requests_go_first_and_small_pushes_with_them(
        self, opened: Opened, held: Opener, num_bytes: int, sent: list[tuple[int, list[int]]]
    ) -> None:
        self.push(opened, 1, 2, num_bytes=num_bytes)
        held.ask()
        opened.call.may_send.set()
        assert [await self.next_sent(opened) for _ in sent] == sent

    async def test_they_wait_for_reports_and_are_out_of_date_with_the_next_request(
        self, opened: Opened
    ) -> None:
        (alone,) = opened.sequences(1)
        assert await self.next_sent(opened) == (1, [])
        self.push(opened, *range(1, 6))
        assert await self.next_sent(opened) == (0, [1, 2])
        assert await self.next_sent(opened) == (0, [3])
        opened.call.put(verify_pb2.VerifyResponse(num_arrived_bytes=33_000))
        assert await self.next_sent(opened) == (0, [4, 5])
        self.push(opened, *range(6, 9))
        assert len(opened.link._pushes[1]) == 3
        alone.ask()
        assert await self.next_sent(opened) == (1, [])
        assert not opened.link._pushes

    async def test_of_a_sequence_the_last_ones_wait(self, opened: Opened, held: Opener) -> None:
        self.push(opened, *range(1, 200))
        assert len(opened.link._pushes[1]) == MAX_PUSHES
        held.close()
        assert not opened.link._pushes


async def test_what_is_ready_while_a_message_is_sent_goes_out_together(opened: Opened) -> None:
    """And in the order of its making."""
    opened.call.may_send.clear()
    first, second = opened.sequences(2)
    assert await opened.next_sent() == ([1, 2], [], [1, 2])
    third, fourth = opened.sequences(2)
    second.ask()
    first.close()
    assert opened.call.sent.empty()
    opened.call.may_send.set()
    assert await opened.next_sent() == ([3, 4], [1], [3, 4, 2])
    sizes = {each.request_bytes for each in (second, third, fourth)}
    assert len(sizes) == 1, "each has its share of the message"
    assert 0 < sizes.pop() < first.request_bytes + second.request_bytes


async def test_a_sequence_that_is_closed_before_it_was_sent_is_never_sent(opened: Opened) -> None:
    """Else the peer would be told of its end before its beginning, and keep it."""
    opened.call.may_send.clear()
    opened.sequences(1)
    await opened.next_sent()
    second, third = opened.sequences(2)
    second.close()
    opened.call.may_send.set()
    assert await opened.next_sent() == ([3], [], [3])
    (fourth,) = opened.sequences(1)
    fourth.close()
    third.ask()
    assert await opened.next_sent() == ([], [], [3])


async def test_a_closed_sequence_asks_for_nothing_more(opened: Opened) -> None:
    first, second = opened.sequences(2)
    await opened.next_sent()
    first.ask()
    first.close()
    first.close()
    second.ask()
    assert await opened.next_sent() == ([], [1], [2])


@pytest.mark.parametrize(("timeout_s", "timeout_ms"), [(None, 0), (2.5, 2500), (0.0, 1), (-1.0, 1)])
async def test_deadlines_are_sent(opened: Opened, timeout_s: float | None, timeout_ms: int) -> None:
    Opener(opened.link, timeout_s)
    message = await opened.next_message()
    assert [(each.sequence_id, each.timeout_ms) for each in message.open] == [(1, timeout_ms)]
    assert not OPENING.sequence_id, "what opens others is not changed"


# --- what is received -------------------------------------------------------------------------------


async def test_a_failed_sequence_leaves_the_others_alone(opened: Opened) -> None:
    first, second = opened.sequences(2)
    opened.call.answer(2, failed={1: ResourceExhaustedError("full", 7)})
    await first.change()
    assert type(first.error) is ResourceExhaustedError
    assert first.error.retry_after_ms == 7
    assert [answer.verdict.target_token_ids for answer in second.answers] == [[5]]
    first.close()
    second.ask()
    assert await opened.next_sent() == ([1, 2], [], [1, 2])
    assert await opened.next_sent() == ([], [], [2]), "the peer closed the first one itself"
    assert opened.link.error is None


async def test_answers_to_a_closed_sequence_are_dropped(opened: Opened) -> None:
    first, second, third = opened.sequences(3)
    first.close()
    third.close()
    opened.call.answer(1, 2, failed={3: InternalError("of none")})
    await second.change()
    assert not first.answers
    assert second.answers
    assert second.num_bytes > 0
    opened.call.answer(2, failed={1: InternalError("late")})
    await second.change()
    assert first.error is None


async def test_the_end_of_the_stream_ends_all_of_its_sequences(opened: Opened) -> None:
    first, second, closed = opened.sequences(3)
    closed.close()
    opened.call.put(ServiceUnavailableError("reset by peer"))
    await second.change()
    assert first.error is second.error is opened.link.error
    assert str(opened.link.error) == "reset by peer"
    assert closed.error is None
    assert opened.call.is_cancelled
    first.close()
    assert not opened.link._receivers


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda message: message.num_rows.append(1), "num_rows=2: must have 1 entries"),
        (lambda message: message.timings.ClearField("stall_ns"), "stall_ns=0: must have 1 entries"),
        (lambda message: setattr(message, "target_token_ids", b"\xff" * 4), "outside the vocabulary"),
        (lambda message: setattr(message, "support_lens", bytes(8)), "support_lens=8 bytes"),
    ],
)
async def test_a_message_that_cannot_be_right_ends_the_stream(opened: Opened, change: Any, said: str) -> None:
    """Nothing else that this peer sent can be trusted."""
    sequences = opened.sequences(2)
    answer = VerifyAnswer(1, 1, Verdict(3, [5]), Timings(), 0)
    message = verify_wire.response_to_proto([answer], [], Load(), "i")
    change(message)
    opened.call.put(message)
    for each in sequences:
        await each.change()
        assert type(each.error) is ServiceUnavailableError
        assert "the service sent" in str(each.error)
        assert said in str(each.error)


async def test_a_defect_ends_the_stream_instead_of_its_task_alone(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    """Sequences would wait in vain for what nothing reads any more."""
    (first,) = opened.sequences(1)
    with caplog.at_level(logging.CRITICAL):
        opened.call.put(ZeroDivisionError())
        await first.change()
    assert type(first.error) is InternalError


async def test_a_task_that_is_cancelled_ends_the_stream(opened: Opened) -> None:
    (first,) = opened.sequences(1)
    opened.link._tasks[1].cancel()
    await first.change()
    assert type(first.error) is InternalError


def test_an_error_with_fields_missing_is_an_internal_one() -> None:
    """What a broken peer reports may lack them."""
    sent = columns.error_to_proto(1, ResourceExhaustedError("full", 7))
    sent.reason = "PREFIX_MISMATCH"
    before = sent.SerializeToString()
    error = columns.error_from_proto(sent)
    assert type(error) is InternalError
    assert str(error) == "PREFIX_MISMATCH: full"
    assert sent.SerializeToString() == before
    assert columns.error_from_proto(common_pb2.SequenceError()).status == "INTERNAL"


# --- the end ----------------------------------------------------------------------------------------


async def test_a_retired_stream_ends_with_its_last_sequence(opened: Opened) -> None:
    """Closed here, or failed there."""
    first, second = opened.sequences(2)
    opened.link.retire()
    assert opened.link.error is None
    first.close()
    opened.call.answer(2)
    await second.change()
    assert second.answers
    opened.call.answer(failed={2: InternalError("the last one")})
    await second.change()
    assert opened.call.is_cancelled
    assert opened.link.error is not None
    assert str(second.error) == "the last one"


async def test_a_retired_stream_without_sequences_ends_at_once(opened: Opened) -> None:
    opened.link.retire()
    assert opened.call.is_cancelled


async def test_what_is_not_sent_yet_when_the_stream_ends(opened: Opened) -> None:
    opened.call.may_send.clear()
    waiting = opened.sequences(2)
    opened.link.close()
    assert {type(each.error) for each in waiting} == {ServiceUnavailableError}
