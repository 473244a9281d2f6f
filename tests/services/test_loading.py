"""A verify service that loads its model says so, and a coordinator waits for it beyond its patience."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import coordinator.service
import verify_service.service
from specwire import AsyncClient, SamplingParams
from specwire.config.services import CoordinatorConfig, VerifyConfig
from specwire.engine import boot
from specwire.errors import ConfigError, ModelLoadError, ServiceLoadingError, ServiceUnavailableError
from specwire.rpc.server import Server
from specwire.rpc.statuses import from_rpc_error
from specwire.v1 import verify_pb2, verify_pb2_grpc
from tests.support.harness import LOOPBACK, on_own_loop
from tests.support.refusals import refused

PATIENCE_S = 0.5
NAME = "specwire.v1.VerifyService"


class Verify:
    """A verify service whose model is loaded once `may_end` is set; with an error, if there is one.

    Attributes:
        address: where it listens meanwhile.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_end = threading.Event()
        self.error: ModelLoadError | None = None
        self.address = ""
        self._load, listen = boot.start, Server.start
        self._listens = asyncio.Event()
        self._ends = asyncio.Event()
        monkeypatch.setattr(boot, "start", self._loading)

        async def start(server: Server, **options: Any) -> str:
            address = await listen(server, **options)
            self.address = self.address or address
            self._listens.set()
            return address

        monkeypatch.setattr(Server, "start", start)

    def _loading(self, *args: Any, **options: Any) -> boot.ModelService:
        assert self.may_end.wait(60)
        if self.error:
            raise self.error
        return self._load(*args, **options)

    async def _run(self) -> None:
        config = VerifyConfig(address=LOOPBACK, model="emulated:step_ms=1", grace_s=0.0)
        async with verify_service.service.serving(config):
            await self._ends.wait()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """From when it listens."""
        task = asyncio.create_task(self._run())
        await self._listens.wait()
        try:
            yield task
        finally:
            self.may_end.set()
            self._ends.set()
            await asyncio.wait([task])


@pytest.fixture
async def verify(monkeypatch: pytest.MonkeyPatch) -> Verify:
    return Verify(monkeypatch)


def coordinating(address: str) -> contextlib.AbstractAsyncContextManager[str]:
    config = CoordinatorConfig(
        address=LOOPBACK, verify_address=address, connect_timeout_s=PATIENCE_S, grace_s=0.0
    )
    return coordinator.service.serving(config)


async def test_a_coordinator_waits_while_verify_loads(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says for what, and serves as soon as verify does."""
    monkeypatch.setattr(coordinator.service, "_AGAIN_S", 2.0 * PATIENCE_S)
    async with verify.running():
        asyncio.get_running_loop().call_later(3.0 * PATIENCE_S, verify.may_end.set)
        with caplog.at_level(logging.INFO):
            async with coordinating(verify.address) as address, AsyncClient(address) as client:
                assert verify.may_end.is_set()
                done = await client.generate(params=SamplingParams(max_tokens=4), prompt_token_ids=[1])
                assert len(done.token_ids) == 4
    assert f"still waiting: verify service {verify.address}: loads its model" in caplog.messages


async def test_it_is_not_ready_and_says_why(verify: Verify) -> None:
    """To probes, and to whom it refuses; then it is."""
    async with verify.running(), grpc.aio.insecure_channel(verify.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=60)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetModelInfo(verify_pb2.VerifyServiceGetModelInfoRequest(), timeout=60)
        assert isinstance(from_rpc_error(refused.value), ServiceLoadingError)
        verify.may_end.set()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        response = await stub.GetModelInfo(verify_pb2.VerifyServiceGetModelInfoRequest(), timeout=60)
        assert response.model.name
        watch.cancel()


async def test_a_model_that_cannot_be_loaded_ends_the_wait(verify: Verify) -> None:
    """Verify ends with its error; then the coordinator's patience begins, and the flag is named. Where a
    connection was made as verify ended, gRPC may be silent for long instead of refused."""
    verify.error = ModelLoadError("--model x: is not there")
    async with verify.running() as running:
        waiting = asyncio.create_task(coordinating(verify.address).__aenter__())
        verify.may_end.set()
        with pytest.raises(ModelLoadError, match="is not there"):
            await running
        silent = r"nothing serves at this address|no answer within 5 s"
        with pytest.raises(ServiceUnavailableError, match=rf"({silent}).*--connect-timeout-s"):
            await waiting


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = VerifyConfig(model="emulated:step_ms=0", address=address)
        with (
            refused(ConfigError, f"--address {address}", "in use"),
            on_own_loop(lambda: verify_service.service.serving(config)),
        ):
            pass
