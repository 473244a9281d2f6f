"""Counts over rounds, of one generation or of all. Pure.

What is counted is how often each kind of round occurred; all sums are made when they are read.
"""

from __future__ import annotations

from coordinator.generation import Round
from specwire.completion import SourceCounts, Speculation


class Tally:
    """Counts of rounds.

    Attributes:
        num_rounds: of any kind.
        num_prepared: whose proposal was there before it was requested.
        num_begun: that the target began by itself.
        num_cached_tokens: that the target found in its cache instead of running them.
        num_cached_first: of the first round, those of the prompt; later ones are of a sequence that was
            opened again, after a pause or a loss, or of another beam.
        num_cut: committed tokens after the one that ended the generation.
        latest_reason: why the latest round without draft tokens had none, of those that tell.
    """

    def __init__(self) -> None:
        self.num_rounds = self.num_prepared = self.num_begun = self.num_cached_tokens = 0
        self.num_cut = self.num_cached_first = 0
        self.latest_reason = ""
        # Rounds with draft tokens, by source, number of these, their depth, and how many were accepted.
        self._kinds: dict[tuple[str, int, int, int], int] = {}

    def add(self, done: Round) -> None:
        """Count one round."""
        num_cached = done.verify_cost.num_cached_tokens
        if not self.num_rounds:
            self.num_cached_first = num_cached
        self.num_rounds += 1
        self.num_cached_tokens += num_cached
        self.num_prepared += done.draft_cost.prepared
        self.num_begun += done.verify_cost.is_hit
        proposal = done.proposal
        if num_drafted := len(proposal.token_ids):
            kind = proposal.source, num_drafted, done.num_steps, len(done.outcome.path)
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
        elif done.why_plain:
            self.latest_reason = done.why_plain

    def speculation(self, draft_unavailable: str = "") -> Speculation:
        """The counts so far; in a tree, a position is a depth."""
        num_positions = max((num_steps for _, _, num_steps, _ in self._kinds), default=0)
        drafted, accepted = [0] * num_positions, [0] * num_positions
        histogram = [0] * (num_positions + 1 if self._kinds else 0)
        by_source: dict[str, SourceCounts] = {}
        for (source, num_drafted, num_steps, num_accepted), count in self._kinds.items():
            for position in range(num_steps):
                drafted[position] += count
            for position in range(num_accepted):
                accepted[position] += count
            histogram[num_accepted] += count
            before = by_source.get(source) or SourceCounts(source=source)
            by_source[source] = before.plus(count * num_drafted, count * num_accepted, count)
        num_all_accepted = sum(each.num_accepted_tokens for each in by_source.values())
        return Speculation(
            num_rounds=self.num_rounds,
            num_tokens=self.num_rounds + num_all_accepted - self.num_cut,
            num_draft_tokens=sum(each.num_draft_tokens for each in by_source.values()),
            num_accepted_tokens=num_all_accepted,
            acceptance_histogram=tuple(histogram),
            drafted_per_position=tuple(drafted),
            accepted_per_position=tuple(accepted),
            draft_unavailable=draft_unavailable,
            num_prepared=self.num_prepared,
            by_source=tuple(by_source.values()),
            why_plain=self.latest_reason if 2 * sum(histogram) < self.num_rounds else "",
        )
