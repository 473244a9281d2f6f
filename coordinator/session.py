"""One generation as its client sees it: text, stop conditions, counts. Knows no grpc."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from coordinator.credit import Credit
from coordinator.generation import Generation, Round
from coordinator.ledger import Ledger
from coordinator.requests import GenerationRequest
from coordinator.tally import Tally
from coordinator.text import TextAssembler
from specwire.completion import Chunk, Completion, DraftTree, FinishReason, Token, Usage
from specwire.core import Fate, Logprobs, Rule
from specwire.errors import InvalidRequestError
from specwire.tokenizer import Tokenizer


class Session:
    """Turns the rounds of a generation into chunks, and ends it at the first stop condition.

    It spends the client's credit, which the generation waits for between rounds: a round is always whole, and
    its length does not depend on how fast the client reads.

    Tokens that an earlier stream generated pass through the same text machinery without being sent: a stop
    string or a character may span the resume point.

    Raises:
        InvalidRequestError: generated tokens follow the end of the generation.
    """

    def __init__(
        self,
        request: GenerationRequest,
        generation: Generation,
        *,
        tokenizer: Tokenizer | None,
        credit: Credit,
        ledger: Ledger,
        totals: Tally,
    ) -> None:
        """Args:
        totals: of all generations; its rounds are counted there too, as they end.
        """
        params, eos_token_ids = request.params, request.target.eos_token_ids
        self._request = request
        self._generation = generation
        self._tokenizer = tokenizer
        self._credit = credit
        self._ledger = ledger
        self._end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self._text = TextAssembler(tokenizer, request.prompt_token_ids, params.stop)
        self._released: list[Token] = []
        self._num_emitted = 0
        self._stop_reason: str | int | None = None
        self._tally, self._totals = Tally(), totals
        self._replay(request.generated_token_ids)

    @property
    def ended(self) -> bool:
        """Whether it has reached a stop condition."""
        return self._stop_reason is not None or self._num_emitted == self._request.params.max_tokens

    async def chunks(self) -> AsyncIterator[Chunk]:
        """One chunk a round; each emitted token exactly once, in order, as soon as its text is certain.

        Raises:
            SpecwireError: why the generation failed; an invalid acknowledgement is one reason.
        """
        if self.ended:  # by the tokens of an earlier stream
            return
        async for done in self._generation.rounds():
            self._ledger.emit_first_token()
            self._tally.add(done)
            self._totals.add(done)
            num_before = self._num_emitted
            tokens = self._process_round(done)
            if self.ended:
                tokens += self._text.finish()
            self._credit.spend(num_emitted=len(done.emitted), num_sent=len(tokens))
            yield self._chunk(tokens, done, self._text.waiting(self._num_emitted - num_before))
            if self.ended:
                return

    def _replay(self, token_ids: Sequence[int]) -> None:
        """Process the tokens of an earlier stream, which sent those whose text was certain."""
        for i, token_id in enumerate(token_ids):
            if self.ended:
                name = f"generated_token_ids[{i}]"
                raise InvalidRequestError(name, token_id, "comes after the end of the generation")
            self._released += self._process(Token(token_id=token_id, text="", fate=Fate.GIVEN))
        if self.ended:
            self._released += self._text.finish()
        self._credit.spend(num_emitted=len(token_ids) - len(self._released), num_sent=0)

    def completion(self, draft_unavailable: str) -> Completion:
        """The generation so far; at its end, what the last message of the stream says."""
        params, target = self._request.params, self._request.target
        stopped = self._stop_reason is not None
        return Completion(
            text="".join(token.text for token in self._released),
            token_ids=tuple(token.token_id for token in self._released),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            usage=Usage(
                prompt_tokens=self._request.prompt_len,
                completion_tokens=len(self._released),
                cached_tokens=self._tally.num_cached_tokens,
            ),
            speculation=self._tally.speculation(draft_unavailable),
            timing=self._ledger.timing(),
            stop_reason=self._stop_reason,
            seed=params.seed or 0,
            rule=params.rule or Rule.REJECTION,
            model=target.name,
            tokens=tuple(self._released),
            reproducible=params.matches_tokens and target.batch_invariant,
        )

    def _process_round(self, done: Round) -> list[Token]:
        """Process the round's tokens up to the one that ends the generation; returns those whose text is
        certain."""
        certain: list[Token] = []
        logprobs: Sequence[Logprobs | None] = done.logprobs or [None] * len(done.emitted)
        for (token_id, fate), entry in zip(done.emitted, logprobs, strict=True):
            source = done.proposal.source if fate is Fate.ACCEPTED else ""
            certain += self._process(_token(token_id, fate, source, entry))
            if self._stop_reason is not None:
                break
        return certain

    def _process(self, token: Token) -> list[Token]:
        """Process a token; returns those whose text is certain now."""
        ends = token.token_id in self._end_ids
        self._num_emitted += 1
        certain = self._text.add(token, silent=ends)
        if self._text.stopped_by is not None:
            self._stop_reason = self._text.stopped_by
        elif ends:
            self._stop_reason = token.token_id
        return certain

    def _chunk(self, tokens: list[Token], done: Round, held: list[Token]) -> Chunk:
        first_index = len(self._released)
        self._released += tokens
        chunk = Chunk(
            text="".join(token.text for token in tokens),
            tokens=tuple(tokens),
            rejected=tuple(
                Token(
                    token_id=token_id,
                    text=self._decode(token_id),
                    fate=Fate.REJECTED,
                    source=done.proposal.source,
                )
                for token_id in done.rejected
            ),
            first_index=first_index,
            held=tuple(held),
        )
        if not self._request.report_progress:
            return chunk
        return replace(
            chunk,
            speculation=self._tally.speculation(),
            timing=self._ledger.timing(),
            tree=self._tree(done),
        )

    def _tree(self, done: Round) -> DraftTree:
        proposal = done.proposal
        return DraftTree(
            source=proposal.source,
            token_ids=tuple(proposal.token_ids),
            texts=tuple(map(self._decode, proposal.token_ids)),
            parents=tuple(proposal.parents),
            path=tuple(done.outcome.path),
        )

    def _decode(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id]) if self._tokenizer else ""


def _token(token_id: int, fate: Fate, source: str, logprobs: Logprobs | None) -> Token:
    if logprobs is None:
        return Token(token_id=token_id, text="", fate=fate, source=source)
    return Token(
        token_id=token_id,
        text="",
        fate=fate,
        source=source,
        logprob=logprobs.of(token_id),
        top_logprobs=tuple(logprobs.top()),
    )
