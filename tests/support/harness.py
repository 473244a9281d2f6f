"""The three services over real gRPC on loopback, inside the test process: quick to start, same code paths.

Tests about processes (kill, signals, command line) start real ones with `specwire.cli.supervisor`.
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
from grpc_health.v1 import health_pb2, health_pb2_grpc

import coordinator.service
import draft_service.service
import verify_service.service
from coordinator.servicer import GenerationServicer
from specwire import Client
from specwire.cli.supervisor import Stack
from specwire.config.link import Link
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.stack import UpConfig
from specwire.engine import boot
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from tests.support.faulty_proxy import FaultyProxy

LOOPBACK = "127.0.0.1:0"
_START_TIMEOUT_S = 240
"""Ranks of a group import torch each in a process of its own, on a machine that may be busy."""
_MODEL_OPTIONS: dict[str, Any] = {"dtype": "float32", "num_kv_tokens": 16384, "grace_s": 0.0}
_COORDINATOR_OPTIONS: dict[str, Any] = {
    "grace_s": 0.0,
    "num_draft_tokens": "4",
    "draft_timeout_ms": 60_000.0,
}


class LoopThread:
    """An event loop on a thread of its own, for servers that the test's thread talks to."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="test-services", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Tasks that are left in the end are cancelled, as in a process."""
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.get_loop().run_forever()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 60) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call something that belongs to the loop."""

        async def on_loop() -> Any:
            return function(*args)

        return self.run(on_loop())

    @contextlib.contextmanager
    def entered(self, make: Callable[[], Any]) -> Iterator[Any]:
        """Enter an async context manager on the loop."""
        context = self.call(make)
        value = self.run(context.__aenter__(), _START_TIMEOUT_S)
        try:
            yield value
        finally:
            self.run(context.__aexit__(None, None, None))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


@contextlib.contextmanager
def on_own_loop(make: Callable[[], Any]) -> Iterator[Any]:
    """What an async context manager yields that runs on an event loop of its own."""
    thread = LoopThread()
    try:
        with thread.entered(make) as value:
            yield value
    finally:
        thread.close()


class StackProxy:
    """A delay proxy on another loop, for the test's thread; each call is done when it returns."""

    def __init__(self, proxy: FaultyProxy, thread: LoopThread, address: str) -> None:
        self._proxy = proxy
        self._thread = thread
        self.address = address

    @property
    def link(self) -> Link:
        return self._proxy.link

    @link.setter
    def link(self, link: Link) -> None:
        self._thread.call(setattr, self._proxy, "link", link)

    def stall(self) -> None:
        self._thread.call(self._proxy.stall)

    def resume(self) -> None:
        self._thread.call(self._proxy.resume)

    def cut(self) -> None:
        self._thread.call(self._proxy.cut)

    def call(self, method: Callable[..., None], *args: Any) -> None:
        """Any other of the proxy's methods: `call(FaultyProxy.reset, Direction.THERE)`."""
        self._thread.call(method, self._proxy, *args)


