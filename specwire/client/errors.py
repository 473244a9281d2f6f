"""Errors that only the SDK raises, with the tokens received before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specwire.completion import Token
from specwire.errors import ServiceUnavailableError, StreamIdleError


class _Received:
    """The output received before an error.

    Attributes:
        tokens: in order, with their texts.
    """

    def __init__(self, *about: Any, tokens: Sequence[Token] = (), **options: Any) -> None:
        super().__init__(*about, **options)
        self.tokens = tuple(tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens received."""
        return len(self.tokens)

    @property
    def text(self) -> str:
        """Text received."""
        return "".join(token.text for token in self.tokens)


class GenerationLostError(_Received, ServiceUnavailableError):
    """A running generation lost its coordinator, and no other one resumed it in time.

    Attributes:
        retry_after_ms: when a retry may succeed; None if unknown.
    """

    reason = "GENERATION_LOST"


class GenerationIdleError(_Received, StreamIdleError):
    """A stream was paused for too long, and the SDK may not resume it."""
