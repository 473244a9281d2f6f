"""Errors as gRPC statuses, and back.

An error is sent as its status code and a `google.rpc.ErrorInfo` whose `reason` names the type and whose
metadata has the fields, so both sides raise the same class (`specwire.errors`).
"""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specwire import errors
from specwire.errors import SpecwireError

_DOMAIN = "specwire"
_BY_STATUS: dict[grpc.StatusCode, type[SpecwireError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.ServiceUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
    grpc.StatusCode.CANCELLED: errors.RequestCancelledError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhaustedError,
}
# A client accepts 8 KiB of metadata, which contain a message twice: percent-encoded, at worst three bytes for
# one, and with the fields in base64.
_MAX_MESSAGE_BYTES = 1_000
_MAX_FIELDS_BYTES = 1_500
_CUT = "..."
_DEADLINE_OF_GRPC = "Deadline Exceeded"  # alone, or as the reason why it removed the stream


def to_status(error: SpecwireError) -> Any:
    """The gRPC status of an error; long texts are cut."""
    fields = error.details()
    room = _MAX_FIELDS_BYTES // max(1, len(fields))
    metadata = {name: _cut(value, room) for name, value in fields.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=_DOMAIN, metadata=metadata)
    message = _cut(str(error), _MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=grpc.StatusCode[error.status].value[0], message=message)
    status.details.add().Pack(info)
    retry_after_ms = getattr(error, "retry_after_ms", None)
    if retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(retry_after_ms)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return rpc_status.to_status(status)


def _cut(text: str, max_bytes: int) -> str:
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - len(_CUT)].decode(errors="ignore") + _CUT


GARBLED = "what it sent is no message of the protocol"
"""grpc.aio hands over None for such bytes, and ends neither the call nor the stream."""


def from_rpc_error(error: grpc.RpcError) -> SpecwireError:
    """The error that the peer raised, or the one that corresponds to the status or the failed transport."""
    info = _error_info(error)
    if info is not None:
        with contextlib.suppress(KeyError, ValueError):  # not an error of ours, or with other fields
            return errors.rebuild(info.reason, dict(info.metadata), error.details() or "")
    kind = _BY_STATUS.get(error.code(), errors.InternalError)
    if kind is errors.DeadlineExceededError and _DEADLINE_OF_GRPC in (error.details() or ""):
        return kind("the deadline passed")  # in the words of the service that may see it first
    other = "; another service serves there" if error.code() is grpc.StatusCode.UNIMPLEMENTED else ""
    return kind(f"{error.code().name}: {error.details()}{other}")


def was_reported(error: grpc.RpcError) -> bool:
    """Whether the peer itself reported the error; else it, or the network, failed."""
    return _error_info(error) is not None


def _error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    """The peer's details of its error; None if there are none, or they are malformed."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == "grpc-status-details-bin":
            with contextlib.suppress(DecodeError):
                for detail in status_pb2.Status.FromString(value).details:
                    info = error_details_pb2.ErrorInfo()
                    if detail.Unpack(info) and info.domain == _DOMAIN:
                        return info
    return None
