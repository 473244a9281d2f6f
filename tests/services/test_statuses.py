"""Errors on their way through gRPC: none is too large for it, and none that a peer makes up does harm."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from specwire import SamplingParams, ServiceUnavailableError, SpecwireError, errors
from specwire.config.services import VerifyConfig
from specwire.rpc.channel import open_channel
from specwire.rpc.server import Server
from specwire.rpc.statuses import from_rpc_error
from specwire.v1 import verify_pb2, verify_pb2_grpc
from tests.support.harness import local_stack
from verify_service.servicer import VerifyServicer

LONG = 20_000
DETAILS = "grpc-status-details-bin"


class Raises(verify_pb2_grpc.VerifyServiceServicer):
    """A service whose handshake fails."""

    def __init__(self, errors: Iterable[Exception]) -> None:
        self._errors = iter(errors)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise next(self._errors)


async def over_grpc(*errors: Exception) -> list[SpecwireError]:
    """What a client of ours makes of errors that a method raises one after the other."""
    server, found = Server(VerifyConfig(model="emulated:", grace_s=0.0), []), []
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(Raises(errors), server.grpc)
    async with open_channel(await server.start()) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        for _ in errors:
            with pytest.raises(grpc.RpcError) as caught:
                await stub.GetModelInfo(verify_pb2.VerifyServiceGetModelInfoRequest(), timeout=30)
            found.append(from_rpc_error(caught.value))
    await server.stop()
    return found


@pytest.mark.parametrize("kind", [errors.HandshakeError, errors.InvalidRequestError, errors.UnsupportedError])
async def test_an_error_is_never_too_large(kind: type[SpecwireError]) -> None:
    """Over 8 KiB of metadata it would be RESOURCE_EXHAUSTED, for all but few."""
    num_texts = 3 if issubclass(kind, errors.InvalidRequestError) else 1
    sent = [kind(*[character * LONG] * num_texts) for character in "x\né😀\ud800" for _ in range(3)]
    for error in await over_grpc(*sent):
        assert type(error) is kind
        assert len(str(error).encode()) < 3_000
        assert "..." in str(error)


async def test_one_that_fits_is_not_cut() -> None:
    message = "ä" * 450
    [error] = await over_grpc(errors.ResourceExhaustedError(message, 7))
    assert str(error) == message


def details(*packed: Any) -> bytes:
    """As a peer of ours writes them."""
    status = status_pb2.Status(code=3, message="no")
    for each in packed:
        status.details.add().CopyFrom(each)
    return status.SerializeToString()


def info(reason: str, **fields: str) -> bytes:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="specwire", metadata=fields))
    return details(packed)


GARBAGE = any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff\xff")
MALFORMED = {
    "empty": b"",
    "no message": b"\xff" * 40,
    "truncated": info("INVALID_REQUEST", field="a", value="b", problem="c")[:-3],
    "no detail": details(GARBAGE),
    "no text": b"\x12\x02\xc3\x28",
    "unknown reason": info("NONSENSE"),
    "no fields": info("PREFIX_MISMATCH"),
    "some fields": info("INVALID_REQUEST", field="a"),
    "no number": info("PREFIX_MISMATCH", base_len="seven", held_len="3"),
    "negative": info("RESOURCE_EXHAUSTED", retry_after_ms="-5"),
    "not finite": info("UNAVAILABLE", retry_after_ms="inf"),
    "other digits": info("UNAVAILABLE", retry_after_ms="٣"),
    "without end": info("RESOURCE_EXHAUSTED", retry_after_ms="9" * 5_000),
}


class ReceivedError(grpc.RpcError):  # type: ignore[misc]
    """UNAVAILABLE, and details of any kind."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "not now"

    def trailing_metadata(self) -> Any:
        return ((DETAILS, self._data),)


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_details_leave_the_plain_status(data: bytes) -> None:
    error = from_rpc_error(ReceivedError(data))
    assert type(error) is ServiceUnavailableError
    assert str(error) == "UNAVAILABLE: not now"


def test_a_stranger_at_verifys_port_is_no_defect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def verify(self: Any, requests: Any, context: Any) -> None:
        context.set_trailing_metadata(((DETAILS, MALFORMED["no number"]),))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

    monkeypatch.setattr(VerifyServicer, "Verify", verify)
    with (
        local_stack("emulated:step_ms=0", coordinator_options={"failover_timeout_s": 0.2}) as stack,
        pytest.raises(ServiceUnavailableError, match="not now"),
    ):
        stack.client.generate(params=SamplingParams(max_tokens=3), prompt_token_ids=[1], timeout_s=20)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
