"""Bytes that are no message get INVALID_ARGUMENT, on every kind of method and at any place of a stream."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from specwire.errors import InvalidRequestError
from specwire.rpc.statuses import from_rpc_error
from specwire.rpc.wire.verify import VerifyOrder
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, local_stack
from tests.support.model_streams import opening, verify

TRUNCATED = b"\x0a\x64"  # a field of 100 bytes, of which none come
VERIFY = "/specwire.v1.VerifyService/Verify"
stack = entered(lambda: local_stack("emulated:step_ms=0"))


@pytest.fixture
def channel(stack: LocalStack) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(stack.verify_address) as opened:
        yield opened


def assert_refused(channel: grpc.Channel, kind: str, path: str, *requests: bytes) -> None:
    """The last one is, while all that the method answers is read."""
    sent = iter(requests) if kind.startswith("stream") else requests[0]
    call = getattr(channel, kind)(path)
    with pytest.raises(grpc.RpcError) as caught:
        _ = [*call(sent, timeout=30)] if kind.endswith("stream") else call(sent, timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    said = f"request={len(requests[-1])} bytes: is not a message of this method's type"
    assert caught.value.details() == said
    assert type(from_rpc_error(caught.value)) is InvalidRequestError


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
    assert_refused(channel, kind, path, TRUNCATED)


def test_a_later_request_of_a_stream(stack: LocalStack, channel: grpc.Channel) -> None:
    first = verify(VerifyOrder(1, 1, 0, [3]), opened=[opening()]).SerializeToString()
    assert_refused(channel, "stream_stream", VERIFY, first, TRUNCATED)
    stack.assert_idle_within(10.0)
