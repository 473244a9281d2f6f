"""Credit: a client that stops reading pauses its own generation, costs nearly nothing, and loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import psutil
import pytest

import coordinator.servicer
from coordinator.peers.verifier import PLAIN_AHEAD
from coordinator.reader import CreditReader
from specwire import (
    AsyncClient,
    Client,
    DeadlineExceededError,
    InvalidRequestError,
    RequestCancelledError,
    Rule,
    ServiceUnavailableError,
)
from specwire.cli.supervisor import Stack
from specwire.completion import Completion, Speculation
from specwire.config.stack import UpConfig
from specwire.core import MAX_CREDIT_TOKENS, MAX_LOGPROBS, MAX_UNACKNOWLEDGED_TOKENS, MIN_CREDIT_TOKENS
from specwire.v1 import generation_pb2_grpc
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, handshake, local_stack
from tests.support.paused import DRAFT, PROMPT, TARGET, GenerateRequest, most_ahead, opening, params, received
from tests.support.processes import wait_until
from tests.support.refusals import our_errors

ENDLESS = params(10_000)


def rounds(done: Completion) -> Speculation:
    """What its rounds were; how many proposals were there before they were asked for is a matter of time."""
    return replace(done.speculation, num_prepared=0)


class WatchedReader(CreditReader):
    """Tells other threads when its generation pauses."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.paused = threading.Event()
        self.num_acknowledgements = 0

    @property
    def num_emitted(self) -> int:
        return self.credit._num_emitted

    def acknowledge(self, num_tokens: int) -> None:
        super().acknowledge(num_tokens)
        self.num_acknowledgements += 1

    async def ready(self) -> None:
        if not self.credit.has_room:
            self.paused.set()
        await super().ready()
        self.paused.clear()


stack = entered(lambda: local_stack(TARGET, DRAFT))


Readers = queue.SimpleQueue[WatchedReader]


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Readers:
    """The clients of generations, in the order of their start."""
    found: Readers = queue.SimpleQueue()

    def watched(*args: Any, **options: Any) -> WatchedReader:
        found.put(reader := WatchedReader(*args, **options))
        return reader

    monkeypatch.setattr(coordinator.servicer, "CreditReader", watched)
    return found


@contextlib.contextmanager
def raw_stub(stack: LocalStack) -> Iterator[Any]:
    with grpc.insecure_channel(stack.address) as channel, our_errors():
        yield generation_pb2_grpc.GenerationServiceStub(channel)


class TestStalledReader:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("num_draft_tokens", [4, 48, 64, 0])
    @pytest.mark.parametrize("rule", list(Rule))
    def test_pauses_its_generation_and_goes_on_to_the_same_text(
        self, stack: LocalStack, readers: Readers, rule: Rule, num_draft_tokens: int
    ) -> None:
        sampling = params(150, rule=rule, num_draft_tokens=num_draft_tokens)
        undisturbed = stack.client.generate(params=sampling, prompt_token_ids=PROMPT)
        readers.get()
        with stack.client.stream(params=sampling, prompt_token_ids=PROMPT) as stream:
            chunks = iter(stream)
            next(chunks)
            reader = readers.get(timeout=10)
            assert reader.paused.wait(10)
            assert reader.num_emitted <= most_ahead(num_draft_tokens + 1)
            next(chunks)
            assert reader.paused.wait(10)
            assert reader.num_emitted - len(stream.tokens) <= most_ahead(num_draft_tokens + 1)
            list(chunks)
            assert stream.completion.token_ids == undisturbed.token_ids
            assert rounds(stream.completion) == rounds(undisturbed), "the very same rounds"

    def test_the_target_stands_still(self, stack: LocalStack, readers: Readers) -> None:
        """Each round runs one token through the target; so its count says how far the generation is."""
        sampling = params(10_000, num_draft_tokens=0)
        before = stack.status("verify").num_tokens
        with stack.client.stream(params=sampling, prompt_token_ids=PROMPT) as stream:
            next(iter(stream))
            assert readers.get(timeout=10).paused.wait(10)
            time.sleep(0.2)  # a hundred rounds, if it went on
            num_tokens = stack.status("verify").num_tokens - before
            assert num_tokens <= len(PROMPT) + MIN_CREDIT_TOKENS + PLAIN_AHEAD
        stack.assert_idle_within(1.0)

    def test_control_without_credit_it_runs_ahead(self, stack: LocalStack, readers: Readers) -> None:
        with raw_stub(stack) as stub:
            call = stub.Generate(iter([opening(0, 10_000)]), timeout=30)
            next(call)
            reader = readers.get(timeout=10)
            wait_until(lambda: reader.num_emitted >= 4 * MIN_CREDIT_TOKENS, 10)
            call.cancel()
        stack.assert_idle_within(1.0)


