"""What an inner drafter knows of one stream, and the drafters that there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from draft_service.inner.pace import Look, Pace
from specwire.engine.jobs import TokenSequence


class Memory(Protocol):
    """What is kept of a stream's committed tokens."""

    @property
    def length(self) -> int:
        """Tokens that it holds."""

    def truncate(self, length: int) -> None:
        """Forget the tokens from there on."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end."""

    def release(self) -> None:
        """Free what it holds."""


class InnerStream:
    """One stream, all of whose jobs share it. Engine thread only.

    Attributes:
        memory: of the committed tokens; of a type that belongs to the drafter.
        pace: how many guesses its jobs run.
        is_closed: nothing is guessed any more.
    """

    def __init__(self, memory: Any, pace: Pace | None = None) -> None:
        self.memory = memory
        self.pace = pace or Pace()
        self.is_closed = False

    def commit(self, sequence: TokenSequence, base_len: int, length: int) -> None:
        """The sequence was rolled back to a base, and its tokens up to this length are committed.

        If it is not so, guesses are poor and nothing else is wrong: every one is compared.
        """
        self.memory.truncate(base_len)
        self.memory.extend(sequence.tokens[self.memory.length : length])

    def close(self) -> None:
        """Free its memory."""
        self.is_closed = True
        self.memory.release()


class Asked(Protocol):
    """A job that may be given guesses: `InnerJob`, as far as drafters know it."""

    inner: InnerStream
    sequence: TokenSequence
    vocab_limit: int

    @property
    def room(self) -> int: ...


class InnerDrafter(Protocol):
    """Guesses what the draft will draw next. Engine thread only.

    Attributes:
        guess_ns: measured time of one further guess of all jobs of a pass.
    """

    guess_ns: float

    def open(self) -> Memory:
        """For a new stream; any thread."""

    def look(self, job: Asked) -> Look | None:
        """What is known of the tokens that follow the job's, at no cost to speak of."""

    def guess(self, jobs: Sequence[Asked], looks: Sequence[Look], nums: Sequence[int]) -> list[Sequence[int]]:
        """At most so many tokens for each job.

        Raises:
            SpecwireError: it cannot guess now.
        """

    def close(self) -> None:
        """Free its device; nothing runs any more."""
