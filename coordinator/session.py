"""One generation as its client sees it: text, stop conditions, counts. Knows no grpc."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.credit import Credit
from coordinator.generation import Drafter, Round
from coordinator.ledger import Ledger
from coordinator.requests import GenerationRequest
from coordinator.tally import Tally
from coordinator.text import NUM_AT_ONCE, TextAssembler
from specwire.completion import Completion, DraftTree, FinishReason, Usage
from specwire.core import Fate, Rule
from specwire.errors import InvalidRequestError
from specwire.rpc.wire import client as client_wire
from specwire.text.tokenizer import Tokenizer
from specwire.v1 import generation_pb2

_Item = dict[str, Any]
"""A token without its text, see `OpenChunk.item`."""


@dataclass(kw_only=True)
class Session:
    """Turns the rounds of a generation into chunks, and ends it at the first stop condition.

    It spends the client's credit, which the generation waits for between rounds: a round is always whole, and
    its length does not depend on how fast the client reads.

    Tokens that an earlier stream generated pass through the same text machinery without being sent: a stop
    string or a character may span the resume point. `replay` does that before the first round.

    Attributes:
        totals: of all generations; its rounds are counted there too, as they end.
    """

    request: GenerationRequest
    drafter: Drafter
    tokenizer: Tokenizer | None
    credit: Credit
    ledger: Ledger
    totals: Tally

    def __post_init__(self) -> None:
        request, params = self.request, self.request.params
        self._end_ids = request.end_ids
        before = request.target.decoded(request.prompt_token_ids)
        self._text = TextAssembler[_Item](
            self.tokenizer,
            before,
            params.stop,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._chunk = client_wire.OpenChunk(request.resume_info)
        self._has_stop_strings = bool(params.stop)
        self._max_tokens = params.max_tokens or 0
        self._rounds: list[Round] = []
        self._latest: Round | None = None
        self._num_emitted = self._num_given = self._num_taken = 0
        self._stop_reason: str | int | None = None
        self._tally = Tally()

    @property
    def ended(self) -> bool:
        """Whether it has reached a stop condition."""
        return self._stop_reason is not None or self._num_emitted == self.request.params.max_tokens

    def add(self, done: Round) -> None:
        """The next round. Where it cannot end the generation, its text is left to `take`."""
        if self._num_emitted == self._num_given:
            self.ledger.emit_first_token()
        token_ids = done.token_ids
        self._num_emitted += len(token_ids)
        self.credit.spend(num_emitted=len(token_ids), num_sent=len(token_ids))
        self._rounds.append(done)
        is_last = self._num_emitted >= self._max_tokens or not self._end_ids.isdisjoint(token_ids)
        if is_last or self._has_stop_strings:
            self._assemble()

    def take(self) -> generation_pb2.GenerateResponse:
        """What was generated since the last call of this: a chunk of at least one round.

        Each emitted token is in exactly one chunk, in order, as soon as its text is certain.
        """
        self._assemble()
        held = self._text.waiting(self._num_emitted - self._num_taken)
        self._num_taken = self._num_emitted
        if not self.request.report_progress or self._latest is None:
            return self._chunk.take(held)
        drafted = self._latest.proposal
        tree = DraftTree(
            source=drafted.source,
            token_ids=tuple(drafted.token_ids),
            texts=tuple(map(self._decode, drafted.token_ids)),
            parents=tuple(drafted.parents),
            path=tuple(self._latest.outcome.path),
        )
        return self._chunk.take(held, self._tally.speculation(), self.ledger.timing(), tree)

    async def replay(self) -> None:
        """Process the tokens of an earlier stream, which sent those whose text was certain.

        Raises:
            InvalidRequestError: some follow the end of the generation.
        """
        token_ids: Sequence[int] = self.request.generated_token_ids
        num_released = 0
        for i, token_id in enumerate(token_ids):
            if i % NUM_AT_ONCE == NUM_AT_ONCE - 1:
                await asyncio.sleep(0)
            if self.ended:
                name = f"generated_token_ids[{i}]"
                raise InvalidRequestError(name, token_id, "comes after the end of the generation")
            item = self._chunk.item(token_id, Fate.GIVEN, "", None)
            self._num_emitted += 1
            num_released += len(self._process(token_id, item))
        if self.ended:
            num_released += len(self._finish())
        self._chunk.skip(num_released)
        self._num_given = self._num_taken = self._num_emitted
        self.credit.spend(num_emitted=len(token_ids) - num_released, num_sent=0)

    def completion(self) -> Completion:
        """The generation so far; at its end, what the last message of the stream says."""
        stopped = self._stop_reason is not None
        return completed(
            self.request,
            self._tally,
            self.ledger,
            self.drafter.unavailable,
            num_tokens=self._chunk.num_tokens,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            stop_reason=self._stop_reason,
        )

    def _assemble(self) -> None:
        """The text of the rounds that wait for theirs."""
        num_before, num_emitted = self._chunk.num_tokens, 0
        for done in self._rounds:
            num_emitted += len(done.token_ids)
            self._tally.add(done)
            self.totals.add(done)
            self._add_tokens(done)
            for token_id in done.rejected:
                self._chunk.reject(token_id, done.proposal.source, self._decode(token_id))
            self._latest = done
        self._rounds.clear()
        if self.ended:
            for item, text in self._finish():
                self._chunk.add(item, text)
        self.credit.spend(num_sent=self._chunk.num_tokens - num_before - num_emitted)

    def _add_tokens(self, done: Round) -> None:
        """Add a round's tokens, up to the one that ends the generation, as far as their text is certain."""
        last_fate, chunk, source, logprobs = done.last_fate, self._chunk, done.proposal.source, done.logprobs
        token_ids = done.token_ids
        if self.tokenizer is None and not logprobs and self._end_ids.isdisjoint(token_ids):
            chunk.add_round(token_ids, last_fate, source)
            return
        last = len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            fate, by = (Fate.ACCEPTED, source) if i < last else (last_fate, "")
            item = chunk.item(token_id, fate, by, logprobs[i] if logprobs else None)
            for each, text in self._process(token_id, item):
                chunk.add(each, text)
            if self._stop_reason is not None:
                self._num_emitted -= last - i
                self._tally.num_cut += last - i
                break

    def _process(self, token_id: int, item: _Item) -> list[tuple[_Item, str]]:
        """Process a token; returns those whose text is certain now."""
        ends = token_id in self._end_ids
        certain = self._text.add(token_id, item, silent=ends)
        if self._text.stopped_by is not None:
            self._stop_reason = self._text.stopped_by
        elif ends:
            self._stop_reason = token_id
        return certain

    def _finish(self) -> list[tuple[_Item, str]]:
        """What is certain at the end; an incomplete character may complete a stop string."""
        certain = self._text.finish()
        if self._stop_reason is None:
            self._stop_reason = self._text.stopped_by
        return certain

    def _decode(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id]) if self.tokenizer else ""


def completed(
    request: GenerationRequest,
    tally: Tally,
    ledger: Ledger,
    draft_unavailable: str,
    *,
    num_tokens: int,
    **ended: Any,
) -> Completion:
    """A generation as its last message says it; the chunks have the tokens and their text.

    Args:
        num_tokens: of the output.
        ended: the fields of `Completion` about its end.
    """
    return Completion(
        text="",
        token_ids=(),
        usage=Usage(
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=num_tokens,
            cached_tokens=min(tally.num_cached_first, request.num_prompt_tokens),
        ),
        speculation=tally.speculation(draft_unavailable),
        timing=ledger.timing(),
        seed=request.params.seed or 0,
        rule=request.params.rule or Rule.REJECTION,
        model=request.target.name,
        reproducible=not request.why_not_reproducible,
        why_not_reproducible=request.why_not_reproducible,
        **ended,
    )