def handshake(role: str, address: str, metadata: Any = ()) -> Any:
    """What the "draft" or "verify" service there says of its model and of its engine."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        request: Any = draft_pb2.DraftServiceGetModelInfoRequest()
        if role == "verify":
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            request = verify_pb2.VerifyServiceGetModelInfoRequest()
        return stub.GetModelInfo(request, timeout=10, metadata=metadata)


def is_serving(address: str) -> bool:
    """What the service there says of its health."""
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class LocalStack:
    """Addresses and a client of a running stack; `status` reads a model service's engine.

    The addresses are the services' own. `verify_proxy` and `draft_proxy` are what lies between them and the
    coordinator; None without a link.
    """

    def __init__(self, client: Client, verify: str, draft: str, address: str) -> None:
        self.client = client
        self.verify_address = verify
        self.draft_address = draft
        self.address = address
        self.verify_proxy: StackProxy | None = None
        self.draft_proxy: StackProxy | None = None

    def status(self, role: str) -> common_pb2.EngineStatus:
        """Engine counts of "draft" or "verify"."""
        return handshake(role, self.draft_address if role == "draft" else self.verify_address).status

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
    verify_link: Link | None = None,
    draft_link: Link | None = None,
) -> Iterator[LocalStack]:
    """Verify, draft (unless None) and coordinator for saved models, in float32.

    The links lie between the coordinator and these services; without one, they are neighbours. Rounds have 4
    draft tokens unless a request or an option says otherwise: seeded text can be compared. A draft is waited
    for: on a slow machine it may take its time.
    """
    with contextlib.ExitStack() as stack:
        thread = LoopThread()
        stack.callback(thread.close)
        verify_config = VerifyConfig(**_MODEL_OPTIONS | {"model": str(target)} | (verify_options or {}))
        verify = stack.enter_context(thread.entered(lambda: verify_service.service.serving(verify_config)))
        draft_address = ""
        if draft is not None:
            draft_config = DraftConfig(**_MODEL_OPTIONS | {"model": str(draft)} | (draft_options or {}))
            draft_address = stack.enter_context(
                thread.entered(lambda: draft_service.service.serving(draft_config))
            )
        verify_proxy = _proxy(stack, thread, verify, verify_link)
        draft_proxy = _proxy(stack, thread, draft_address, draft_link)
        addresses = {
            "verify_address": verify_proxy.address if verify_proxy else verify,
            "draft_address": draft_proxy.address if draft_proxy else draft_address,
        }
        config = CoordinatorConfig(**_COORDINATOR_OPTIONS | addresses | (coordinator_options or {}))
        address = stack.enter_context(thread.entered(lambda: coordinator.service.serving(config)))
        client = stack.enter_context(Client(address))
        running = LocalStack(client, verify, draft_address, address)
        running.verify_proxy, running.draft_proxy = verify_proxy, draft_proxy
        yield running


def _proxy(stack: contextlib.ExitStack, thread: LoopThread, to: str, link: Link | None) -> StackProxy | None:
    if link is None:
        return None
    proxy = FaultyProxy(to, link)
    return StackProxy(proxy, thread, stack.enter_context(thread.entered(lambda: proxy)))


@contextlib.contextmanager
def proxied(address: str) -> Iterator[StackProxy]:
    """A delay proxy before an address, which adds nothing as yet, on a loop of its own."""
    proxy = FaultyProxy(address, Link())
    with contextlib.closing(LoopThread()) as thread, thread.entered(lambda: proxy) as own:
        yield StackProxy(proxy, thread, own)


@contextlib.contextmanager
def started_coordinators() -> Iterator[list[GenerationServicer]]:
    """The coordinators that start in this process meanwhile: to look behind the wire."""
    found: list[GenerationServicer] = []
    init = GenerationServicer.__init__

    def noted(self: GenerationServicer, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        found.append(self)

    with mock.patch.object(GenerationServicer, "__init__", noted):
        yield found


@contextlib.contextmanager
def started_services() -> Iterator[dict[str, boot.ModelService]]:
    """The model services that start in this process meanwhile, by role: to look behind the wire."""
    services: dict[str, boot.ModelService] = {}
    start = boot.start

    def noted(config: Any, role: str, decider: Any, **options: Any) -> boot.ModelService:
        services[role] = start(config, role, decider, **options)
        return services[role]

    with mock.patch.object(boot, "start", noted):
        yield services


@contextlib.contextmanager
def float32_processes(
    target: Path, draft: Path | str, environ: dict[str, str] | None = None, **settings: Any
) -> Iterator[str]:
    """Three processes, as of `specwire up`, or two; yields the coordinator's address."""
    if Path(draft).is_dir():
        settings.setdefault("draft_placement", "service")
    config = UpConfig(
        target=str(target),
        draft=str(draft),
        dtype="float32",
        draft_dtype="float32",
        address="127.0.0.1:0",
        num_threads=1,
        **settings,
    )
    with Stack(config, environ) as stack:
        yield stack.address
