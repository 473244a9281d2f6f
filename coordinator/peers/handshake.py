"""The two model services as peers over gRPC: handshake, health, and whether they are there."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.peers.addresses import Names
from coordinator.peers.pool import Pool
from coordinator.peers.replicas import Replica
from coordinator.peers.streams import Call, GrpcCall, peer_error
from specwire.core import PROTOCOL_VERSION, ModelInfo
from specwire.errors import HandshakeError, ServiceUnavailableError, SpecwireError
from specwire.rpc import channel
from specwire.security.tls import PLAINTEXT, Credentials
from specwire.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from specwire.wire import model as wire

_RETRY_S = 0.25
_ASK_EVERY_S = 1.0
_HANDSHAKE_TIMEOUT_S = 5.0
_SAYS_NOTHING = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""Of its health: it knows no such thing, or others watch it already, as many as may."""


def check_pair(target: ModelInfo, draft: ModelInfo) -> None:
    """Refuse a draft whose tokens do not mean what the target's do.

    Vocabularies of one family may be padded to different sizes; different tokenizers may not meet.

    Raises:
        HandshakeError: naming both.
    """
    names = f"target {target.name!r} and draft {draft.name!r}"
    if target.tokenizer_fingerprint and draft.tokenizer_fingerprint:
        if target.tokenizer_fingerprint != draft.tokenizer_fingerprint:
            raise HandshakeError(
                f"{names} have different tokenizers "
                f"({target.tokenizer_fingerprint} and {draft.tokenizer_fingerprint})"
            )
    elif target.vocab_size != draft.vocab_size:
        raise HandshakeError(
            f"{names} have vocabularies of {target.vocab_size} and {draft.vocab_size} tokens, "
            "and no tokenizers to compare"
        )


def check_version(info: ModelInfo) -> None:
    """Refuse a service of another protocol version.

    Raises:
        HandshakeError: naming both versions.
    """
    if info.protocol_version != PROTOCOL_VERSION:
        raise HandshakeError(
            f"{info.name!r} speaks protocol version {info.protocol_version}, "
            f"this coordinator {PROTOCOL_VERSION}"
        )


_SAME = (
    *("name", "weights_fingerprint", "tokenizer_fingerprint", "vocab_size", "context_len", "dtype"),
    *("eos_token_ids", "batch_invariant"),
)
"""What a text depends on: a generation may begin at one replica and go on at another."""


def check_same(first: ModelInfo, other: ModelInfo) -> None:
    """Refuse a target that is another model than the one that generations run on, or computes it otherwise.

    Raises:
        HandshakeError: naming both.
    """
    for name in _SAME:
        ours, theirs = getattr(first, name), getattr(other, name)
        if ours != theirs:
            raise HandshakeError(
                f"target {other.name!r} has {name}={theirs!r}, and that of others, {first.name!r}, {ours!r}"
            )


@dataclass(frozen=True, slots=True)
class Role:
    """What is different between draft and verify service, seen from outside."""

    name: str
    stub: Callable[[Any], Any]
    stream: str
    info_request: Any


VERIFY = Role(
    "verify",
    verify_pb2_grpc.VerifyServiceStub,
    "Verify",
    verify_pb2.VerifyServiceGetModelInfoRequest(),
)
DRAFT = Role(
    "draft",
    draft_pb2_grpc.DraftServiceStub,
    "Draft",
    draft_pb2.DraftServiceGetModelInfoRequest(),
)


