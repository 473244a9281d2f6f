"""Guesses that a grammar leaves no choice about: the target says them with each verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.drafts.own import Target
from coordinator.drafts.text import Guess

PRIOR = 0.5
"""Share of such tokens that the target spells alike, before it is measured. Of the embedded target, which has
seen little JSON."""


class Forced:
    """The text that must follow, as tokens, of which the target may choose others."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def guess(self, committed: Sequence[int], num_tokens: int) -> Guess | None:
        """See `text.Method`."""
        self._target.want(num_tokens, 0)
        found = self._target.drafted(committed)
        if found is None:
            return None
        token_ids = list(found.token_ids[:num_tokens])
        return Guess(token_ids, [1.0] * len(token_ids), 0, PRIOR)
