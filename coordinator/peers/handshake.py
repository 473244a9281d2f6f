"""The two model services as peers over gRPC: handshake, health and availability."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.peers.link import Codec, SharedLink, draft_codec, verify_codec
from coordinator.peers.pool import Pool
from coordinator.peers.replicas import LOADING, Replica
from coordinator.peers.streams import GrpcCall, peer_error
from specwire.config.security.tls import PLAINTEXT, Credentials
from specwire.config.services import CoordinatorConfig
from specwire.core import PROTOCOL_VERSION, ModelInfo
from specwire.errors import (
    DeadlineExceededError,
    HandshakeError,
    ServiceDrainingError,
    ServiceLoadingError,
    ServiceUnavailableError,
    SpecwireError,
)
from specwire.rpc import channel, statuses
from specwire.rpc.wire import model as wire
from specwire.rpc.wire.tokenizer_files import TokenizerFiles, fetch
from specwire.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

_RETRY_S = 0.25
_POLL_S = 1.0
_HANDSHAKE_TIMEOUT_S = 5.0
_PAGE_TIMEOUT_S = 30.0
_DRAINS = "takes no new streams"
_NO_HEALTH = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""The service does not implement health checks, or has as many watches of its health as it allows."""


def check_pair(target: ModelInfo, draft: ModelInfo, *, use_heterogeneous_vocab: bool = False) -> None:
    """Refuse a draft whose token ids do not mean the same as the target's.

    Vocabularies of one family may be padded to different sizes, but the tokenizers must be the same. A draft
    with another one has to propose this target's tokens, and to be wanted.

    Raises:
        HandshakeError: naming both.
    """
    names = f"target {target.name!r} and draft {draft.name!r}"
    if target.has_encoder != draft.has_encoder:
        [with_one] = (info.name for info in (target, draft) if info.has_encoder)
        raise HandshakeError(f"{names}: {with_one!r} is an encoder-decoder, and the other is not")
    ours, theirs = target.decoder_token_ids, draft.decoder_token_ids
    if ours != theirs:
        raise HandshakeError(f"{names} have decoders that begin with different tokens ({ours} and {theirs})")
    tokenizers = target.tokenizer_fingerprint, draft.tokenizer_fingerprint
    if all(tokenizers) and tokenizers[0] != tokenizers[1]:
        problem = f"{names} have different tokenizers ({tokenizers[0]} and {tokenizers[1]})"
        if not use_heterogeneous_vocab:
            flag = '{"method": "draft_model", "use_heterogeneous_vocab": true}'
            raise HandshakeError(f"{problem}; --speculative-config '{flag}' uses such a draft")
        proposed = draft.target_tokenizer_fingerprint
        if proposed != tokenizers[0]:
            needed = "its --target-tokenizer has to name the target's"
            raise HandshakeError(
                f"{problem}, and the draft proposes tokens of {proposed or tokenizers[1]}: {needed}"
            )
    elif not all(tokenizers) and target.vocab_size != draft.vocab_size:
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
    *("name", "weights_fingerprint", "tokenizer_fingerprint", "tokenizer_hash", "vocab_size", "context_len"),
    *("dtype", "eos_token_ids", "batch_invariant", "trees", "encoder_len", "decoder_token_ids", "adapters"),
)
"""What a text depends on: a generation may begin at one replica and continue at another."""


def check_same(first: ModelInfo, other: ModelInfo) -> None:
    """Refuse a target that is not the model that generations run on, or computes it differently.

    Raises:
        HandshakeError: naming both.
    """
    # Sums over other numbers of ranks round differently, which matters where the text is to be the same.
    for name in (*_SAME, "num_ranks") if first.batch_invariant else _SAME:
        ours, theirs = getattr(first, name), getattr(other, name)
        if ours != theirs:
            raise HandshakeError(
                f"target {other.name!r} has {name}={theirs!r}, and that of others, {first.name!r}, {ours!r}"
            )


@dataclass(frozen=True, slots=True)
class Role:
    """How the APIs of draft and verify service differ."""

    name: str
    stub: Callable[[Any], Any]
    stream: str
    info_request: Any
    codec: Callable[[int, str], Codec]


VERIFY = Role(
    "verify",
    verify_pb2_grpc.VerifyServiceStub,
    "Verify",
    verify_pb2.VerifyServiceGetModelInfoRequest(),
    verify_codec,
)
DRAFT = Role(
    "draft",
    draft_pb2_grpc.DraftServiceStub,
    "Draft",
    draft_pb2.DraftServiceGetModelInfoRequest(),
    draft_codec,
)


