"""Bytes that are no message get INVALID_ARGUMENT, on every kind of method and at any place of a stream."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from specwire.errors import InvalidRequestError
from specwire.rpc.statuses import from_rpc_error
from specwire.wire.verify import VerifyOrder
from tests.support import model_streams
from tests.support.harness import LocalStack, local_stack
from tests.support.model_streams import verify

TRUNCATED = b"\x0a\x64"  # a field of 100 bytes, of which none come
VERIFY = "/specwire.v1.VerifyService/Verify"


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with local_stack("emulated:step_ms=0") as running:
        yield running


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


@pytest.mark.parametrize(
    "path",
    ["/specwire.v1.VerifyService/GetModelInfo", "/grpc.health.v1.Health/Check"],
    ids=["ours", "health"],
)
def test_a_unary_request(channel: grpc.Channel, path: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(path)(TRUNCATED, timeout=30)
    assert_refused(caught.value, len(TRUNCATED))


def test_a_unary_request_for_a_stream(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream("/grpc.health.v1.Health/Watch")(TRUNCATED, timeout=30))
    assert_refused(caught.value, len(TRUNCATED))


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_request_of_a_stream(stack: LocalStack, channel: grpc.Channel, num_before: int) -> None:
    answers = channel.stream_stream(VERIFY)(iter([opening()] * num_before + [TRUNCATED]), timeout=30)
    found = []
    with pytest.raises(grpc.RpcError) as caught:
        found += list(answers)
    assert_refused(caught.value, len(TRUNCATED))
    stack.assert_idle_within(10.0)


def test_a_request_of_a_generator(channel: grpc.Channel) -> None:
    """Reflection is written as one."""
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(path)(iter([TRUNCATED]), timeout=30))
    assert_refused(caught.value, len(TRUNCATED))


def test_an_unknown_method(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/specwire.v1.VerifyService/Nothing")(TRUNCATED, timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
