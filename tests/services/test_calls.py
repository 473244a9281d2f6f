"""What a call may hold from the moment that it opens, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import verify_service.service
from specwire import (
    AsyncClient,
    DeadlineExceededError,
    InvalidRequestError,
    ResourceExhaustedError,
    RetryPolicy,
    SamplingParams,
)
from specwire.config.services import VerifyConfig
from specwire.rpc import interceptor as calls
from specwire.rpc import private
from specwire.rpc import server as rpc_server
from specwire.rpc.server import Server
from specwire.rpc.slots import Slots
from specwire.rpc.statuses import from_rpc_error
from specwire.rpc.wire.verify import VerifyOrder
from tests.support.certificates import Authority
from tests.support.harness import LocalStack, local_stack
from tests.support.model_streams import opening, verify

MODEL = "emulated:step_ms=0"
WATCH, CHECK, LIST = (f"/grpc.health.v1.Health/{name}" for name in ("Watch", "Check", "List"))
VERIFY = "/specwire.v1.VerifyService/Verify"
MODEL_INFO = "/specwire.v1.VerifyService/GetModelInfo"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
STREAMS = {
    "coordinator": "/specwire.v1.GenerationService/Generate",
    "draft": "/specwire.v1.DraftService/Draft",
    "verify": VERIFY,
}
MAX_PROBES = 8
PATIENCE_S = 1.0


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """With little patience, and room for one generation and three more streams of a caller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_FIRST_MESSAGE_S", PATIENCE_S)
        patch.setattr(calls, "_MAX_SILENT_PROBES", MAX_PROBES)
        patch.setattr(calls, "NUM_PASSING_STREAMS", 3)
        limits = {"max_running": 1, "max_waiting": 0}
        with local_stack(MODEL, MODEL, coordinator_options=limits) as running:
            yield running


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel


async def error_of(call: Any) -> tuple[grpc.StatusCode, Exception]:
    """What a call ends with that has sent all that it will."""
    with pytest.raises(grpc.RpcError) as ended:
        await asyncio.wait_for(_read_on(call), 30)
    return ended.value.code(), from_rpc_error(ended.value)


