"""Counts over rounds, of one generation or of all. Pure.

What is counted is how often each kind of round occurred; all sums are made when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.generation import Round
from specwire.completion import SourceCounts, Speculation


class Tally:
    """Counts of rounds.

    Attributes:
        num_rounds: of any kind.
        num_prepared: whose proposal was there before it was requested.
        num_begun: that the target began by itself.
        num_cached_tokens: that the target found in its cache instead of running them.
        num_cut: committed tokens after the one that ended the generation.
        latest_reason: why the latest round without draft tokens had none, of those that tell.
    """

    def __init__(self) -> None:
        self.num_rounds = self.num_prepared = self.num_begun = self.num_cached_tokens = 0
        self.num_cut = 0
        self.latest_reason = ""
        # Rounds with draft tokens, by source, number of these, their depth, and how many were accepted.
        self._kinds: dict[tuple[str, int, int, int], int] = {}

    def add(self, done: Round) -> None:
        """Count one round."""
        self.num_rounds += 1
        self.num_cached_tokens += done.verify_cost.num_cached_tokens
        self.num_prepared += done.draft_cost.prepared
        self.num_begun += done.verify_cost.is_hit
        proposal = done.proposal
        if num_drafted := len(proposal.token_ids):
            kind = proposal.source, num_drafted, done.num_steps, len(done.outcome.path)
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
        elif done.why_plain:
            self.latest_reason = done.why_plain

    @property
    def num_drafts(self) -> int:
        """Rounds with draft tokens."""
        return sum(self._kinds.values())

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens verified."""
        return sum(num_drafted * count for (_, num_drafted, _, _), count in self._kinds.items())

    @property
    def num_accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(num_accepted * count for (_, _, _, num_accepted), count in self._kinds.items())

    @property
    def drafted_per_position(self) -> list[int]:
        """Rounds that had a draft token at a position; in a tree, at a depth."""
        return self._per_position((num_steps, count) for (_, _, num_steps, _), count in self._kinds.items())

    @property
    def accepted_per_position(self) -> list[int]:
        """Rounds that accepted the draft token at a position; in a tree, at a depth."""
        return self._per_position((accepted, count) for (_, _, _, accepted), count in self._kinds.items())

    def _per_position(self, rounds: Iterable[tuple[int, int]]) -> list[int]:
        """Of kinds of rounds by how many positions each had, and how many rounds there were."""
        counts = [0] * self._num_positions
        for num_positions, count in rounds:
            for position in range(num_positions):
                counts[position] += count
        return counts

    @property
    def by_source(self) -> dict[str, SourceCounts]:
        """Counts of the proposals of each source, in the order of their first."""
        found: dict[str, SourceCounts] = {}
        for (source, num_drafted, _, num_accepted), count in self._kinds.items():
            before = found.get(source) or SourceCounts(source=source)
            found[source] = before.plus(count * num_drafted, count * num_accepted, count)
        return found

    def speculation(self, draft_unavailable: str = "") -> Speculation:
        """The counts so far."""
        histogram = [0] * (self._num_positions + 1 if self._kinds else 0)
        for (_, _, _, num_accepted), count in self._kinds.items():
            histogram[num_accepted] += count
        return Speculation(
            num_rounds=self.num_rounds,
            num_tokens=self.num_rounds + self.num_accepted - self.num_cut,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted,
            acceptance_histogram=tuple(histogram),
            drafted_per_position=tuple(self.drafted_per_position),
            accepted_per_position=tuple(self.accepted_per_position),
            draft_unavailable=draft_unavailable,
            num_prepared=self.num_prepared,
            by_source=tuple(self.by_source.values()),
            why_plain=self.latest_reason if 2 * self.num_drafts < self.num_rounds else "",
        )

    @property
    def _num_positions(self) -> int:
        return max((num_steps for _, _, num_steps, _ in self._kinds), default=0)
