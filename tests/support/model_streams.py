"""Streams to the model services by hand, past everything that the coordinator checks."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from specwire.errors import SpecwireError
from specwire.rpc.statuses import from_rpc_error
from specwire.rpc.wire import columns
from specwire.rpc.wire import draft as draft_wire
from specwire.rpc.wire import verify as verify_wire
from specwire.rpc.wire.draft import DraftOrder
from specwire.rpc.wire.verify import AheadOrder, VerifyOrder
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from tests.support.harness import LocalStack

_TIMEOUT_S = 30.0

Order = DraftOrder | VerifyOrder
Opened = Sequence[common_pb2.OpenSequence]


def sampling(**fields: Any) -> common_pb2.SamplingParams:
    """Valid unless told otherwise."""
    return common_pb2.SamplingParams(**{"seed": 1, "rule": common_pb2.RULE_REJECTION} | fields)


def opening(sequence_id: int = 1, **fields: Any) -> common_pb2.OpenSequence:
    """Valid unless told otherwise."""
    valid: dict[str, Any] = {"sequence_id": sequence_id, "sampling": sampling(), "prompt_len": 3}
    return common_pb2.OpenSequence(**valid | fields)


def verify(
    *orders: VerifyOrder | AheadOrder, opened: Opened = (), closed: Sequence[int] = ()
) -> verify_pb2.VerifyRequest:
    """One message."""
    return verify_wire.request_to_proto(opened, closed, orders)


def draft(*orders: DraftOrder, opened: Opened = (), closed: Sequence[int] = ()) -> draft_pb2.DraftRequest:
    """One message."""
    return draft_wire.request_to_proto(opened, closed, orders)


class SequenceFailedError(Exception):
    """A sequence that a message ended; `error` is as the service raised it."""

    def __init__(self, sequence_id: int, error: SpecwireError) -> None:
        super().__init__(f"sequence {sequence_id}: {error}")
        self.error = error
        self._sequence_id = sequence_id

    def of(self, sequence_id: int) -> SpecwireError:
        """The error, which is of this sequence."""
        assert self._sequence_id == sequence_id
        return self.error


class RawStream:
    """One stream; messages are sent when the test says so."""

    def __init__(self, open_stream: Any, metadata: Any) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = open_stream(iter(self._requests.get, None), timeout=_TIMEOUT_S, metadata=metadata)

    def send(self, message: Any) -> None:
        self._requests.put(message)

    def end_requests(self) -> None:
        """Nothing more will be sent."""
        self._requests.put(None)

    def read(self) -> Any:
        """The next message.

        Raises:
            SpecwireError: what ended the stream.
            StopIteration: it has ended without an error.
        """
        try:
            return next(self._call)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def ask(self, message: Any) -> Any:
        """Send a message, and read the next one.

        Raises:
            SequenceFailedError: it says that a sequence has ended.
        """
        self.send(message)
        response = self.read()
        for error in response.errors:
            raise SequenceFailedError(error.sequence_id, columns.error_from_proto(error))
        return response

    def status(self) -> grpc.StatusCode:
        """How it ended, after the rest of its messages."""
        with contextlib.suppress(grpc.RpcError):
            for _ in self._call:
                pass
        return self._call.code()

    def cancel(self) -> None:
        self._call.cancel()
        self.end_requests()


def error_of(stream: RawStream, message: Any) -> SpecwireError:
    """What a message ends its sequence with."""
    with pytest.raises(SequenceFailedError) as failed:
        stream.ask(message)
    return failed.value.error


@contextlib.contextmanager
def raw_stream(stack: LocalStack, role: str, metadata: Any = ()) -> Iterator[RawStream]:
    """A stream to the "draft" or "verify" service, cancelled at the end of the body."""
    address = stack.draft_address if role == "draft" else stack.verify_address
    with stream_to(address, role, metadata) as stream:
        yield stream


@contextlib.contextmanager
def stream_to(address: str, role: str, metadata: Any = ()) -> Iterator[RawStream]:
    """As `raw_stream`."""
    with grpc.insecure_channel(address) as channel:
        open_stream = (
            draft_pb2_grpc.DraftServiceStub(channel).Draft
            if role == "draft"
            else verify_pb2_grpc.VerifyServiceStub(channel).Verify
        )
        stream = RawStream(open_stream, metadata)
        try:
            yield stream
        finally:
            stream.cancel()