class RemoteReplica(Replica):
    """A service at an address: its channel, and a watch over whether streams may be opened there.

    The watch shakes hands, follows the service's health (`grpc.health.v1`), and asks for its load every
    second. It knows at once when the process dies (its connection is reset) or drains (NOT_SERVING), and
    within two seconds when the process or the way to it falls silent (keepalive).
    """

    def __init__(
        self, role: Role, address: str, credentials: Credentials, check: Callable[[ModelInfo], None]
    ) -> None:
        """Begins to watch.

        Args:
            credentials: shown there, and expected.
            check: raises HandshakeError for a service that does not fit.
        """
        super().__init__(role.name, address)
        self._role = role
        self._check = check
        self._channel = channel.open_channel(address, credentials=credentials)
        self._stub = role.stub(self._channel)
        self._health_stub = health_pb2_grpc.HealthStub(self._channel)
        self._news = asyncio.Event()
        self._is_doubted = False
        self._watching = asyncio.create_task(self._watch())

    def open_stream(self, timeout_s: float | None) -> Call:
        """See `Replica`."""
        return GrpcCall(getattr(self._stub, self._role.stream)(timeout=timeout_s))

    def lost(self, reason: str) -> None:
        """See `Replica`; it is asked again at once."""
        super().lost(reason)
        self._is_doubted = True
        self._news.set()

    async def close(self) -> None:
        """Stop watching and close the channel."""
        self._watching.cancel()
        await self._channel.close()

    async def _watch(self) -> None:
        while True:
            self._is_doubted = False
            health = _Health(self._health_stub.Watch(health_pb2.HealthCheckRequest()), self._news)
            try:
                await self._while_serving(health)
            except HandshakeError as error:
                self.misfits(error)
            except SpecwireError as error:
                super().lost(str(error))
            finally:
                health.close()
            if not self._is_doubted:
                await asyncio.sleep(_RETRY_S)

    async def _while_serving(self, health: _Health) -> None:
        """Until it drains, or a stream there failed.

        Raises:
            SpecwireError: it is gone, or does not fit.
        """
        await self._next_news(_HANDSHAKE_TIMEOUT_S)
        if not health.is_known:
            raise ServiceUnavailableError(f"no answer within {_HANDSHAKE_TIMEOUT_S:g} s")
        while not self._is_doubted:
            if health.error:
                raise health.error
            if not health.is_serving:
                await self._note_why_not()
                return
            await self._shake_hands()
            await self._next_news(_ASK_EVERY_S)

    async def _next_news(self, timeout_s: float) -> None:
        """Of its health, or that a stream there failed; at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        self._news.clear()

    async def _shake_hands(self) -> None:
        """Raises:
        SpecwireError: it is gone, does not fit, or hangs.
        """
        try:
            response = await self._stub.GetModelInfo(self._role.info_request, timeout=_HANDSHAKE_TIMEOUT_S)
        except grpc.RpcError as error:
            raise peer_error(error) from None
        if response.status.silent_ms:
            raise _DeviceHangsError(f"its device hangs: {response.status.silent_ms / 1e3:.1f} s in one pass")
        info = wire.model_info_from_proto(response.model)
        check_version(info)
        self._check(info)
        self.num_others = max(0, response.status.num_sequences - self.num_streams)
        self.came(info)

    async def _note_why_not(self) -> None:
        """It says that it does not serve: its device hangs, or it drains and refuses to say more."""
        try:
            await self._shake_hands()
        except _DeviceHangsError as error:
            super().lost(str(error))
        except SpecwireError:
            self.left("takes no new streams")
        else:
            self.left("takes no new streams")


class _DeviceHangsError(ServiceUnavailableError):
    """The service is there, and does not compute."""


class _Health:
    """What a service says of its health. One that says nothing of it counts as healthy while it answers.

    Attributes:
        is_known: it has said something.
        is_serving: what it said last.
        error: why nothing more will come.
    """

    def __init__(self, call: Any, news: asyncio.Event) -> None:
        self.is_known = self.is_serving = False
        self.error: SpecwireError | None = None
        self._call = call
        self._news = news
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self._note(response.status == health_pb2.HealthCheckResponse.SERVING)
            self.error = ServiceUnavailableError("the service ended")
        except grpc.RpcError as error:
            if error.code() in _SAYS_NOTHING:
                self._note(is_serving=True)
                return
            self.error = peer_error(error)
        self.is_known = True
        self._news.set()

    def _note(self, is_serving: bool) -> None:
        self.is_known, self.is_serving = True, is_serving
        self._news.set()

    def close(self) -> None:
        """A server that drains waits for its last stream, which must not be this one."""
        self._call.cancel()
        self._following.cancel()


class VerifyPool(Pool):
    """The replicas of the verify service; without any nothing can be generated."""

    def __init__(self, addresses: str, names: Names, credentials: Credentials = PLAINTEXT) -> None:
        """As `Pool`."""

        def make(address: str) -> Replica:
            return RemoteReplica(VERIFY, address, credentials, self.note)

        super().__init__("verify", addresses, make, names, is_needed=True)
        self._info: ModelInfo | None = None

    @property
    def info(self) -> ModelInfo:
        """What the first target said in the handshake, and all others must say; `connect` comes first."""
        assert self._info is not None
        return self._info

    async def connect(self, timeout_s: float) -> None:
        """Meet all replicas, and wait for one of them to come up.

        Raises:
            ServiceUnavailableError: none is there in time; names the addresses.
            HandshakeError: another protocol version.
        """
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.met()
                while not self.available:
                    await self._changed()
                    await self.met()
        if self._info is None:
            raise ServiceUnavailableError(self.unavailable)

    def note(self, info: ModelInfo) -> None:
        """What a target says of itself; the first one's word counts.

        Raises:
            HandshakeError: it is another model.
        """
        self._info = self._info or info
        check_same(self._info, info)


class DraftPool(Pool):
    """The replicas of the draft service; generation goes on without them, and takes up those that come."""

    def __init__(self, addresses: str, names: Names, credentials: Credentials, target: ModelInfo) -> None:
        """As `Pool`; `target` is what they must fit."""
        check = functools.partial(check_pair, target)

        def make(address: str) -> Replica:
            return RemoteReplica(DRAFT, address, credentials, check)

        super().__init__("draft", addresses, make, names, is_needed=False)

    @property
    def info(self) -> ModelInfo | None:
        """What the draft says of itself; None while there is none."""
        return next((replica.info for replica in self.available), None)

    async def connect(self) -> None:
        """Try the handshake once with each; whoever is not there in 5 s is looked for in the background.

        Raises:
            HandshakeError: those that are there do not fit the target.
        """
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                await self.met()
