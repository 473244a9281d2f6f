"""Every error that specwire raises, and its gRPC status.

    SpecwireError
    ├── InvalidRequestError         a request that cannot succeed; names the field and the value
    │   ├── ContextLengthError      prompt plus max_tokens do not fit the model's context
    │   └── UnsupportedError        valid, but not supported by this model or server
    ├── ModelLoadError              a model directory that is missing, corrupt or unsupported
    ├── ConfigError                 a flag, environment variable or address that cannot be used
    ├── HandshakeError              draft and target that cannot work together
    ├── PrefixMismatchError         a stream request that does not extend the receiver's tokens
    ├── UnauthenticatedError        no bearer token, or one that is unknown or expired
    ├── ResourceExhaustedError      full for now; retry after `retry_after_ms`
    ├── StreamIdleError             the client read no token for too long; the generation can be resumed
    │   └── GenerationIdleError     the same from the SDK, with the tokens received before
    ├── ServiceUnavailableError     the peer cannot be reached, or was lost
    │   ├── ServiceLoadingError     draft or verify loads its model
    │   ├── ServiceDrainingError    it takes no new requests, and finishes those that it has
    │   └── GenerationLostError     a coordinator was lost, and none resumed in time; with the tokens received
    ├── DeadlineExceededError       the deadline passed
    ├── RequestCancelledError       cancelled by the caller or the server's shutdown
    └── InternalError               a defect, or any other error of the peer

Over gRPC an error is a status code, a message, and a `google.rpc.ErrorInfo` detail with the
fields below as metadata, so the client raises the same type as the service. This module knows no grpc;
`specwire.rpc.statuses` translates. The two that only the SDK raises are in `specwire.client.errors`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sized
from typing import ClassVar

_MAX_VALUE_LEN = 200


class SpecwireError(Exception):
    """Base of all errors raised by specwire."""

    #: Name of the gRPC status code of this error.
    status: ClassVar[str] = "UNKNOWN"
    #: Stable identifier on the wire (`google.rpc.ErrorInfo.reason`).
    reason: ClassVar[str] = "UNKNOWN"

    def details(self) -> dict[str, str]:
        """Fields beyond the message, for `ErrorInfo.metadata`."""
        return {}


class InvalidRequestError(SpecwireError, ValueError):
    """A request parameter is out of range, contradictory or missing.

    Attributes:
        field: dotted name of the parameter, as the caller wrote it (`top_p`, `prompt_token_ids[3]`).
        value: the offending value, as text; cut where it is long.
    """

    status = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field = field
        self.value = _abbreviated(value)
        self.problem = problem
        super().__init__(f"{field}={self.value}: {problem}")

    def details(self) -> dict[str, str]:
        return {"field": self.field, "value": self.value, "problem": self.problem}


def _abbreviated(value: object) -> str:
    """Errors are sent as metadata, whose size is limited."""
    if isinstance(value, Sized) and not isinstance(value, str) and len(value) > _MAX_VALUE_LEN:
        return f"{len(value)} entries"
    text = value if isinstance(value, str) else repr(value)
    text = text.encode(errors="backslashreplace").decode()  # which shows halves of characters
    return text if len(text) <= _MAX_VALUE_LEN else text[:_MAX_VALUE_LEN] + "..."


class ContextLengthError(InvalidRequestError):
    """Prompt and `max_tokens` together exceed the model's context length."""

    reason = "CONTEXT_LENGTH"


class UnsupportedError(InvalidRequestError):
    """The request is valid, but this model or server refuses it rather than approximate it."""

    status = "UNIMPLEMENTED"
    reason = "UNSUPPORTED"


