"""Proposals at hand, found by the tokens that they follow. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from specwire.core import Proposal


class PreparedProposals:
    """What the draft has proposed and nobody has used yet.

    Every proposal is a chain of tokens from some committed length on: the path that it was prepared for, then
    its draft tokens. It can be used as soon as the committed tokens have reached the end of the path, and for
    as long as they follow the chain: a draft that comes late may have guessed tokens that are committed by
    now. What is left of it is what the draft would propose there, since a draft token depends on seed,
    position and the tokens before alone.
    """

    def __init__(self) -> None:
        self._chains: list[tuple[Sequence[int], Proposal]] = []

    def add(self, path: Sequence[int], proposal: Proposal) -> None:
        """A proposal whose `base_len` is where the path begins."""
        self._chains.append((path, proposal))

    def take(self, committed: Sequence[int]) -> Proposal | None:
        """The longest proposal that follows the committed tokens; those that never will are dropped."""
        best: Proposal | None = None
        kept = []
        for path, proposal in self._chains:
            if proposal.base_len > len(committed):
                continue
            since = list(committed[proposal.base_len :])
            chain = [*path, *proposal.token_ids]
            if len(since) < len(path):
                if chain[: len(since)] == since:
                    kept.append((path, proposal))
            elif chain[: len(since)] == since:
                num_used = len(since) - len(path)
                left = Proposal(len(committed), chain[len(since) :], proposal.supports[num_used:])
                if left.token_ids and (best is None or len(left.token_ids) > len(best.token_ids)):
                    best = left
        self._chains = kept
        return best
