"""specwire: exact speculative decoding across machines.

    from specwire import Client, SamplingParams

    with Client("127.0.0.1:7070") as client:
        print(client.generate("def fibonacci(", SamplingParams(max_tokens=64)).text)

Importing this package loads neither torch nor transformers, and grpc only with the clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specwire.client.errors import GenerationIdleError, GenerationLostError
from specwire.completion import (
    Chunk,
    Completion,
    DraftTree,
    FinishReason,
    Hypothesis,
    SourceCounts,
    Speculation,
    Timing,
    Token,
    Usage,
)
from specwire.config.security.tls import TLS
from specwire.core import Fate, ModelInfo, Rule, SamplingParams
from specwire.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineExceededError,
    HandshakeError,
    InternalError,
    InvalidRequestError,
    ModelLoadError,
    PrefixMismatchError,
    RequestCancelledError,
    ResourceExhaustedError,
    ServiceUnavailableError,
    SpecwireError,
    StreamIdleError,
    UnauthenticatedError,
    UnsupportedError,
)
from specwire.text.grammar import Grammar

if TYPE_CHECKING:
    from specwire.client.client import AsyncClient, Client
    from specwire.client.resume import RetryPolicy
    from specwire.client.streaming import AsyncStream, Stream

__version__ = "0.1.0"

__all__ = [
    "TLS",
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "DeadlineExceededError",
    "DraftTree",
    "Fate",
    "FinishReason",
    "GenerationIdleError",
    "GenerationLostError",
    "Grammar",
    "HandshakeError",
    "Hypothesis",
    "InternalError",
    "InvalidRequestError",
    "ModelInfo",
    "ModelLoadError",
    "PrefixMismatchError",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "RetryPolicy",
    "Rule",
    "SamplingParams",
    "ServiceUnavailableError",
    "SourceCounts",
    "Speculation",
    "SpecwireError",
    "Stream",
    "StreamIdleError",
    "Timing",
    "Token",
    "UnauthenticatedError",
    "UnsupportedError",
    "Usage",
]

_CLIENT_NAMES = ("AsyncClient", "AsyncStream", "Client", "RetryPolicy", "Stream")


def __getattr__(name: str) -> Any:
    """Load clients on first use: a service that imports the nouns does not load the client."""
    if name in _CLIENT_NAMES:
        from specwire.client import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
