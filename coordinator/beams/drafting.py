"""Draft tokens after live beams: a chain or a tree after each, all of them asked for at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from coordinator.beams.followers import Followers, Rewindable, together
from coordinator.cost import Cost
from coordinator.generation import Plan
from specwire.core import Proposal
from specwire.rule.beam_search import Beam
from specwire.telemetry import tracing

_DEFAULT_TOKENS = 6
"""Draft tokens after each live beam, where the request fixes none."""
_DEFAULT_DEPTH = 3
_KEPT = 0.8
"""Weight of what was known of a kind of round, when another one is measured."""
_TRIED_FIRST = 2
_TRIED_EVERY = 24
"""Rounds between two of the kind that is slower."""


class Slot(Rewindable, Protocol):
    """A sequence of the draft, such as `peers.drafter.RemoteDrafter`."""

    @property
    def unavailable(self) -> str:
        """Why the draft was not there; empty if it always was."""
        ...

    async def propose(
        self, committed: Sequence[int], plan: Plan, parent: tracing.Span
    ) -> tuple[Proposal, Cost]:
        """Draft tokens after these."""
        ...


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
    def unavailable(self) -> str:
        """Why the draft was not there for a part of the search; empty if it always was."""
        return next(filter(None, (each.unavailable for each in self._followers.sequences)), "")

    async def propose(
        self, beams: Sequence[Beam], plan: Plan, parent: tracing.Span
    ) -> tuple[list[Proposal], Cost]:
        """A proposal after each live beam, and the cost of the one that took longest."""
        if not self._followers.sequences or plan.num_draft_tokens <= 0:
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


class BeamPlanner:
    """How much to draft after each live beam: nothing where rounds without a draft take less time a step.

    What a request or a server fixes is drafted in any case.
    """

    def __init__(self, num_draft_tokens: int | None, max_depth: int | None) -> None:
        """Args:
        num_draft_tokens: after each beam; None to choose.
        max_depth: of the tree of these; 0 for chains, None to choose.
        """
        self._is_fixed = num_draft_tokens is not None
        self._num_tokens = _DEFAULT_TOKENS if num_draft_tokens is None else num_draft_tokens
        depth = _DEFAULT_DEPTH if max_depth is None else max_depth
        self._max_depth = min(depth, self._num_tokens)
        if not self._max_depth and not self._is_fixed:
            self._num_tokens = _DEFAULT_DEPTH  # a chain
        self._step_ns: dict[bool, float] = {}
        self._num_rounds = dict.fromkeys((False, True), 0)
        self._since_trial = 0
        self._drafts = True

    def plan(self, num_beams: int, most: int, room: int) -> Plan:
        """For the next round.

        Args:
            num_beams: live ones.
            most: longest path of draft tokens.
            room: draft tokens of all beams.
        """
        self._drafts = self._num_tokens > 0 and (self._is_fixed or self._is_worth_it())
        num_tokens = min(self._num_tokens, room // num_beams)
        if not self._drafts or num_tokens <= 0 or most <= 0:
            self._drafts = False
            return Plan(0)
        if not self._max_depth:
            return Plan(min(num_tokens, most))
        return Plan(num_tokens, max_depth=min(self._max_depth, num_tokens, most))

    def observe(self, num_steps: int, elapsed_ns: int) -> None:
        """The planned round took so many steps, and so long."""
        kind, now = self._drafts, elapsed_ns / num_steps
        before = self._step_ns.get(kind)
        self._step_ns[kind] = now if before is None else _KEPT * before + (1 - _KEPT) * now
        self._num_rounds[kind] += 1

    def _is_worth_it(self) -> bool:
        for kind in (True, False):
            if self._num_rounds[kind] < _TRIED_FIRST:
                return kind
        faster = self._step_ns[True] <= self._step_ns[False]
        self._since_trial += 1
        if self._since_trial < _TRIED_EVERY:
            return faster
        self._since_trial = 0
        return not faster
