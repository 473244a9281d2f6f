"""A stream to a model service carries sequences: how they begin and end, alone, and with their stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import draft_service.service
import verify_service.service
from draft_service.drafter import DraftDecider
from specwire import InvalidRequestError, ResourceExhaustedError
from specwire.config.security.bearer import make_token
from specwire.config.services import DraftConfig, VerifyConfig
from specwire.engine import boot
from specwire.errors import DeadlineExceededError, ServiceDrainingError
from specwire.rpc.wire.draft import DraftOrder
from specwire.rpc.wire.verify import VerifyOrder
from tests.support.draft_streams import draft_stream
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, LoopThread, local_stack
from tests.support.model_streams import (
    RawStream,
    draft,
    error_of,
    opening,
    raw_stream,
    sampling,
    stream_to,
    verify,
)

MAX_SEQUENCES = 3
ROLES = pytest.mark.parametrize("role", ["draft", "verify"])
SLOW = "emulated:step_ms=150"
"""A pass that a test gets ahead of."""


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    limits = {"max_sequences": MAX_SEQUENCES}
    with local_stack(
        "emulated:step_ms=0", "emulated:step_ms=0", verify_options=limits, draft_options=limits
    ) as running:
        yield running


slow_stack = entered(lambda: local_stack(SLOW, SLOW))


@pytest.fixture
def slow(slow_stack: LocalStack) -> Iterator[LocalStack]:
    """Whatever a test did, everything is free afterwards."""
    yield slow_stack
    slow_stack.assert_idle_within(10.0)


def opened(sequence_id: int, **fields: Any) -> Any:
    """Greedy."""
    return opening(sequence_id, sampling=sampling(temperature=0.0), **fields)


def requests(role: str, *ids: int, begin: bool = True, close: tuple[int, ...] = ()) -> Any:
    """One message with a request for each of these sequences, opened by it or not."""
    starts = [opened(each) for each in ids] if begin else []
    token_ids, base_len = ([3, 4, 5], 0) if begin else ([6], 3)
    if role == "draft":
        return draft(
            *(DraftOrder(each, 1 if begin else 2, base_len, token_ids, 2) for each in ids),
            opened=starts,
            closed=close,
        )
    return verify(
        *(VerifyOrder(each, 1 if begin else 2, base_len, token_ids) for each in ids),
        opened=starts,
        closed=close,
    )


def answered(stream: RawStream, num_answers: int, message: Any = None) -> list[int]:
    """Sequences of the next answers, after this message if there is one, in order of their ids."""
    if message is not None:
        stream.send(message)
    found: list[int] = []
    while len(found) < num_answers:
        found += stream.read().sequence_ids
    return sorted(found)


@ROLES
def test_one_message_for_all_that_is_ready_together(stack: LocalStack, role: str) -> None:
    with raw_stream(stack, role) as stream:
        assert sorted(stream.ask(requests(role, 1, 2, 3)).sequence_ids) == [1, 2, 3]
        assert stack.status(role).num_sequences == 3
    stack.assert_idle_within(5.0)


@ROLES
def test_a_request_for_a_sequence_that_was_never_opened(stack: LocalStack, role: str) -> None:
    """An error of its own; that the service never knew it is not the others' fault."""
    with raw_stream(stack, role) as stream:
        for unknown in (7, 0, -1):
            error = error_of(stream, requests(role, unknown, begin=False))
            assert type(error) is InvalidRequestError
            assert str(error) == f"sequence_ids={unknown}: was never opened"
        assert stream.ask(requests(role, 1)).sequence_ids == [1]


def test_verify_takes_one_request_of_a_sequence_at_a_time(slow: LocalStack) -> None:
    with raw_stream(slow, "verify") as stream:
        stream.send(requests("verify", 1, 2))
        error = error_of(stream, requests("verify", 1, begin=False))
        assert type(error) is InvalidRequestError
        assert str(error) == "sequence_ids=1: has a request without an answer"
        assert answered(stream, 1) == [2]


