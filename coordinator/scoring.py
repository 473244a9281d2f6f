"""Log probabilities of a prompt's tokens under the target. Knows no grpc.

The target judges the prompt as if it were draft tokens: a verdict has the log probabilities of each draft
token at its position, before any warp. So a prompt takes passes of at most 65 rows, beside the rounds of
others, and the logits of a whole prompt are never in memory.

    committed   prompt[:1]   prompt[:65]    ...
    draft       prompt[1:65] prompt[65:129] ...
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

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


async def scored_prompt(
    request: GenerationRequest,
    verifier: Verifier,
    tokenizer: Tokenizer | None,
    ledger: Ledger,
    parent: tracing.Span,
    turns: Turns,
) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
    """All tokens of a prompt, in order, in messages of as many as the target judges at a time.

    Args:
        verifier: of a sequence that was opened for `scoring(request)`.
    """
    token_ids = request.prompt_token_ids
    skips = request.params.skip_special_tokens
    detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=skips)
    logprobs: Sequence[Logprobs | None] = [None]  # nothing precedes the first token
    start = 0
    while start < len(token_ids):
        if start:
            if not turns.may_start:
                await turns.wait()
            logprobs = await _judged(token_ids, start, verifier, ledger, parent)
        end = start + len(logprobs)
        texts = [detokenizer.add(token_id) for token_id in token_ids[start:end]]
        if end == len(token_ids):
            texts[-1] += detokenizer.flush()
        yield client_wire.prompt_chunk(start, zip(token_ids[start:end], texts, logprobs, strict=True))
        ledger.switch(Stage.COORDINATOR)
        start = end


async def _judged(
    prompt: Sequence[int], start: int, verifier: Verifier, ledger: Ledger, parent: tracing.Span
) -> Sequence[Logprobs]:
    """Of the tokens from `start` on, as many as a pass takes."""
    token_ids = prompt[start : start + MAX_NUM_DRAFT_TOKENS]
    ledger.switch(Stage.VERIFY)
    try:
        verdict, cost = await verifier.verify(prompt[:start], Proposal(start, token_ids), parent)
    except ServiceUnavailableError:
        ledger.fail()
        raise
    ledger.settle(cost, Stage.EMIT)
    if NO_TOKEN in verdict.target_token_ids[: len(token_ids)]:
        raise InternalError("the target's logits are not finite")
    return verdict.logprobs[: len(token_ids)]