class ModelLoadError(SpecwireError):
    """A model or tokenizer cannot be loaded, or is of a kind that the engine does not support."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_LOAD"


class ConfigError(SpecwireError):
    """A command line flag, `SPECWIRE_*` variable or address is invalid."""

    status = "FAILED_PRECONDITION"
    reason = "CONFIG"


class HandshakeError(SpecwireError):
    """Draft and target differ in vocabulary, tokenizer or protocol version; names both."""

    status = "FAILED_PRECONDITION"
    reason = "HANDSHAKE"


class PrefixMismatchError(SpecwireError):
    """A stream request extends a length that the receiver does not hold; re-open with the whole prefix.

    Attributes:
        base_len: the length that the request extends, in tokens.
        held_len: the length the receiver holds, in tokens.
    """

    status = "FAILED_PRECONDITION"
    reason = "PREFIX_MISMATCH"

    def __init__(self, base_len: int, held_len: int) -> None:
        self.base_len = int(base_len)
        self.held_len = int(held_len)
        super().__init__(
            f"base_len={base_len} does not extend the {held_len} tokens held; re-open the stream"
        )

    def details(self) -> dict[str, str]:
        return {"base_len": str(self.base_len), "held_len": str(self.held_len)}


class UnauthenticatedError(SpecwireError):
    """The service requires a bearer token, and the call has none, an unknown one or an expired one."""

    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class _RetryableError(Exception):
    """What errors have that say when to try again."""

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(message)

    def details(self) -> dict[str, str]:
        return {} if self.retry_after_ms is None else {"retry_after_ms": str(self.retry_after_ms)}


class ResourceExhaustedError(_RetryableError, SpecwireError):
    """A limit is reached (memory, streams, message size).

    Attributes:
        retry_after_ms: when a retry may succeed; None if it never will.
    """

    status = "RESOURCE_EXHAUSTED"
    reason = "RESOURCE_EXHAUSTED"


class ServiceUnavailableError(_RetryableError, SpecwireError):
    """The service cannot be reached, was lost, or is shutting down.

    Attributes:
        retry_after_ms: when a retry may succeed; None if unknown.
    """

    status = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class ServiceLoadingError(ServiceUnavailableError):
    """The service loads its model, and serves afterwards."""

    reason = "LOADING"


class ServiceDrainingError(ServiceUnavailableError):
    """The service shuts down: it takes no new requests, and finishes those that it has."""

    reason = "DRAINING"


class StreamIdleError(SpecwireError):
    """The client read no token of a stream for so long that the coordinator ended it.

    The generation itself did not fail: a request with the tokens received before resumes it, which the SDK
    sends by itself when the next chunk is read.
    """

    status = "ABORTED"
    reason = "STREAM_IDLE"


class DeadlineExceededError(SpecwireError, TimeoutError):
    """The deadline passed before the response was complete."""

    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class RequestCancelledError(SpecwireError):
    """The request was cancelled before it was complete."""

    status = "CANCELLED"
    reason = "CANCELLED"


class InternalError(SpecwireError):
    """A defect of the peer."""

    status = "INTERNAL"
    reason = "INTERNAL"


def rebuild(reason: str, fields: Mapping[str, str], message: str) -> SpecwireError:
    """An error that a peer reported, from what was sent of it.

    Raises:
        KeyError, ValueError: the reason is unknown, or a field is missing or no number.
    """
    kind = {each.reason: each for each in _kinds(SpecwireError)}[reason]
    if issubclass(kind, InvalidRequestError):
        return kind(fields["field"], fields["value"], fields["problem"])
    if kind is PrefixMismatchError:
        return PrefixMismatchError(_count(fields["base_len"]), _count(fields["held_len"]))
    if issubclass(kind, _RetryableError):
        return kind(message, _count(fields["retry_after_ms"]) if "retry_after_ms" in fields else None)
    return kind(message)


def _kinds(base: type[SpecwireError]) -> list[type[SpecwireError]]:
    """Those of this module."""
    own = [each for each in base.__subclasses__() if each.__module__ == __name__]
    return [kind for each in own for kind in (each, *_kinds(each))]


def _count(text: str) -> int:
    """A number from a peer; ValueError for any other text, and for one that is too long."""
    if not re.fullmatch("[0-9]{1,10}", text):
        raise ValueError
    return int(text)
