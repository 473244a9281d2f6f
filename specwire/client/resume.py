"""Resuming after the loss of a coordinator: for how long, where, and from which tokens. No grpc, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specwire.client.errors import GenerationIdleError, GenerationLostError
from specwire.completion import Chunk, ResumeInfo, Token
from specwire.errors import (
    HandshakeError,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    ResourceExhaustedError,
    ServiceDrainingError,
    ServiceUnavailableError,
    SpecwireError,
    StreamIdleError,
)
from specwire.rpc.wire.client import chunk_from_proto, resume_info_from_proto, resuming_request
from specwire.v1 import generation_pb2

_LONGEST_PAUSE_FACTOR = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """What a client does when a coordinator is lost, or refuses a request.

    A request that has not begun is sent to each address once, in order, and fails when none accepts it. Where
    one of them shuts down, or was there before, another one may take its place behind the same address: the
    search goes on as after a loss. One that has begun is resumed, at another address or the same one.

    Raises:
        InvalidRequestError: on construction, naming the field and the value.
    """

    resume: bool = True
    """Resume a generation whose coordinator is lost, or ended the stream because nothing was read; False
    raises `GenerationLostError` or `GenerationIdleError` at once."""
    patience_s: float = 10.0
    """Longest search for a coordinator that is lost, or shuts down, in seconds; never beyond the generation's
    deadline."""
    max_resumes: int = 5
    """How often in a row a generation may be resumed after losses without a further token: one that crashes
    every coordinator must not reach all of them. An idle stream is no loss; 0 resumes after none."""
    pause_s: float = 0.1
    """Pause after trying all addresses, in seconds; doubles each time, up to ten times as much."""
    wait_when_full: bool = False
    """Retry a request that every coordinator refuses as full, at the time they name, until its deadline;
    False raises `ResourceExhaustedError` and leaves that to the caller."""

    def __post_init__(self) -> None:
        for name in ("patience_s", "pause_s"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise InvalidRequestError(name, value, "must be a finite number, at least 0")
        if self.max_resumes < 0:
            raise InvalidRequestError("max_resumes", self.max_resumes, "must be at least 0")


class NotServedError(Exception):
    """An address does not serve a request that another one may serve.

    Attributes:
        error: why, in terms of the caller.
        may_recover: whether the coordinator was lost rather than refused it, so that a retry is worthwhile.
    """

    def __init__(self, error: SpecwireError, *, may_recover: bool) -> None:
        self.error = error
        self.may_recover = may_recover
        super().__init__(str(error))

    @property
    def is_draining(self) -> bool:
        """Whether the coordinator shuts down: another one may be behind the same address soon."""
        return isinstance(self.error, ServiceDrainingError)


def may_serve_elsewhere(error: SpecwireError) -> bool:
    """Whether an error is about the coordinator rather than about the request."""
    if isinstance(error, ResourceExhaustedError):
        return error.retry_after_ms is not None  # else it can never be served
    return isinstance(
        error, ServiceUnavailableError | RequestCancelledError | HandshakeError | StreamIdleError
    )


class Search:
    """The search for a coordinator to serve a request that one has just refused, or lost.

    Times are in seconds, on the caller's clock.

    Args:
        index: of the address that refused.
        until_s: when to give up on addresses that are unreachable; in the past to try each other one once.
        full_until_s: when to give up on addresses that are full.
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
        """Index of the next address, and the pause in seconds before; None at the end of the search."""
        if self._todo:
            return self._todo.pop(0), 0.0
        waits = {index: wait_s for index in self._order if (wait_s := self._wait_s(index, now_s)) is not None}
        if not waits:
            return None
        self._todo = list(waits)
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        return self._todo.pop(0), min(waits.values())

    def refused(self, index: int, refusal: NotServedError) -> None:
        self._refusals[index] = refusal

    def _wait_s(self, index: int, now_s: float) -> float | None:
        """Until the address is worth asking again; None where it will not be in time."""
        refusal = self._refusals[index]
        if isinstance(refusal.error, ResourceExhaustedError):
            wait_s, until_s = (refusal.error.retry_after_ms or 0) / 1e3, self._full_until_s
        elif refusal.may_recover or refusal.is_draining:
            wait_s, until_s = self._pause_s, self.until_s
        else:
            return None
        return wait_s if now_s + wait_s < until_s else None

    @property
    def error(self) -> SpecwireError:
        """Why none serves it: the most helpful refusal, or else all messages together."""
        errors = [refusal.error for refusal in self._refusals.values()]
        if full := [error for error in errors if isinstance(error, ResourceExhaustedError)]:
            return min(full, key=lambda error: error.retry_after_ms or 0)
        return errors[0] if len(errors) == 1 else ServiceUnavailableError("; ".join(map(str, errors)))


