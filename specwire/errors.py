"""Every error that specwire raises, and the one gRPC status each travels as.

    SpecwireError
    ├── InvalidRequestError         a request that can never work; names the field and the value
    │   ├── ContextLengthError      prompt plus max_tokens do not fit the model's context
    │   └── UnsupportedError        valid in itself, but not with this model or server
    ├── ModelLoadError              a model directory that is missing, corrupt or of a refused kind
    ├── ConfigError                 a flag, environment variable or address that cannot be used
    ├── HandshakeError              draft and target that cannot work together
    ├── PrefixMismatchError         a stream request that does not extend what the receiver holds
    ├── UnauthenticatedError        no bearer token, or one that is unknown or expired
    ├── ResourceExhaustedError      full for now; try again after `retry_after_ms`
    ├── StreamIdleError             the client took no token for too long; the generation can be resumed
    │   └── GenerationIdleError     the same from the SDK, with what was received before
    ├── ServiceUnavailableError     the peer is not there, or went away
    │   └── GenerationLostError     a coordinator went away, and none went on in time; with what was received
    ├── DeadlineExceededError       the deadline passed
    ├── RequestCancelledError       the caller or the server's shutdown ended it
    └── InternalError               a defect: what the peer reported fits nothing above

Over gRPC an error is a status code, a message, and a `google.rpc.ErrorInfo` detail with the
fields below as metadata, so the client raises the very type that the service raised. This module
knows no grpc; `specwire.rpc.statuses` translates. The SDK's own two are in `specwire.client.errors`.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import ClassVar

_MAX_VALUE_LEN = 200


class SpecwireError(Exception):
    """Base of all errors raised by specwire."""

    #: Name of the gRPC status code this error travels as.
    status: ClassVar[str] = "UNKNOWN"
    #: Stable identifier on the wire (`google.rpc.ErrorInfo.reason`).
    reason: ClassVar[str] = "UNKNOWN"

    def details(self) -> dict[str, str]:
        """Fields beyond the message, as they travel in `ErrorInfo.metadata`."""
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
    """Errors travel as metadata, for which there is little room."""
    if isinstance(value, Sized) and not isinstance(value, str) and len(value) > _MAX_VALUE_LEN:
        return f"{len(value)} entries"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_VALUE_LEN else text[:_MAX_VALUE_LEN] + "..."


class ContextLengthError(InvalidRequestError):
    """Prompt and `max_tokens` together exceed the model's context length."""

    reason = "CONTEXT_LENGTH"


class UnsupportedError(InvalidRequestError):
    """The request is well formed, but this model or server refuses it rather than approximate it."""

    status = "UNIMPLEMENTED"
    reason = "UNSUPPORTED"


class ModelLoadError(SpecwireError):
    """A model or tokenizer could not be loaded, or is of a kind the engine cannot serve."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_LOAD"


class ConfigError(SpecwireError):
    """A command line flag, `SPECWIRE_*` variable or address cannot be used."""

    status = "FAILED_PRECONDITION"
    reason = "CONFIG"


class HandshakeError(SpecwireError):
    """Draft and target differ in vocabulary, tokenizer or protocol version; the message names both."""

    status = "FAILED_PRECONDITION"
    reason = "HANDSHAKE"


class PrefixMismatchError(SpecwireError):
    """A stream request builds on a length that the receiver does not hold; re-open with the whole prefix.

    Attributes:
        base_len: the length the request builds on, in tokens.
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
    """The service asks for a bearer token, and none came, or one that it does not know, or an expired one."""

    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class ResourceExhaustedError(SpecwireError):
    """A limit is reached (memory, streams, message size).

    Attributes:
        retry_after_ms: when another try may succeed; None when it never will.
    """

    status = "RESOURCE_EXHAUSTED"
    reason = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(message)

    def details(self) -> dict[str, str]:
        return {} if self.retry_after_ms is None else {"retry_after_ms": str(self.retry_after_ms)}


class ServiceUnavailableError(SpecwireError):
    """The service cannot be reached, went away, or is shutting down.

    Attributes:
        retry_after_ms: when another try may succeed; None when nobody can tell.
    """

    status = "UNAVAILABLE"
    reason = "UNAVAILABLE"

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(message)

    def details(self) -> dict[str, str]:
        return {} if self.retry_after_ms is None else {"retry_after_ms": str(self.retry_after_ms)}


class StreamIdleError(SpecwireError):
    """The client took no token of a stream for so long that the coordinator ended it.

    Nothing is wrong with the generation: a request with the tokens received before goes on with it, which the
    SDK sends by itself when the next chunk is asked for.
    """

    status = "ABORTED"
    reason = "STREAM_IDLE"


class DeadlineExceededError(SpecwireError, TimeoutError):
    """The deadline passed before the answer was complete."""

    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class RequestCancelledError(SpecwireError):
    """The request was cancelled before it was complete."""

    status = "CANCELLED"
    reason = "CANCELLED"


class InternalError(SpecwireError):
    """A defect on the other side."""

    status = "INTERNAL"
    reason = "INTERNAL"
