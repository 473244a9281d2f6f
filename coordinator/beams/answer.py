"""What a client sees of a beam search: at its end, the best text and all that were asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from coordinator.beams.followers import BeamDrafts
from coordinator.generation import Round
from coordinator.ledger import Ledger
from coordinator.requests import GenerationRequest
from coordinator.session import completed
from coordinator.tally import Tally
from coordinator.text import NUM_AT_ONCE, TextAssembler
from specwire.completion import Completion, FinishReason, Hypothesis
from specwire.core import Fate
from specwire.rpc.wire import client as client_wire
from specwire.rule.beam_search import Scored
from specwire.text.tokenizer import Tokenizer
from specwire.v1 import generation_pb2


@dataclass(kw_only=True)
class BeamAnswer:
    """The answer of one search; what a `Session` is to a generation.

    Attributes:
        totals: of all generations; its passes are counted there too.
    """

    request: GenerationRequest
    drafts: BeamDrafts
    tokenizer: Tokenizer | None
    ledger: Ledger
    totals: Tally
    _tally: Tally = field(init=False, default_factory=Tally)
    _hypotheses: tuple[Hypothesis, ...] = field(init=False, default=())

    @property
    def ended(self) -> bool:
        """Whether the search has."""
        return bool(self._hypotheses)

    def add(self, done: Round) -> None:
        """Count a round."""
        self._tally.add(done)
        self.totals.add(done)

    async def finish(self, found: Sequence[Scored]) -> generation_pb2.GenerateResponse:
        """The search has ended.

        Args:
            found: its texts, best score first.

        Returns:
            A chunk with the best one.
        """
        self.ledger.emit_first_token()
        pieces: list[list[str]] = []
        hypotheses = []
        for each in found[: self.request.params.num_return_sequences]:
            token_ids = each.beam.tokens()
            pieces.append(await self._text(token_ids))
            stops = token_ids[-1] in self.request.end_ids
            hypotheses.append(
                Hypothesis(
                    text="".join(pieces[-1]),
                    token_ids=tuple(token_ids),
                    score=float(each.score),
                    finish_reason=FinishReason.STOP if stops else FinishReason.LENGTH,
                    stop_reason=token_ids[-1] if stops else None,
                )
            )
        self._hypotheses = tuple(hypotheses)
        chunk = client_wire.OpenChunk(self.request.resume_info)
        # A resumed search begins again, with the same result.
        num_given = len(self.request.generated_token_ids)
        chunk.skip(num_given)
        best = zip(self._hypotheses[0].token_ids, pieces[0], strict=True)
        for token_id, text in islice(best, num_given, None):
            chunk.add(chunk.item(token_id, Fate.BONUS, "", None), text)
        return chunk.take(())

    def completion(self) -> Completion:
        """As of a `Session`; the token counts are those of all texts."""
        best = self._hypotheses[0] if self._hypotheses else None
        return completed(
            self.request,
            self._tally,
            self.ledger,
            self.drafts.unavailable,
            num_tokens=sum(len(each.token_ids) for each in self._hypotheses),
            finish_reason=best.finish_reason if best else FinishReason.LENGTH,
            stop_reason=best.stop_reason if best else None,
            hypotheses=self._hypotheses,
        )

    async def _text(self, token_ids: Sequence[int]) -> list[str]:
        """What each token adds to the text."""
        before = self.request.target.decoded(self.request.prompt_token_ids)
        skips = self.request.params.skip_special_tokens
        assembler = TextAssembler[None](self.tokenizer, before, (), skip_special_tokens=skips)
        ends = self.request.end_ids
        released: list[tuple[None, str]] = []
        for start in range(0, len(token_ids), NUM_AT_ONCE):
            await asyncio.sleep(0)
            for token_id in token_ids[start : start + NUM_AT_ONCE]:
                released += assembler.add(token_id, None, silent=token_id in ends)
        return [text for _, text in released + assembler.finish()]