class TestPausedStreamEnds:
    @pytest.mark.parametrize("how", ["cancelled", "left", "closed with its client"])
    def test_at_once_when_it_is(self, stack: LocalStack, readers: Readers, how: str) -> None:
        with (
            Client(stack.address) as client,
            client.stream(params=ENDLESS, prompt_token_ids=PROMPT) as stream,
        ):
            next(iter(stream))
            assert readers.get(timeout=10).paused.wait(10)
            assert stack.status("verify").num_sequences == 1
            started = time.monotonic()
            if how == "cancelled":
                stream.cancel()
                with pytest.raises(RequestCancelledError):
                    list(stream)
            elif how == "closed with its client":
                client.close()
                assert time.monotonic() - started < 0.5, "the end of a stream leaves nothing to wait for"
        stack.assert_idle_within(1.0)
        assert stack.client.get_status().num_running == 0

    def test_at_its_deadline(self, stack: LocalStack, readers: Readers) -> None:
        started = time.monotonic()
        with stack.client.stream(params=ENDLESS, prompt_token_ids=PROMPT, timeout_s=1.5) as stream:
            next(iter(stream))
            assert readers.get(timeout=10).paused.wait(10)
            assert time.monotonic() - started < 1.5
            stack.assert_idle_within(started + 1.5 + 1.0 - time.monotonic())
            with pytest.raises(DeadlineExceededError):
                list(stream)

    @pytest.mark.slow
    def test_at_shutdown(self, readers: Readers) -> None:
        with contextlib.ExitStack() as clients:
            with local_stack(TARGET, DRAFT) as stack:
                client = clients.enter_context(Client(stack.address))
                stream = clients.enter_context(client.stream(params=ENDLESS, prompt_token_ids=PROMPT))
                next(iter(stream))
                assert readers.get(timeout=10).paused.wait(10)
                started = time.monotonic()
            assert time.monotonic() - started < 5.0
            with pytest.raises((ServiceUnavailableError, RequestCancelledError)):
                list(stream)


class TestAcknowledgements:
    def test_they_are_few(self, stack: LocalStack, readers: Readers) -> None:
        """One for each 16 tokens, and one a second."""
        started_s = time.monotonic()
        done = stack.client.generate(params=params(200), prompt_token_ids=PROMPT)
        most = len(done.token_ids) / (MAX_UNACKNOWLEDGED_TOKENS + 1) + time.monotonic() - started_s
        assert 1 <= readers.get().num_acknowledgements <= most

    def test_after_the_servers_end_they_hide_nothing(self, stack: LocalStack) -> None:
        """A write to a stream that has ended fails; what is still to be read counts."""
        sampling = params(60, num_draft_tokens=1)
        with stack.client.stream(params=sampling, prompt_token_ids=PROMPT) as stream:
            next(iter(stream))
            stack.assert_idle_within(5.0)
            list(stream)
            assert len(stream.completion.token_ids) == 60

    async def test_while_the_server_ends_they_hide_nothing(self, stack: LocalStack) -> None:
        async with AsyncClient(stack.address) as client:
            requests = [
                client.generate(params=params(length, num_draft_tokens=8), prompt_token_ids=PROMPT)
                for length in range(1, 80, 3)
            ]
            assert [len(done.token_ids) for done in await asyncio.gather(*requests)] == [*range(1, 80, 3)]
        stack.assert_idle_within(1.0)

    def test_without_credit_one_request_and_a_half_close_get_everything(self, stack: LocalStack) -> None:
        expected = stack.client.generate(params=params(150), prompt_token_ids=PROMPT)
        with raw_stub(stack) as stub:
            responses = list(stub.Generate(iter([opening(0, 150)]), timeout=30))
        assert tuple(received(responses)) == expected.token_ids
        assert responses[-1].WhichOneof("event") == "completion"

    @pytest.mark.parametrize("credit", [64, 200])
    def test_after_a_half_close_it_stays_within_its_credit(
        self, stack: LocalStack, readers: Readers, credit: int
    ) -> None:
        responses: list[Any] = []
        with raw_stub(stack) as stub:
            call = stub.Generate(iter([opening(credit, num_draft_tokens=4)]), timeout=30)
            assert readers.get(timeout=10).paused.wait(10)
            threading.Timer(0.3, call.cancel).start()
            with pytest.raises(grpc.RpcError):
                responses.extend(call)
        assert credit - 5 <= len(received(responses)) <= credit
        stack.assert_idle_within(1.0)


