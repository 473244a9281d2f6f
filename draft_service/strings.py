"""Greedy drafts of another vocabulary: the draft writes in its own tokens, and its text is proposed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import NamedTuple

from draft_service.drafter import DraftJob
from draft_service.translation import Committed, OpenEnd
from draft_service.vocabulary import SharedVocabulary, Vocabulary
from specwire.core import Proposal
from specwire.engine.drawn import Drawn
from specwire.errors import InternalError
from specwire.support import IntArray


class _Written(NamedTuple):
    """One of the draft's tokens.

    Attributes:
        token_id: the likeliest of the target's tokens there.
        ranked: the likeliest ones, where they are known.
    """

    own_id: int
    token_id: int
    ranked: Sequence[int]


@dataclass(eq=False)
class StringJob(DraftJob):
    """Commit tokens, then decode `num_draft_tokens` of the draft's own, one forward pass each.

    The proposal is their text in the target's tokens, at most as many. Where tokens of both begin at the same
    byte, the draft's logits there say which others may follow.

    The first of the draft's tokens may replace the last committed one (`OpenEnd`): the first pass has the
    logits before that one, and after it. They are usually right as they are, and then no pass is lost.
    """

    _end: OpenEnd = field(init=False, default=OpenEnd(b"", None))
    _written: list[_Written] = field(init=False, default_factory=list)

    def start(self) -> None:
        super().start()
        if self._end.token_id is not None:
            self.num_rows = 2
            cache = self.sequence.cache
            cache.truncate(min(cache.length, len(self.sequence.tokens) - 2))

    def _commit(self, committed: Committed) -> None:
        num_kept, own_ids, self._end = committed.own_open(self.num_draft_tokens)
        last = [] if self._end.token_id is None else [self._end.token_id]
        self._keep(num_kept, own_ids + last)

    def free_rows(self) -> list[IntArray | None]:
        """See `DraftJob`: in the first pass, the tokens that begin with the open end."""
        if self._written or not self._end.text:
            return [None]
        limits: list[IntArray | None] = [self._shared.draft.beginning_with(self._end.text)]
        return [*limits, None] if self.num_rows == 2 else limits

    def add(self, drawn: Drawn, row: int) -> None:
        """Append the likeliest of the draft's tokens; unless it is the last, the next pass runs it."""
        sequence, last = self.sequence, row + self.num_rows - 1
        if drawn.token_ids[last] < 0:
            problem = InternalError("the draft's logits are not finite")
            self.result = self._proposal() if self._written else problem
            return
        own_id, ranked = drawn.own_ids[last], drawn.ranked[last] if drawn.ranked else ()
        if self.num_rows == 2:
            self.num_rows = 1
            if drawn.own_ids[row] == self._end.token_id:
                self._end = OpenEnd(b"", None)
            else:
                own_id = drawn.own_ids[row]
                sequence.tokens.pop()
                sequence.cache.truncate(len(sequence.tokens))
        elif not self._written and self._end.text:
            ranked = ()  # they follow the tokens before the open end
        self._written.append(_Written(own_id, drawn.token_ids[last], ranked))
        sequence.tokens.append(own_id)
        if self._ends_text(own_id) or len(self._written) == self.num_draft_tokens:
            self.result = self._proposal()

    @property
    def _shared(self) -> SharedVocabulary:
        assert self.committed is not None
        return self.committed.shared

    def _ends_text(self, own_id: int) -> bool:
        return self._shared.draft.texts[own_id] is None

    def _proposal(self) -> Proposal:
        first, last = self._written[0], self._written[-1]
        text = self._shared.draft.text_of(written.own_id for written in self._written)
        found = self._shared.target.encode(text[len(self._end.text) :], goes_on=True)
        if self._ends_text(last.own_id):
            found.append(last.token_id)
        known = takewhile(lambda token_id: not 0 < self.vocab_limit <= token_id, found)
        self.drafted = [*islice(known, self.num_draft_tokens)] or [first.token_id]
        self.candidates = [*self._candidates()] if self.num_candidates else []
        return Proposal(self.committed_len, self.drafted)

    def _candidates(self) -> Iterator[list[int]]:
        target, draft = self._shared.target, self._shared.draft
        own_starts = _starts(draft, [written.own_id for written in self._written])
        starts = (max(0, start - len(self._end.text)) for start in own_starts)
        written_at = dict(zip(starts, self._written, strict=True))
        for start, token_id in zip(_starts(target, self.drafted), self.drafted, strict=True):
            ranked = written_at[start].ranked if start in written_at else ()
            yield [other for other in ranked if other != token_id][: self.num_candidates]


def _starts(vocabulary: Vocabulary, token_ids: Sequence[int]) -> Iterator[int]:
    """Where each token begins in their text, in bytes."""
    start = 0
    for token_id in token_ids:
        yield start
        start += len(vocabulary.text_of([token_id]))
