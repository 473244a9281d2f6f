"""The two model services as peers: handshake, and whether they are there."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from coordinator.streams import Call, GrpcCall
from specwire import rpc, wire
from specwire.core import PROTOCOL_VERSION, ModelInfo
from specwire.credentials import PLAINTEXT, Credentials
from specwire.errors import HandshakeError, ServiceUnavailableError, SpecwireError
from specwire.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

log = logging.getLogger(__name__)

_RETRY_S = 0.25
_HANDSHAKE_TIMEOUT_S = 5.0
_RECONNECT_TIMEOUT_S = 5.0


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


class VerifyPeer:
    """The verify service; without it nothing can be generated."""

    def __init__(self, address: str, timeout_s: float, *, credentials: Credentials = PLAINTEXT) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._channel = rpc.open_channel(address, credentials=credentials)
        self.stub: Any = verify_pb2_grpc.VerifyServiceStub(self._channel)
        self._info: ModelInfo | None = None

    @property
    def info(self) -> ModelInfo:
        """What the target said in the handshake; `connect` comes first."""
        assert self._info is not None
        return self._info

    def open_stream(self, timeout_s: float | None) -> Call:
        """One sequence's stream; `timeout_s` is its deadline, None for none."""
        return GrpcCall(self.stub.Verify(timeout=timeout_s))

    async def connect(self) -> None:
        """The handshake, waiting for the service to come up.

        Raises:
            ServiceUnavailableError: not there in time; names the address.
            HandshakeError: another protocol version.
        """
        self._info = await self._handshake(self._timeout_s)

    async def reconnect(self) -> None:
        """After a broken stream: wait shortly for the same model to be there again.

        Raises:
            ServiceUnavailableError: it is not.
            HandshakeError: another model came back.
        """
        info = await self._handshake(_RECONNECT_TIMEOUT_S)
        if (info.name, info.vocab_size, info.tokenizer_fingerprint) != (
            self.info.name,
            self.info.vocab_size,
            self.info.tokenizer_fingerprint,
        ):
            raise HandshakeError(f"{self.address} serves {info.name!r} now, not {self.info.name!r}")
        self._info = info

    async def _handshake(self, timeout_s: float) -> ModelInfo:
        request = verify_pb2.VerifyServiceGetModelInfoRequest()
        try:
            response = await self.stub.GetModelInfo(request, timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            problem = rpc.from_rpc_error(error)
            raise ServiceUnavailableError(f"verify service {self.address}: {problem}") from None
        info = wire.model_info_from_proto(response.model)
        check_version(info)
        return info

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class DraftPeer:
    """The draft service; generation goes on without it, and takes it up again when it is back."""

    def __init__(self, address: str, target: ModelInfo, *, credentials: Credentials = PLAINTEXT) -> None:
        self.address = address
        self._target = target
        self.info: ModelInfo | None = None
        self.unavailable = "" if address else "no draft service is configured"
        self._watcher: asyncio.Task[None] | None = None
        if address:
            self._channel = rpc.open_channel(address, credentials=credentials)
            self.stub: Any = draft_pb2_grpc.DraftServiceStub(self._channel)

    @property
    def available(self) -> bool:
        """True after a handshake, until a stream fails."""
        return self.info is not None

    def open_stream(self, timeout_s: float | None) -> Call:
        """As `VerifyPeer.open_stream`."""
        return GrpcCall(self.stub.Draft(timeout=timeout_s))

    def room(self, committed_len: int) -> int:
        """Draft tokens that still fit the draft's own context."""
        return self.info.context_len - committed_len if self.info else 1

    async def connect(self) -> None:
        """Try the handshake once; when the service is not there, keep trying in the background.

        Raises:
            HandshakeError: it is there, and does not fit the target.
        """
        if not self.address:
            return
        try:
            await self._handshake()
        except HandshakeError:
            raise
        except SpecwireError as error:
            self.lost(str(error))

    def lost(self, reason: str) -> None:
        """Use the draft no more until a handshake succeeds again."""
        if self.info is not None or not self.unavailable:
            log.warning("draft service %s: %s; decoding plainly", self.address, reason)
        self.info = None
        self.unavailable = reason
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while not self.available:
            await asyncio.sleep(_RETRY_S)
            try:
                await self._handshake()
                log.warning("draft service %s is back", self.address)
            except SpecwireError as error:
                self.unavailable = str(error)

    async def _handshake(self) -> None:
        request = draft_pb2.DraftServiceGetModelInfoRequest()
        try:
            response = await self.stub.GetModelInfo(request, timeout=_HANDSHAKE_TIMEOUT_S)
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error) from None
        info = wire.model_info_from_proto(response.model)
        check_version(info)
        check_pair(self._target, info)
        self.info, self.unavailable = info, ""

    async def close(self) -> None:
        """Stop watching and close the channel."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self.address:
            await self._channel.close()
