"""Draft tokens after live beams: a chain or a tree after each, all of them asked for at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from coordinator.beams.followers import Followers, Rewindable, together
from coordinator.cost import Cost
from coordinator.generation import Drafter, Plan
from specwire.core import Proposal
from specwire.rule.beam_search import Beam
from specwire.telemetry import tracing


class Slot(Rewindable, Drafter, Protocol):
    """A sequence of the draft, such as `peers.drafter.RemoteDrafter`."""


class BeamDrafts:
    """The draft of one search: each live beam is followed by a sequence."""

    def __init__(self, sequences: Sequence[Slot], prompt: Sequence[int]) -> None:
        """Args:
        sequences: one for each beam; none for plain rounds.
        prompt: what all beams follow.
        """
        self._followers = Followers(sequences, prompt)
        self._prompt_len = len(prompt)

    @property
    def has_any(self) -> bool:
        """Whether there is a draft at all."""
        return bool(self._followers.sequences)

    @property
    def unavailable(self) -> str:
        """Why the draft was not there for a part of the search; empty if it always was."""
        return next(filter(None, (each.unavailable for each in self._followers.sequences)), "")

    async def propose(
        self, beams: Sequence[Beam], plan: Plan, parent: tracing.Span
    ) -> tuple[list[Proposal], Cost]:
        """A proposal after each live beam, and the cost of the one that took longest."""
        if not self.has_any or plan.num_draft_tokens <= 0:
            return [Proposal(self._prompt_len + beam.length) for beam in beams], Cost()
        taken: set[int] = set()
        calls = []
        for beam in beams:
            # A token is sent again: the draft would learn from tokens that continue its proposal, as if the
            # target had chosen them.
            sequence, committed = self._followers.moved_to(beam, taken, num_again=1)
            calls.append(sequence.propose(committed, plan, parent))
        answers = await together(calls)
        slowest = max((cost for _, cost in answers), key=lambda cost: cost.wall_ns)
        return [proposal for proposal, _ in answers], slowest

    def close(self) -> None:
        """Close all sequences."""
        self._followers.close()