async def _read_on(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


class TestFirstMessage:
    async def test_silent_calls_are_ended(self, stack: LocalStack) -> None:
        """Streams, and calls that need one message."""
        addresses = {"draft": stack.draft_address, "verify": stack.verify_address}
        of_verify = [("verify", method) for method in (MODEL_INFO, WATCH, CHECK)]

        async def ended(service: str, method: str) -> None:
            async with connected(addresses.get(service, stack.address)) as channel:
                started_s = time.monotonic()
                code, error = await error_of(channel.stream_stream(method)())
                assert code is grpc.StatusCode.DEADLINE_EXCEEDED, method
                assert isinstance(error, DeadlineExceededError)
                assert str(error) == "first message: not received within 1 s"
                assert PATIENCE_S <= time.monotonic() - started_s < 10.0

        await asyncio.gather(*(ended(*each) for each in [*STREAMS.items(), *of_verify]))

    async def test_a_call_without_its_one_message_is_refused(self, stack: LocalStack) -> None:
        async with connected(stack.verify_address) as channel:
            call = channel.stream_stream(MODEL_INFO)()
            await call.done_writing()
            _, error = await error_of(call)
            assert isinstance(error, InvalidRequestError)

    @pytest.mark.parametrize("method", [MODEL_INFO, CHECK, WATCH, REFLECTION, VERIFY])
    async def test_bytes_that_are_no_message(self, stack: LocalStack, method: str) -> None:
        """At the beginning of a call of any kind, and later in a stream."""
        async with connected(stack.verify_address) as channel:
            call = channel.stream_stream(method)()
            if method == VERIFY:
                await call.write(verify(VerifyOrder(1, 1, 0, [3]), opened=[opening()]).SerializeToString())
            await call.write(b"\x0a\x64")  # a field of 100 bytes, of which none come
            await call.done_writing()
            code, error = await error_of(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert type(error) is InvalidRequestError
        assert str(error) == "request=2 bytes: is not a message of this method's type"
        await asyncio.to_thread(stack.assert_idle_within, 10.0)

    async def test_a_silent_stream_holds_up_no_shutdown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calls, "_FIRST_MESSAGE_S", 60.0)
        async with contextlib.AsyncExitStack() as serving:
            config = VerifyConfig(model=MODEL, grace_s=60.0)
            address = await serving.enter_async_context(verify_service.service.serving(config))
            async with connected(address) as channel:
                silent = channel.stream_stream(VERIFY)()
                await silent.wait_for_connection()
                await check(address)
                started_s = time.monotonic()
                await serving.aclose()
                assert time.monotonic() - started_s < 8.0, "the two seconds of gRPC's own end"
                await silent.code()


class TestLimits:
    async def test_streams_of_a_caller_over_all_its_connections(self, stack: LocalStack) -> None:
        async with connected(stack.address) as one, connected(stack.address) as other:
            silent = [channel.stream_stream(STREAMS["coordinator"])() for channel in (one, other) * 3]
            errors = [error for _, error in await asyncio.gather(*map(error_of, silent))]
        refused = [error for error in errors if isinstance(error, ResourceExhaustedError)]
        assert len(refused) == 2
        assert str(refused[0]) == "4 streams of ipv4:127.0.0.1 are open, which is the most"
        assert refused[0].retry_after_ms
        assert [type(error) for error in errors].count(DeadlineExceededError) == 4

    async def test_calls_that_are_cancelled_leave_their_places(
        self, stack: LocalStack, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with connected(stack.address) as channel:
            for _ in range(30):
                call = channel.stream_stream(STREAMS["coordinator"])()
                await call.wait_for_connection()
                call.cancel()
        patient = RetryPolicy(wait_when_full=True)
        async with AsyncClient(stack.address, timeout_s=10, retry=patient) as client:
            done = await client.generate(params=SamplingParams(max_tokens=3), prompt_token_ids=[1])
        assert len(done.token_ids) == 3
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    async def test_watches_of_a_connection(self, stack: LocalStack) -> None:
        most = calls._MAX_WATCHES_OF_A_CONNECTION
        async with connected(stack.address) as channel:
            watch = channel.unary_stream(WATCH)
            held = [watch(b"") for _ in range(most)]
            for call in held:
                await call.read()
            code, error = await error_of(watch(b""))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(error).startswith(f"{most} health watches of ipv4:127.0.0.1:")
            await check(stack.address)
            async with connected(stack.address) as other:
                await other.unary_stream(WATCH)(b"").read()
            held[0].cancel()
            again = await asyncio.wait_for(self._until_served(watch), 10)
            again.cancel()

    async def _until_served(self, watch: Any) -> Any:
        while True:
            with contextlib.suppress(grpc.RpcError):
                call = watch(b"")
                await call.read()
                return call

    async def test_of_too_many_silent_probes_the_oldest_are_ended(self, stack: LocalStack) -> None:
        """So that one that is sent now is answered, however many others are silent."""
        async with connected(stack.address) as channel:
            silent = [channel.stream_stream(CHECK)() for _ in range(5 * MAX_PROBES)]
            ended = [asyncio.create_task(error_of(call)) for call in silent]
            await check(stack.address)
            for some in itertools.islice(asyncio.as_completed(ended), len(ended) - MAX_PROBES):
                await some
            assert not all(task.done() for task in ended), "the others have their time"
            await asyncio.gather(*ended)

    async def test_a_health_request_is_small(self, stack: LocalStack) -> None:
        async with connected(stack.address) as channel:
            request = health_pb2.HealthCheckRequest(service="x" * 2_000)
            _, error = await error_of(health_pb2_grpc.HealthStub(channel).Watch(request))
        assert isinstance(error, InvalidRequestError)
        assert error.problem == "is over the limit of 1024 bytes"

    async def test_health_has_two_methods(self, stack: LocalStack, caplog: pytest.LogCaptureFixture) -> None:
        async with connected(stack.address) as channel:
            with pytest.raises(grpc.RpcError) as unknown:
                await channel.unary_unary(LIST)(b"", timeout=30)
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert not caplog.records


async def check(address: str) -> None:
    """As a probe does: a new connection and a second."""
    async with connected(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status = (await stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)).status
        assert status == health_pb2.HealthCheckResponse.SERVING


async def test_a_connection_that_says_nothing_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind TLS, too, where gRPC itself waits for two minutes."""
    name = "grpc.server_handshake_timeout_ms"
    assert dict(rpc_server._LIMITS)[name] <= 10_000
    monkeypatch.setattr(rpc_server, "_LIMITS", [(name, 200), *rpc_server._LIMITS])
    pair = Authority(tmp_path).pair("server")
    server = Server(VerifyConfig(model=MODEL, grace_s=0.0, tls_cert=pair.cert, tls_key=pair.key), [])
    host, _, port = (await server.start()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()
    await server.stop()


class Ending:
    """A server on a loop that ends with it, as that of a process does after Ctrl-C."""

    def __init__(self) -> None:
        self.address: Future[str] = Future()
        self._begun = asyncio.Event()
        self._loop = private.Loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with (
            contextlib.suppress(KeyboardInterrupt),
            asyncio.Runner(loop_factory=lambda: self._loop) as runner,
        ):
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = Server(VerifyConfig(model=MODEL, grace_s=2.0), [])
        self.address.set_result(await server.start())
        await self._begun.wait()
        await server.stop()
        raise KeyboardInterrupt

    def begin(self) -> None:
        self._loop.call_soon_threadsafe(self._begun.set)

    def ended(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_peers_that_leave_as_a_service_ends_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """As after Ctrl-C to all services: gRPC reports tasks of calls that the end of the loop cancels."""
    for _ in range(10):
        server = Ending()
        with grpc.insecure_channel(server.address.result(60)) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            next(watch)
            server.begin()
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        server.ended()
    assert "Exception not handled" not in caplog.text


class TestPlaces:
    def test_each_limit_counts_and_nothing_is_held_after_an_error(self) -> None:
        slots = Slots("rooms")
        with contextlib.ExitStack() as held:
            held.enter_context(slots.held({"a": 2, "all": 3}))
            held.enter_context(slots.held({"a": 2, "all": 3}))
            with pytest.raises(ResourceExhaustedError, match="2 rooms of a are open"):
                held.enter_context(slots.held({"a": 2, "all": 3}))
            held.enter_context(slots.held({"b": 2, "all": 3}))
            with pytest.raises(ResourceExhaustedError, match="3 rooms of all are open"):
                held.enter_context(slots.held({"b": 2, "all": 3}))
        with pytest.raises(ZeroDivisionError), slots.held({"a": 1}):
            raise ZeroDivisionError
        assert not slots._held
