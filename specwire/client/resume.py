"""Going on after a lost coordinator: for how long, where next, and with what. Knows no grpc and no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specwire.client.errors import GenerationIdleError, GenerationLostError
from specwire.completion import Chunk, ResumeInfo, Token
from specwire.errors import (
    HandshakeError,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    ResourceExhaustedError,
    ServiceUnavailableError,
    SpecwireError,
    StreamIdleError,
)
from specwire.v1 import generation_pb2
from specwire.wire.client import chunk_from_proto, resume_info_from_proto, resuming_request

_LONGEST_PAUSE_FACTOR = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """What a client does when a coordinator is lost, or says no.

    A request that has not begun is offered to each address once, in order, and fails at once when none takes
    it. One that has begun is worth more: it is gone on with, at another address or the same one.

    Raises:
        InvalidRequestError: on construction, naming the field and the value.
    """

    resume: bool = True
    """Go on with a generation whose coordinator is lost, or ended its stream because nothing was read; False
    raises `GenerationLostError` or `GenerationIdleError` at once."""
    patience_s: float = 10.0
    """Longest search for a coordinator after a loss, in seconds; never beyond the generation's deadline."""
    max_resumes: int = 5
    """How often one generation may be gone on with after a loss: one that ends every coordinator must not see
    them all. An idle stream is no loss."""
    pause_s: float = 0.1
    """Pause after a round of all addresses, in seconds; doubles with each round, up to ten times as much."""
    wait_when_full: bool = False
    """Send a request that finds every coordinator full again, when they say, until its deadline; False raises
    `ResourceExhaustedError` and leaves that to the caller, who knows what the request is worth."""

    def __post_init__(self) -> None:
        _check_number("patience_s", self.patience_s)
        _check_number("pause_s", self.pause_s)
        if self.max_resumes < 0:
            raise InvalidRequestError("max_resumes", self.max_resumes, "must be at least 0")


def _check_number(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise InvalidRequestError(name, value, "must be a finite number, at least 0")


class NotServedError(Exception):
    """An address that does not serve a request, where another one may.

    Attributes:
        error: why, in terms of the caller.
        may_come_back: whether nobody was there to say so: then it is worth asking again.
    """

    def __init__(self, error: SpecwireError, *, may_come_back: bool) -> None:
        self.error = error
        self.may_come_back = may_come_back
        super().__init__(str(error))


def may_serve_elsewhere(error: SpecwireError) -> bool:
    """Whether an error says something about the coordinator rather than about the request."""
    if isinstance(error, ResourceExhaustedError):
        return error.retry_after_ms is not None  # else it never fits
    return isinstance(
        error, ServiceUnavailableError | RequestCancelledError | HandshakeError | StreamIdleError
    )


def why_nobody(refusals: Sequence[NotServedError]) -> SpecwireError:
    """One error for all of them: what the most helpful one said, or else what everybody said."""
    full = [r.error for r in refusals if isinstance(r.error, ResourceExhaustedError)]
    if full:
        return min(full, key=lambda error: error.retry_after_ms or 0)
    if len(refusals) == 1:
        return refusals[0].error
    return ServiceUnavailableError("; ".join(str(refusal) for refusal in refusals))


class Search:
    """For a coordinator that takes a request which one has just refused, or lost.

    Times are in seconds, on the caller's clock.

    Args:
        index: of the address that refused.
        until_s: when to give up on those that are not there; in the past to ask each other address once.
        full_until_s: when to give up on those that are full.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        num_addresses: int,
        index: int,
        refusal: NotServedError,
        *,
        until_s: float,
        full_until_s: float,
    ) -> None:
        is_there = isinstance(refusal.error, StreamIdleError)
        self._order = [(index + (not is_there) + i) % num_addresses for i in range(num_addresses)]
        self._todo = self._order.copy() if is_there else self._order[:-1]
        self._refusals = {index: refusal}
        self.until_s = until_s
        self._full_until_s = full_until_s
        self._pause_s = policy.pause_s
        self._longest_pause_s = _LONGEST_PAUSE_FACTOR * policy.pause_s

    def next(self, now_s: float) -> tuple[int, float] | None:
        """Whom to ask, and how long to wait before; None when it is over."""
        if self._todo:
            return self._todo.pop(0), 0.0
        waits = {index: wait_s for index in self._order if (wait_s := self._wait_s(index, now_s)) is not None}
        if not waits:
            return None
        self._todo = list(waits)
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        return self._todo.pop(0), min(waits.values())

    def refused(self, index: int, refusal: NotServedError) -> None:
        """Note what an address said, or that it said nothing."""
        self._refusals[index] = refusal

    def _wait_s(self, index: int, now_s: float) -> float | None:
        """Until the address is worth asking again; None where it will not be in time."""
        refusal = self._refusals[index]
        if isinstance(refusal.error, ResourceExhaustedError):
            wait_s, until_s = (refusal.error.retry_after_ms or 0) / 1e3, self._full_until_s
        elif refusal.may_come_back:
            wait_s, until_s = self._pause_s, self.until_s
        else:
            return None
        return wait_s if now_s + wait_s < until_s else None

    @property
    def error(self) -> SpecwireError:
        """Why nobody took it."""
        return why_nobody(list(self._refusals.values()))


class ReceivedTokens:
    """How far a generation has come, and the request that goes on with it.

    Attributes:
        tokens: received, in order, with their texts.
    """

    def __init__(self, request: generation_pb2.GenerateRequest) -> None:
        self._request = request
        self._info: ResumeInfo | None = None
        self._held: list[Token] = []
        self.tokens: list[Token] = []

    def take(self, response: generation_pb2.GenerateResponse) -> Chunk:
        """The chunk of a response; what was held back before has its fate and log probabilities of then.

        Raises:
            InternalError: it does not continue what came before.
        """
        if response.HasField("resume_info"):
            self._info = resume_info_from_proto(response.resume_info)
        chunk = chunk_from_proto(response.chunk)
        num_held = len(self._held)
        if chunk.first_index != len(self.tokens):
            raise InternalError(f"after {len(self.tokens)} tokens came number {chunk.first_index}")
        tokens = [*map(_restored, self._held, chunk.tokens), *chunk.tokens[num_held:]]
        self._held = [*self._held[len(tokens) :], *chunk.held]
        self.tokens += tokens
        return replace(chunk, tokens=tuple(tokens))

    def request(self) -> generation_pb2.GenerateRequest:
        """What to ask the next coordinator for."""
        if self._info is None:  # nothing came: it begins anew
            return self._request
        token_ids = [token.token_id for token in (*self.tokens, *self._held)]
        return resuming_request(self._request, self._info, token_ids)

    def lost(self, why: SpecwireError) -> GenerationLostError | GenerationIdleError:
        """The error that says how far it came."""
        if isinstance(why, StreamIdleError):
            return GenerationIdleError(str(why), tokens=self.tokens)
        message = f"the generation was lost after {len(self.tokens)} tokens: {why}"
        return GenerationLostError(message, getattr(why, "retry_after_ms", None), tokens=self.tokens)


def _restored(held: Token, token: Token) -> Token:
    if held.token_id != token.token_id:
        raise InternalError(f"token {held.token_id} was held back, and token {token.token_id} came of it")
    return replace(held, text=token.text)


def as_addresses(address: str | Sequence[str]) -> tuple[str, ...]:
    """`a:1,b:2`, or a sequence, to the addresses themselves; nothing is checked."""
    return tuple(part.strip() for part in address.split(",")) if isinstance(address, str) else tuple(address)