def test_the_draft_takes_requests_of_a_sequence_in_turn(slow: LocalStack) -> None:
    """As many as its queue has room for."""
    with raw_stream(slow, "draft") as stream:
        stream.send(requests("draft", 1))
        stream.send(requests("draft", 1, begin=False))
        assert [stream.read().request_ids for _ in range(2)] == [[1], [2]]
        stream.send(requests("draft", 2, 3))
        for _ in range(64):
            stream.send(requests("draft", 2, begin=False))
        error = error_of(stream, draft())
        assert type(error) is ResourceExhaustedError
        assert answered(stream, 1) == [3]


@ROLES
def test_closed_sequences_are_free_and_are_not_answered(slow: LocalStack, role: str) -> None:
    """A close also ends a request that runs; one of an unknown id, or once more, does nothing."""
    with raw_stream(slow, role) as stream:
        stream.send(requests(role, 1, 2))
        stream.send(requests(role, close=(1, 1, 99, -5)))
        assert answered(stream, 1) == [2]
        assert slow.status(role).num_sequences == 1
        assert stream.ask(requests(role, 2, begin=False)).sequence_ids == [2]
        stream.send(requests(role, 1, begin=False))  # it was closed: nothing answers
        stream.send(requests(role, close=(2,)))
        slow.assert_idle_within(5.0)
        stream.end_requests()
        assert stream.status() is grpc.StatusCode.OK


@ROLES
def test_a_stream_frees_all_that_it_opened(slow: LocalStack, role: str) -> None:
    with raw_stream(slow, role) as stream:
        stream.send(requests(role, 1, 2, 3))
        assert answered(stream, 3) == [1, 2, 3]
        stream.send(requests(role, 1, 2, begin=False))
    slow.assert_idle_within(5.0)


@ROLES
def test_what_was_asked_is_answered_after_the_last_request(slow: LocalStack, role: str) -> None:
    """The end of the requests is not the end of the stream."""
    with raw_stream(slow, role) as stream:
        stream.send(requests(role, 1, 2))
        stream.end_requests()
        assert answered(stream, 2) == [1, 2]
        assert stream.status() is grpc.StatusCode.OK


# --- deadlines --------------------------------------------------------------------------------------


@ROLES
def test_a_sequence_ends_at_its_deadline(stack: LocalStack, role: str) -> None:
    """Whether a request is under way or not; the others, without one or with a later one, go on."""
    with raw_stream(stack, role) as stream:
        message = requests(role, 1, 2, 3)
        message.open[0].timeout_ms, message.open[1].timeout_ms = 60, 2**62
        assert answered(stream, 3, message) == [1, 2, 3]
        error = error_of(stream, requests(role, close=(50,)))
        assert type(error) is DeadlineExceededError
        assert stack.status(role).num_sequences == 2
        assert answered(stream, 2, requests(role, 2, 3, begin=False)) == [2, 3]
    stack.assert_idle_within(5.0)


@ROLES
def test_a_deadline_during_a_pass(slow: LocalStack, role: str) -> None:
    with raw_stream(slow, role) as stream:
        message = requests(role, 1, 2)
        message.open[0].timeout_ms = 20
        error = error_of(stream, message)
        assert type(error) is DeadlineExceededError
        assert answered(stream, 1) == [2]


# --- limits -----------------------------------------------------------------------------------------


@ROLES
def test_a_sequence_over_the_limit_of_the_service(stack: LocalStack, role: str) -> None:
    """Of all streams together; it says when to try again, and a slot that is free again is given away."""
    with raw_stream(stack, role) as full, raw_stream(stack, role) as other:
        assert answered(full, 3, requests(role, 1, 2, 3)) == [1, 2, 3]
        for stream, number in ((full, 4), (other, 1)):
            error = error_of(stream, requests(role, number))
            assert type(error) is ResourceExhaustedError
            assert error.retry_after_ms
            assert str(error) == f"{MAX_SEQUENCES} sequences are open"
        full.send(requests(role, close=(2,)))
        assert full.ask(requests(role, 1, begin=False)).sequence_ids == [1]
        assert other.ask(requests(role, 2)).sequence_ids == [2]
    stack.assert_idle_within(5.0)