class RemoteReplica(Replica):
    """A service at an address: its channel, and a task that monitors whether streams may be opened there.

    The task does the handshake, watches the service's health (`grpc.health.v1`), and polls its load every
    second. It notices at once when the process dies (the connection is reset) or drains (NOT_SERVING), and
    within two seconds when the process or the network stops responding (keepalive).
    """

    def __init__(
        self, role: Role, address: str, credentials: Credentials, pool: VerifyPool | DraftPool
    ) -> None:
        """Begins to monitor.

        Args:
            credentials: of both sides of the connection.
            pool: says what is compatible.
        """
        super().__init__(role.name, address)
        self._role = role
        self._pool = pool
        self._channel = channel.open_channel(address, credentials=credentials)
        self._stub = role.stub(self._channel)
        self._health_stub = health_pb2_grpc.HealthStub(self._channel)
        self._change = asyncio.Event()
        self._health: bool | SpecwireError | None = None
        self._is_suspect = False
        self._monitoring = asyncio.create_task(self._monitor())

    def _open_link(self) -> SharedLink:
        open_stream = getattr(self._stub, self._role.stream)
        name = self.info.name if self.info else ""
        return SharedLink(GrpcCall(open_stream()), self._role.codec(self._pool.target.vocab_size, name))

    def mark_lost(self, reason: str) -> None:
        """See `Replica`; the next handshake follows at once."""
        super().mark_lost(reason)
        self._is_suspect = True
        self._change.set()

    async def close(self) -> None:
        """Stop monitoring and close the channel."""
        self._monitoring.cancel()
        await super().close()
        await self._channel.close()

    async def _monitor(self) -> None:
        while True:
            self._health, self._is_suspect = None, False
            watch = self._health_stub.Watch(health_pb2.HealthCheckRequest())
            following = asyncio.create_task(self._follow_health(watch))
            try:
                await self._while_serving()
            except HandshakeError as error:
                self.mark_incompatible(error)
            except ServiceDrainingError:
                self.mark_unavailable(_DRAINS)
            except SpecwireError as error:
                super().mark_lost(str(error))
            finally:
                watch.cancel()  # a draining server waits for all its streams to end
                following.cancel()
            if not self._is_suspect:
                await asyncio.sleep(_RETRY_S)

    async def _follow_health(self, watch: Any) -> None:
        """Note each report, and why the watch has failed. Without health checks a service counts as healthy
        while it answers."""
        try:
            while (report := await watch.read()) is not grpc.aio.EOF:
                if report is None:
                    self._health = ServiceUnavailableError(statuses.GARBLED)
                    break
                self._health = report.status == health_pb2.HealthCheckResponse.SERVING
                self._change.set()
            else:
                self._health = ServiceUnavailableError("the service ended")
        except grpc.RpcError as error:
            self._health = True if error.code() in _NO_HEALTH else peer_error(error)
        self._change.set()

    async def _while_serving(self) -> None:
        """Poll it until it drains, or one of its streams fails.

        Raises:
            SpecwireError: it is unavailable or incompatible.
        """
        await self._next_change(_HANDSHAKE_TIMEOUT_S)
        if self._health is None:
            raise ServiceUnavailableError(f"no answer within {_HANDSHAKE_TIMEOUT_S:g} s")
        while not self._is_suspect:
            if isinstance(self._health, SpecwireError):
                raise self._health
            if not self._health:
                await self._mark_not_serving()
                return
            self.mark_ready(await self._shake_hands())
            await self._next_change(_POLL_S)

    async def _next_change(self, timeout_s: float) -> None:
        """Until its health changes or one of its streams fails, or for at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._change.wait()
        self._change.clear()

    async def _shake_hands(self) -> ModelInfo:
        """What it serves; its load is noted.

        Raises:
            SpecwireError: it is unavailable, incompatible, or hangs.
        """
        response = await _answer(self._stub.GetModelInfo, self._role.info_request, _HANDSHAKE_TIMEOUT_S)
        if response.status.silent_ms:
            raise _DeviceHangsError(f"its device hangs: {response.status.silent_ms / 1e3:.1f} s in one pass")
        info = wire.model_info_from_proto(response.model)
        check_version(info)
        self._pool.check_info(info)
        status = response.status
        self.num_other_streams = max(0, status.num_sequences - self.num_streams)
        self.num_held_pages = status.num_held_pages
        self.num_pages = status.num_held_pages + status.num_free_pages
        return info

    async def page_of_tokenizer(self, offset: int) -> bytes:
        """Of the target's `TokenizerFiles`, from a target.

        Raises:
            SpecwireError: it is unavailable.
        """
        request = verify_pb2.VerifyServiceGetTokenizerRequest(offset=offset)
        page: bytes = (await _answer(self._stub.GetTokenizer, request, _PAGE_TIMEOUT_S)).page
        return page

    async def _mark_not_serving(self) -> None:
        """Its health is NOT_SERVING: it loads, its device hangs, or it drains and refuses further calls."""
        try:
            await self._shake_hands()
        except ServiceLoadingError:
            self.mark_unavailable(LOADING)
            return
        except _DeviceHangsError as error:
            super().mark_lost(str(error))
            return
        except SpecwireError:
            pass  # it ends
        self.mark_unavailable(_DRAINS)


class _DeviceHangsError(ServiceUnavailableError):
    """The service answers, but its device does not compute."""


async def _answer(method: Any, request: Any, timeout_s: float) -> Any:
    """Of a call with one answer.

    Raises:
        SpecwireError: as the peer raised it, or for a failure of the transport.
    """
    try:
        answer = await method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise peer_error(error) from None
    if answer is None:
        raise ServiceUnavailableError(statuses.GARBLED)
    return answer


class VerifyPool(Pool):
    """The replicas of the verify service; at least one is needed to generate."""

    def __init__(self, addresses: str, credentials: Credentials = PLAINTEXT) -> None:
        """As `Pool`."""

        def make(address: str) -> Replica:
            return RemoteReplica(VERIFY, address, credentials, self)

        super().__init__("verify", addresses, make, is_needed=True)
        self._info: ModelInfo | None = None

    @property
    def info(self) -> ModelInfo:
        """Of the first target that answered, which all others must equal; known after `connect`."""
        assert self._info is not None
        return self._info

    target = info
    """Whose vocabulary all token ids belong to."""

    async def connect(self, timeout_s: float) -> None:
        """Contact all replicas, and wait until one is available.

        Args:
            timeout_s: longest wait; while one loads its model, it has not begun.

        Raises:
            ServiceUnavailableError: none is in time; names the addresses.
            HandshakeError: none is available, and one is incompatible.
        """
        self.start()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s) as patience:
                await self.all_contacted()
                while not self.available:
                    if any(replica.unavailable == LOADING for replica in self.replicas):
                        patience.reschedule(loop.time() + timeout_s)
                    await self._wait_for_change()
                    await self.all_contacted()
        if not self.available:
            problem = f"{self.unavailable} (waited {timeout_s:g} s, --connect-timeout-s)"
            raise ServiceUnavailableError(problem)

    async def tokenizer(self, timeout_s: float) -> TokenizerFiles:
        """The files of the target's tokenizer; where one target is lost, another one goes on.

        Raises:
            HandshakeError: they cannot be used; names `--tokenizer`.
            ServiceUnavailableError: no target sends them in time.
        """

        async def page(offset: int) -> bytes:
            while True:
                for replica in self.available:
                    assert isinstance(replica, RemoteReplica)
                    try:
                        return await replica.page_of_tokenizer(offset)
                    except (ServiceUnavailableError, DeadlineExceededError) as error:
                        replica.mark_lost(str(error))
                await self._wait_for_change()

        try:
            async with asyncio.timeout(timeout_s):
                return await fetch(self.info, page)
        except TimeoutError:
            problem = f"the tokenizer was not received within {timeout_s:g} s (--connect-timeout-s)"
            raise ServiceUnavailableError(problem) from None

    def check_info(self, info: ModelInfo) -> None:
        """Check a target against the first one, or make it the first one.

        Raises:
            HandshakeError: it is a different model.
        """
        self._info = self._info or info
        check_same(self._info, info)


class DraftPool(Pool):
    """The replicas of the draft service; generations run without them, and use those that appear."""

    def __init__(self, config: CoordinatorConfig, target: ModelInfo) -> None:
        """As `Pool`; `target` is what the drafts must be compatible with."""

        def make(address: str) -> Replica:
            return RemoteReplica(DRAFT, address, config.peer_credentials, self)

        super().__init__("draft", config.draft_address, make, is_needed=False)
        self.target = target
        self._use_heterogeneous_vocab = config.model_draft.use_heterogeneous_vocab

    @property
    def info(self) -> ModelInfo | None:
        """Of the first available draft; None while there is none."""
        return next((replica.info for replica in self.available), None)

    async def connect(self) -> None:
        """Try one handshake with each; those that take over 5 s continue in the background.

        Raises:
            HandshakeError: none is available, and one is incompatible with the target.
        """
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                await self.all_contacted()

    def check_info(self, info: ModelInfo) -> None:
        """Check a draft against the target. Errors as for `check_pair`."""
        check_pair(self.target, info, use_heterogeneous_vocab=self._use_heterogeneous_vocab)
