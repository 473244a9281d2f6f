"""The three services over real gRPC on loopback, inside the test process: quick to start, same code paths.

Tests about processes (kill, signals, command line) start real ones with `specwire.supervisor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import grpc

import coordinator.service
import draft_service.service
import verify_service.service
from specwire import Client
from specwire.config import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.engine import boot
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

LOOPBACK = "127.0.0.1:0"


class LoopThread:
    """An event loop on a thread of its own, for servers that the test's thread talks to."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-services", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 60) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    @contextlib.contextmanager
    def entered(self, make: Callable[[], Any]) -> Iterator[Any]:
        """Enter an async context manager on the loop."""

        async def create() -> Any:
            return make()

        context = self.run(create())
        value = self.run(context.__aenter__())
        try:
            yield value
        finally:
            self.run(context.__aexit__(None, None, None))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class LocalStack:
    """Addresses and a client of a running stack; `status` reads a model service's engine."""

    def __init__(self, client: Client, verify: str, draft: str, address: str) -> None:
        self.client = client
        self.verify_address = verify
        self.draft_address = draft
        self.address = address

    def status(self, role: str) -> common_pb2.EngineStatus:
        """Engine counts of "draft" or "verify"."""
        if role == "draft":
            with grpc.insecure_channel(self.draft_address) as channel:
                request = draft_pb2.DraftServiceGetModelInfoRequest()
                return draft_pb2_grpc.DraftServiceStub(channel).GetModelInfo(request, timeout=5).status
        with grpc.insecure_channel(self.verify_address) as channel:
            request = verify_pb2.VerifyServiceGetModelInfoRequest()
            return verify_pb2_grpc.VerifyServiceStub(channel).GetModelInfo(request, timeout=5).status

    def assert_idle_within(self, seconds: float) -> None:
        """No sequence and no page is held on either model service, at the latest after this time."""
        deadline = time.monotonic() + seconds
        roles = ["verify", *(["draft"] if self.draft_address else [])]
        while True:
            states = [self.status(role) for role in roles]
            if all(state.num_sequences == state.num_held_pages == 0 for state in states):
                return
            assert time.monotonic() < deadline, f"still held: {states}"


@contextlib.contextmanager
def local_stack(
    target: Path | str,
    draft: Path | str | None = None,
    *,
    coordinator_options: dict[str, Any] | None = None,
    verify_options: dict[str, Any] | None = None,
    draft_options: dict[str, Any] | None = None,
) -> Iterator[LocalStack]:
    """Verify, draft (unless None) and coordinator for saved models, in float32.

    Rounds have 4 draft tokens unless a request or an option says otherwise: seeded text can be compared.
    """
    with contextlib.ExitStack() as stack:
        thread = LoopThread()
        stack.callback(thread.close)
        verify_config = VerifyConfig(
            **{"model": str(target), "dtype": "float32", "num_kv_tokens": 16384, "grace_s": 0.0}
            | (verify_options or {})
        )
        verify = stack.enter_context(thread.entered(lambda: verify_service.service.serving(verify_config)))
        draft_address = ""
        if draft is not None:
            draft_config = DraftConfig(
                **{"model": str(draft), "dtype": "float32", "num_kv_tokens": 16384, "grace_s": 0.0}
                | (draft_options or {})
            )
            draft_address = stack.enter_context(
                thread.entered(lambda: draft_service.service.serving(draft_config))
            )
        config = CoordinatorConfig(
            verify_address=verify,
            draft_address=draft_address,
            **{"grace_s": 0.0, "num_draft_tokens": "4"} | (coordinator_options or {}),
        )
        address = stack.enter_context(thread.entered(lambda: coordinator.service.serving(config)))
        client = stack.enter_context(Client(address))
        yield LocalStack(client, verify, draft_address, address)


@contextlib.contextmanager
def started_services() -> Iterator[dict[str, boot.ModelService]]:
    """The model services that start in this process meanwhile, by role: to look behind the wire."""
    services: dict[str, boot.ModelService] = {}
    start = boot.start

    def noted(config: Any, role: str, consume: Any) -> boot.ModelService:
        services[role] = start(config, role, consume)
        return services[role]

    with mock.patch.object(boot, "start", noted):
        yield services
