"""Sequences of a model service that follow the texts of a search, each the one that it knows most of."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from coordinator.beams.trees import common_ancestor
from specwire.rule.beam_search import Beam


class Rewindable(Protocol):
    """A sequence of a service, which commits tokens with each request."""

    def rewind(self, length: int) -> None:
        """What was committed from there on is not any more."""

    def close(self) -> None:
        """Release what it holds."""


Kind_co = TypeVar("Kind_co", bound=Rewindable, covariant=True)


class Follower(Generic[Kind_co]):
    """A sequence, and the text that it was asked about last.

    Attributes:
        beam: None before the first time.
    """

    def __init__(self, sequence: Kind_co) -> None:
        self.sequence = sequence
        self.beam: Beam | None = None

    def num_known(self, beam: Beam) -> int:
        """Tokens of a text that the service has; -1 if not even the prompt."""
        return -1 if self.beam is None else common_ancestor(self.beam, beam).length


class Followers(Generic[Kind_co]):
    """All sequences of a search at one service."""

    def __init__(self, sequences: Sequence[Kind_co], prompt: Sequence[int]) -> None:
        """Args:
        sequences: as many as texts are asked about at once, none of them open yet.
        prompt: what all texts follow.
        """
        self._followers = [Follower(sequence) for sequence in sequences]
        self._prompt = list(prompt)

    @property
    def sequences(self) -> list[Kind_co]:
        """All of them."""
        return [each.sequence for each in self._followers]

    def moved_to(self, beam: Beam, taken: set[int], num_again: int = 0) -> tuple[Kind_co, list[int]]:
        """The sequence that knows most of a text, rewound to what it knows.

        Args:
            taken: those that other texts have taken, by index; the one that is found is added.
            num_again: of the tokens that it knows, how many are sent again.

        Returns:
            The sequence, and the tokens to commit, the prompt's first.
        """
        free = (i for i in range(len(self._followers)) if i not in taken)
        best = max(free, key=lambda i: self._followers[i].num_known(beam))
        taken.add(best)
        follower = self._followers[best]
        num_known = follower.num_known(beam)
        if num_known >= 0:
            follower.sequence.rewind(len(self._prompt) + num_known - num_again)
        follower.beam = beam
        return follower.sequence, [*self._prompt, *beam.tokens()]

    def close(self) -> None:
        """Close all sequences."""
        for each in self._followers:
            each.sequence.close()


Answer = TypeVar("Answer")


async def together(calls: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """The answers of all calls; where one fails, the others are cancelled."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