SERVICES: dict[str, Any] = {
    "draft": (draft_service.service.serving, DraftConfig),
    "verify": (verify_service.service.serving, VerifyConfig),
}


class Service:
    """One model service, whose end a test can follow."""

    def __init__(self, role: str, **options: Any) -> None:
        serving, config = SERVICES[role]
        self._thread = LoopThread()
        made = config(model="emulated:step_ms=0", address="127.0.0.1:0", grace_s=20.0, **options)
        self._context = self._thread.call(serving, made)
        self.address: str = self._thread.run(self._context.__aenter__())

    def stop(self) -> None:
        """Returns when it has ended."""
        self._thread.run(self._context.__aexit__(None, None, None))
        self._thread.close()


@ROLES
def test_a_callers_own_limit(tmp_path: Path, role: str) -> None:
    """It holds for all of its streams together, and not for other callers."""
    few, line = make_token("few", max_running=1, max_waiting=0)
    other, other_line = make_token("other")
    (tmp_path / "tokens").write_text(f"{line}\n{other_line}\n")
    service = Service(role, tokens=str(tmp_path / "tokens"))

    def stream_of(token: str) -> Any:
        return stream_to(service.address, role, [("authorization", f"Bearer {token}")])

    with stream_of(few) as first, stream_of(few) as second, stream_of(other) as free:
        assert first.ask(requests(role, 1)).sequence_ids == [1]
        for stream, number in ((first, 2), (second, 1)):
            error = error_of(stream, requests(role, number))
            assert type(error) is ResourceExhaustedError
            assert str(error) == "1 sequences of few are open, which is the most"
        assert answered(free, 2, requests(role, 1, 2)) == [1, 2]
        assert answered(first, 1, requests(role, 3, close=(1,))) == [3]
    service.stop()


@ROLES
def test_a_service_that_shuts_down(role: str) -> None:
    """It ends a stream without sequences at once, and one with sequences when the last is closed."""
    service = Service(role)
    with (
        ThreadPoolExecutor() as pool,
        stream_to(service.address, role) as empty,
        stream_to(service.address, role) as busy,
    ):
        assert empty.ask(requests(role, 1)).sequence_ids == [1]
        empty.send(requests(role, close=(1,)))
        assert answered(busy, 2, requests(role, 1, 2)) == [1, 2]
        stopping = pool.submit(service.stop)
        assert empty.status() is grpc.StatusCode.OK
        error = error_of(busy, requests(role, 3))
        assert type(error) is ServiceDrainingError
        assert (error.status, str(error)) == ("UNAVAILABLE", "the service is shutting down")
        assert answered(busy, 2, requests(role, 1, 2, begin=False)) == [1, 2]
        busy.send(requests(role, close=(1,)))
        assert busy.ask(requests(role, 2, begin=False)).request_ids == [2]
        assert not stopping.done()
        busy.send(requests(role, close=(2,)))
        assert busy.status() is grpc.StatusCode.OK
        stopping.result(20)


async def test_a_stream_that_ends_while_an_answer_is_written() -> None:
    """The error comes after the write: gRPC can send no status during one, and the call would never end."""
    config = DraftConfig(model="emulated:step_ms=0")
    service = boot.start(config, "draft", DraftDecider(config))

    async def ends_meanwhile() -> None:
        async with draft_stream(service) as (call, _):
            call.may_write.clear()
            call.send([DraftOrder(1, 1, 0, [3, 4, 5], 2)], [opened(1)])
            assert (await call.read()).answers
            call.send(opened=[opened(1)])
            done, _ = await asyncio.wait([call.serving], timeout=0.05)
            assert not done

    with pytest.raises(InvalidRequestError, match="sequence_id=1: must be over 1"):
        await ends_meanwhile()
    service.close()
