"""Counts over rounds, of one generation or of all. Pure."""

from __future__ import annotations

from coordinator.generation import Round
from specwire.completion import SourceCounts, Speculation


class Tally:
    """Counts of rounds.

    Attributes:
        num_rounds: of any kind.
        num_drafts: with draft tokens.
        num_prepared: whose proposal was there before it was requested.
        num_begun: that the target began by itself.
        num_draft_tokens, num_accepted: draft tokens verified, and accepted.
        num_cached_tokens: that the target found in its cache instead of running them.
        drafted_per_position, accepted_per_position: from position 0; in a tree, from depth 0.
        by_source: counts of the proposals of each source.
    """

    def __init__(self) -> None:
        self.num_rounds = self.num_drafts = self.num_prepared = self.num_begun = 0
        self.num_draft_tokens = self.num_accepted = self.num_cached_tokens = 0
        self.drafted_per_position: list[int] = []
        self.accepted_per_position: list[int] = []
        self.by_source: dict[str, SourceCounts] = {}
        self._histogram: list[int] = []

    def add(self, done: Round) -> None:
        """Count one round."""
        self.num_rounds += 1
        self.num_cached_tokens += done.verify_cost.num_cached_tokens
        self.num_prepared += done.draft_cost.prepared
        self.num_begun += done.verify_cost.is_hit
        self._count(done)

    def _count(self, done: Round) -> None:
        num_drafted, num_steps = len(done.proposal.token_ids), done.num_steps
        source, num_accepted = done.proposal.source, done.outcome.num_accepted
        if num_drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted += num_accepted
        _add_one(self.drafted_per_position, num_steps, num_steps)
        _add_one(self.accepted_per_position, num_accepted, num_steps)
        self._histogram.extend([0] * (num_steps + 1 - len(self._histogram)))
        self._histogram[num_accepted] += 1
        before = self.by_source.get(source) or SourceCounts(source=source)
        self.by_source[source] = before.plus(num_drafted, num_accepted)

    def speculation(self, draft_unavailable: str = "") -> Speculation:
        """The counts so far."""
        return Speculation(
            num_rounds=self.num_rounds,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted,
            acceptance_histogram=tuple(self._histogram),
            drafted_per_position=tuple(self.drafted_per_position),
            accepted_per_position=tuple(self.accepted_per_position),
            draft_unavailable=draft_unavailable,
            num_prepared=self.num_prepared,
            by_source=tuple(self.by_source.values()),
        )


def _add_one(counts: list[int], num_positions: int, length: int) -> None:
    """To the first positions, of a list that gets at least this length."""
    counts.extend([0] * (length - len(counts)))
    for i in range(num_positions):
        counts[i] += 1
