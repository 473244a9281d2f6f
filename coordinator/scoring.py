"""Log probabilities of a prompt's tokens under the target. Knows no grpc.

The target judges the prompt as if it were draft tokens: a verdict has the log probabilities of each draft
token at its position, before any warp. So a prompt takes passes of at most 65 rows, beside the rounds of
others, and the logits of a whole prompt are never in memory.

    committed   prompt[:1]   prompt[:65]    ...
    draft       prompt[1:65] prompt[65:129] ...
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from coordinator.generation import Turns, Verifier
from coordinator.ledger import Ledger
from coordinator.requests import GenerationRequest
from coordinator.text import IncrementalDetokenizer
from specwire.completion import Stage
from specwire.core import MAX_NUM_DRAFT_TOKENS, NO_TOKEN, Logprobs, Proposal, Rule, SamplingParams
from specwire.errors import InternalError, ServiceUnavailableError
from specwire.rpc.wire import client as client_wire
from specwire.telemetry import tracing
from specwire.text.tokenizer import Tokenizer
from specwire.v1 import generation_pb2


def scoring(request: GenerationRequest) -> GenerationRequest:
    """The same prompt as a sequence that is only judged."""
    params = request.keyed_params
    judged = SamplingParams(
        temperature=0,
        seed=params.seed,
        rule=Rule.GUMBEL,
        logprobs=params.prompt_logprobs,
        cache_salt=params.cache_salt,
        adapter=params.adapter,
    )
    return replace(request, keyed_params=judged, num_draft_tokens=0)


@dataclass(kw_only=True)
class PromptScores:
    """The prompt of one request, in messages of as many tokens as the target judges at a time.

    Attributes:
        verifier: of a sequence that was opened for `scoring(request)`.
    """

    request: GenerationRequest
    verifier: Verifier
    tokenizer: Tokenizer | None
    ledger: Ledger
    parent: tracing.Span
    turns: Turns

    def __post_init__(self) -> None:
        self._token_ids = self.request.prompt_token_ids
        skips = self.request.params.skip_special_tokens
        self._text = IncrementalDetokenizer(self.tokenizer, (), skip_special_tokens=skips)

    async def messages(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """All tokens of the prompt, in order."""
        token_ids = self._token_ids
        yield self._message(0, [None])
        for start in range(1, len(token_ids), MAX_NUM_DRAFT_TOKENS):
            if not self.turns.may_start:
                await self.turns.wait()
            judged = token_ids[start : start + MAX_NUM_DRAFT_TOKENS]
            yield self._message(start, await self._judge(start, judged))
            self.ledger.switch(Stage.COORDINATOR)

    async def _judge(self, start: int, token_ids: Sequence[int]) -> Sequence[Logprobs]:
        self.ledger.switch(Stage.VERIFY)
        committed = self._token_ids[:start]
        try:
            verdict, cost = await self.verifier.verify(committed, Proposal(start, token_ids), self.parent)
        except ServiceUnavailableError:
            self.ledger.fail()
            raise
        self.ledger.settle(cost, Stage.EMIT)
        if NO_TOKEN in verdict.target_token_ids[: len(token_ids)]:
            raise InternalError("the target's logits are not finite")
        return verdict.logprobs[: len(token_ids)]

    def _message(self, start: int, logprobs: Sequence[Logprobs | None]) -> generation_pb2.GenerateResponse:
        end = start + len(logprobs)
        token_ids = self._token_ids[start:end]
        texts = [self._text.add(token_id) for token_id in token_ids]
        if end == len(self._token_ids):
            texts[-1] += self._text.flush()
        return client_wire.prompt_chunk(start, zip(token_ids, texts, logprobs, strict=True))