class ReceivedTokens:
    """The tokens of a generation so far, with their texts, and those of the prompt if their log probabilities
    were requested; and the request that resumes it after them."""

    def __init__(self, request: generation_pb2.GenerateRequest) -> None:
        self._request = request
        self._info: ResumeInfo | None = None
        self._held: list[Token] = []
        self.tokens: list[Token] = []
        self.prompt: list[Token] = []

    def take(self, response: generation_pb2.GenerateResponse) -> Chunk:
        """The chunk of a response; tokens held back before keep their first fate and log probabilities.
        Raises InternalError if it does not continue the tokens before."""
        if response.HasField("resume_info"):
            info = resume_info_from_proto(response.resume_info)
            if self._info not in (None, info):
                raise InternalError(f"a generation of {self._info} goes on with {info}")
            self._info = info
        if not response.HasField("chunk"):
            raise InternalError("a message of the stream is neither a chunk nor a completion")
        chunk = chunk_from_proto(response.chunk)
        num_held = len(self._held)
        if chunk.first_index != len(self.tokens):
            raise InternalError(f"after {len(self.tokens)} tokens came number {chunk.first_index}")
        tokens = [*map(_restored, self._held, chunk.tokens), *chunk.tokens[num_held:]]
        self._held = [*self._held[len(tokens) :], *chunk.held]
        self.tokens += tokens
        most = self._request.stop_conditions.max_tokens
        if most and len(self.tokens) + len(self._held) > most:
            problem = f"{len(self.tokens) + len(self._held)} tokens came where max_tokens is {most}"
            raise InternalError(problem)
        # A coordinator that begins again sends the prompt again.
        if chunk.prompt and response.chunk.first_prompt_index > len(self.prompt):
            number = response.chunk.first_prompt_index
            raise InternalError(f"after {len(self.prompt)} tokens of the prompt came number {number}")
        prompt = chunk.prompt[max(0, len(self.prompt) - response.chunk.first_prompt_index) :]
        self.prompt += prompt
        return replace(chunk, tokens=tuple(tokens), prompt=prompt)

    def check_end(self, completion: generation_pb2.Completion) -> None:
        """Raises InternalError if the output has other tokens than these."""
        if self._held:
            raise InternalError(
                f"{len(self._held)} tokens were held back, and the completion came before them"
            )
        num_tokens = completion.usage.completion_tokens  # of a beam search, of all texts
        if not completion.hypotheses and num_tokens != len(self.tokens):
            raise InternalError(f"{len(self.tokens)} tokens came of an output of {num_tokens}")

    def request(self) -> generation_pb2.GenerateRequest:
        """The request to the next coordinator."""
        if self._info is None:  # nothing was received: it starts over
            return self._request
        token_ids = [token.token_id for token in (*self.tokens, *self._held)]
        return resuming_request(self._request, self._info, token_ids)

    def lost(self, why: SpecwireError) -> GenerationLostError | GenerationIdleError:
        """The error of a generation that is not resumed, with its tokens."""
        if isinstance(why, StreamIdleError):
            return GenerationIdleError(str(why), tokens=self.tokens)
        message = f"the generation was lost after {len(self.tokens)} tokens: {why}"
        return GenerationLostError(message, getattr(why, "retry_after_ms", None), tokens=self.tokens)


def _restored(held: Token, token: Token) -> Token:
    if held.token_id != token.token_id:
        raise InternalError(f"token {held.token_id} was held back, and token {token.token_id} came of it")
    return replace(held, text=token.text)
