"""A chain of draft tokens, several of which are decoded in one pass where an inner drafter guessed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from draft_service.drafter import DraftJob
from draft_service.inner.pace import Pace
from specwire.engine.drawn import Drawn
from specwire.engine.jobs import TokenSequence

if TYPE_CHECKING:
    from draft_service.inner.hierarchy import InnerDrafter


class InnerStream:
    """What an inner drafter knows of one stream, all of whose jobs share it. Engine thread only.

    Attributes:
        memory: of the committed tokens; of a type that belongs to the drafter.
        pace: how many guesses its jobs run.
        is_closed: nothing is guessed any more.
    """

    def __init__(self, drafter: InnerDrafter, pace: Pace | None = None) -> None:
        self._drafter = drafter
        self.memory = drafter.open()
        self.pace = pace or Pace()
        self.is_closed = False

    def commit(self, sequence: TokenSequence, base_len: int, length: int) -> None:
        """See `InnerDrafter`; the tokens are those of the sequence."""
        self._drafter.commit(self.memory, base_len, sequence.tokens, length)

    def close(self) -> None:
        self.is_closed = True
        self._drafter.release(self.memory)


@dataclass(eq=False)
class InnerJob(DraftJob):
    """Before each pass the sequence may be given guesses of the tokens that the pass will draw.

        tokens  ├── committed ──┤├─ drafted ─┤├─ guessed ─┤
        rows                               └──────────────┘     a token is drawn after each of these

    Every token is drawn as `DraftJob` draws it, with the same noise at the same position. A guess is kept if
    it equals the token drawn in its place; what follows the first one that does not is dropped. So for any
    guesses the proposal and its candidates are those of `DraftJob`, up to the rounding of a pass of another
    width, and only the number of passes differs. That number tells about the drafted tokens, so such jobs
    are for rules that match tokens: see "Time and tokens" in docs/exactness.md.

    Attributes:
        inner: what the inner drafter knows of the stream.
        is_open: it may be given guesses before its next pass.
        num_guessed: guesses at the end of the sequence.
        kind: of these guesses, see `Guess`.
    """

    inner: InnerStream = field(kw_only=True)
    is_open: bool = field(init=False, default=False)
    num_guessed: int = field(init=False, default=0)
    kind: int = field(init=False, default=0)

    def start(self) -> None:
        super().start()
        self.is_open = self.room > 0

    @property
    def room(self) -> int:
        """Most guesses that the next pass has a use for: it draws one token more."""
        return self.num_draft_tokens - len(self.drafted) - 1

    def run_also(self, kind: int, token_ids: Sequence[int]) -> None:
        """Guesses for the next pass, at most `room`."""
        self.sequence.tokens += token_ids
        self.kind, self.num_guessed, self.num_rows = kind, len(token_ids), 1 + len(token_ids)

    @property
    def position(self) -> int:
        """Of the first token that is drawn; wrong guesses are before those that are dropped."""
        return len(self.sequence.tokens) - self.num_guessed

    def add(self, drawn: Drawn, row: int) -> None:
        """Append the drawn tokens up to the first that differs from its guess, that one included."""
        sequence, start = self.sequence, self.position
        guessed = sequence.tokens[start:]
        del sequence.tokens[start:]
        self.num_rows, self.num_guessed = 1, 0
        num_right = 0
        for i in range(len(guessed) + 1):
            super().add(drawn, row + i)
            if i == len(guessed) or sequence.tokens[-1] != guessed[i]:
                break
            num_right += 1
        sequence.cache.truncate(min(sequence.cache.length, len(sequence.tokens) - 1))
        self.is_open = self.result is None and self.room > 0
        if guessed:
            self.inner.pace.add(self.kind, num_right, len(guessed))