class TestBadValues:
    """In the first request: `test_wire_limits`."""

    def test_the_limit_itself_is_good(self, stack: LocalStack) -> None:
        with raw_stub(stack) as stub:
            responses = list(stub.Generate(iter([opening(MAX_CREDIT_TOKENS, max_tokens=20)]), timeout=30))
        assert len(received(responses)) == 20

    @pytest.mark.parametrize(
        ("late", "refusal"),
        [
            (GenerateRequest(), "credit_tokens=0: must be at least 1"),
            (GenerateRequest(credit_tokens=MAX_CREDIT_TOKENS), "credit_tokens=1048576: makes .* unused"),
            (GenerateRequest(text="", credit_tokens=16), "text=set: only the first request"),
            (GenerateRequest(num_draft_tokens=0, credit_tokens=16), "num_draft_tokens=set: only the first"),
            (opening(64), "token_ids=set: only the first request"),
        ],
    )
    def test_in_a_later_request(
        self, stack: LocalStack, readers: Readers, late: GenerateRequest, refusal: str
    ) -> None:
        """It ends a paused generation at once, and frees its memory."""
        requests: queue.SimpleQueue[GenerateRequest] = queue.SimpleQueue()
        requests.put(opening(64, 10_000))
        with raw_stub(stack) as stub:
            call = stub.Generate(iter(requests.get, None), timeout=30)
            assert readers.get(timeout=10).paused.wait(10)
            requests.put(late)
            with pytest.raises(InvalidRequestError, match=refusal), our_errors():
                list(call)
        stack.assert_idle_within(1.0)

    def test_an_acknowledgement_without_credit(self, stack: LocalStack) -> None:
        requests = iter([opening(0, 10_000), GenerateRequest(credit_tokens=16)])
        with pytest.raises(InvalidRequestError, match="asked for no credit"), raw_stub(stack) as stub:
            list(stub.Generate(requests, timeout=30))
        stack.assert_idle_within(1.0)


class TestMemory:
    NUM_STREAMS = 200

    @pytest.mark.slow
    def test_stalled_streams_cost_the_coordinator_far_less_than_a_megabyte_each(self) -> None:
        config = UpConfig(
            address="127.0.0.1:0", target="emulated:step_ms=1", draft="none", grace_s=0.0, num_threads=1
        )
        with Stack(config) as stack, Client(stack.address) as client, contextlib.ExitStack() as streams:
            sampling = params(10_000, logprobs=MAX_LOGPROBS)  # the largest tokens there are

            def stall(count: int) -> None:
                for _ in range(count):
                    stream = streams.enter_context(client.stream(params=sampling, prompt_token_ids=PROMPT))
                    next(iter(stream))

            coordinator_process = psutil.Process(stack.coordinator.process.pid)
            stall(20)  # what is allocated only once is not a stream's
            wait_until_still(stack.verify.address)
            before = coordinator_process.memory_info().rss
            stall(self.NUM_STREAMS)
            wait_until_still(stack.verify.address)
            status = client.get_status()
            assert status.num_running + status.num_paused == 20 + self.NUM_STREAMS
            grown = coordinator_process.memory_info().rss - before
            assert grown / self.NUM_STREAMS < 0.5e6


def wait_until_still(verify_address: str) -> None:
    """No pass of the target for 0.3 s."""
    deadline, num_steps = time.monotonic() + 30, -1
    while (now := handshake("verify", verify_address).status.num_steps) != num_steps:
        assert time.monotonic() < deadline
        num_steps = now
        time.sleep(0.3)
