"""Bytes that are no message get INVALID_ARGUMENT, on every kind of method and at any place of a stream."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from specwire.errors import InvalidRequestError
from specwire.rpc.statuses import from_rpc_error
from specwire.rpc.wire.verify import VerifyOrder
from tests.support import model_streams
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, local_stack
from tests.support.model_streams import verify

TRUNCATED = b"\x0a\x64"  # a field of 100 bytes, of which none come
VERIFY = "/specwire.v1.VerifyService/Verify"
stack = entered(lambda: local_stack("emulated:step_ms=0"))


def opening() -> bytes:
    return verify(VerifyOrder(1, 1, 0, [3]), opened=[model_streams.opening()]).SerializeToString()


@pytest.fixture
def channel(stack: LocalStack) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(stack.verify_address) as opened:
        yield opened


def assert_refused(error: grpc.RpcError, num_bytes: int) -> None:
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"request={num_bytes} bytes: is not a message of this method's type"
    assert type(from_rpc_error(error)) is InvalidRequestError


def called(channel: grpc.Channel, kind: str, path: str, *requests: bytes) -> None:
    """Read all that the method answers."""
    call = getattr(channel, kind)(path)
    sent = iter(requests) if kind.startswith("stream") else requests[0]
    answers = call(sent, timeout=30)
    if kind.endswith("stream"):
        list(answers)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("unary_unary", "/specwire.v1.VerifyService/GetModelInfo"),
        ("unary_unary", "/grpc.health.v1.Health/Check"),
        ("unary_stream", "/grpc.health.v1.Health/Watch"),
        ("stream_stream", VERIFY),
        ("stream_stream", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
    ],
    ids=["ours", "health", "one request for a stream", "a stream", "a generator"],
)
def test_a_first_request(channel: grpc.Channel, kind: str, path: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        called(channel, kind, path, TRUNCATED)
    assert_refused(caught.value, len(TRUNCATED))


def test_a_later_request_of_a_stream(stack: LocalStack, channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        called(channel, "stream_stream", VERIFY, opening(), TRUNCATED)
    assert_refused(caught.value, len(TRUNCATED))
    stack.assert_idle_within(10.0)


def test_an_unknown_method(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/specwire.v1.VerifyService/Nothing")(TRUNCATED, timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
