"""Sequences of a model service that follow the texts of a search, each the one that it knows most of.

Draft tokens after live beams are asked for all at once: a chain or a tree after each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

from coordinator.beams.trees import common_ancestor
from coordinator.cost import Cost
from coordinator.generation import Plan
from coordinator.peers.drafter import RemoteDrafter
from coordinator.peers.verifier import RemoteVerifier
from specwire.core import Proposal
from specwire.rule.beam_search import Beam
from specwire.telemetry import tracing

Follower = TypeVar("Follower", RemoteDrafter, RemoteVerifier)


class Followers(Generic[Follower]):
    """All sequences of a search at one service.

    Attributes:
        sequences: all of them.
    """

    def __init__(self, sequences: Sequence[Follower], prompt: Sequence[int]) -> None:
        """Args:
        sequences: as many as texts are asked about at once, none of them open yet; none without a draft.
        prompt: what all texts follow.
        """
        self.sequences: Sequence[Follower] = sequences
        self._beams: list[Beam | None] = [None] * len(sequences)  # that each was asked about last
        self._prompt = list(prompt)

    def moved_to(self, beam: Beam, taken: set[int], num_again: int = 0) -> tuple[Follower, list[int]]:
        """The sequence that knows most of a text, rewound to what it knows.

        Args:
            taken: those that other texts have taken, by index; the one that is found is added.
            num_again: of the tokens that it knows, how many are sent again.

        Returns:
            The sequence, and the tokens to commit, the prompt's first.
        """
        num_known = {  # -1 if not even the prompt
            i: -1 if last is None else common_ancestor(last, beam).length
            for i, last in enumerate(self._beams)
            if i not in taken
        }
        best = max(num_known, key=num_known.__getitem__)
        taken.add(best)
        if num_known[best] >= 0:
            self.sequences[best].rewind(len(self._prompt) + num_known[best] - num_again)
        self._beams[best] = beam
        return self.sequences[best], [*self._prompt, *beam.tokens()]

    def close(self) -> None:
        """Close all sequences."""
        for each in self.sequences:
            each.close()


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


class BeamDrafts(Followers[RemoteDrafter]):
    """The draft of one search: each live beam is followed by a sequence."""

    @property
    def unavailable(self) -> str:
        """Why the draft was not there for a part of the search; empty if it always was."""
        return next(filter(None, (each.unavailable for each in self.sequences)), "")

    async def propose(
        self, beams: Sequence[Beam], plan: Plan, parent: tracing.Span
    ) -> tuple[list[Proposal], Cost]:
        """A proposal after each live beam, and the cost of the one that took longest."""
        if not self.sequences or plan.num_draft_tokens <= 0:
            return [Proposal(len(self._prompt) + beam.length) for beam in beams], Cost()
        taken: set[int] = set()
        calls = []
        for beam in beams:
            # A token is sent again: the draft would learn from tokens that continue its proposal, as if the
            # target had chosen them.
            sequence, committed = self.moved_to(beam, taken, num_again=1)
            calls.append(sequence.propose(committed, plan, parent))
        answers = await together(calls)
        slowest = max((cost for _, cost in answers), key=lambda cost: cost.wall_ns)
        return [proposal for proposal, _ in answers], slowest
