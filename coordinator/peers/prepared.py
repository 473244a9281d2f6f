"""Proposals that have arrived, found by the tokens that they follow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from specwire import tree
from specwire.core import Proposal


@dataclass(frozen=True, slots=True)
class Origin:
    """How a proposal was made, for the ledger; empty for the answer to a request.

    Attributes:
        forward_ns: the passes that made it.
        last_request_id: the last request that had arrived at the draft when it was sent.
        request_age_ns: the age of that request then.
        traceparent: of the span of its preparation; empty if there is none.
    """

    forward_ns: int = 0
    last_request_id: int = 0
    request_age_ns: int = 0
    traceparent: str = ""


class Prepared(NamedTuple):
    """A proposal that follows the committed tokens, and how it was made."""

    proposal: Proposal
    origin: Origin


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A proposal, and the path that it was prepared for.

    Attributes:
        base_len: committed length that the path extends, in tokens.
        path: the tokens between the committed ones and the proposal.
        proposal: what follows them.
        origin: how it was made.
    """

    base_len: int
    path: Sequence[int]
    proposal: Proposal
    origin: Origin

    def agrees(self, committed: Sequence[int]) -> bool:
        """Whether all tokens committed since `base_len` are on the path, or in the proposal after it."""
        since = list(committed[self.base_len :])
        if self.base_len > len(committed) or since[: len(self.path)] != list(self.path[: len(since)]):
            return False
        return tree.after(self.proposal, since[len(self.path) :]) is not None

    def is_reached(self, committed: Sequence[int]) -> bool:
        """Whether its path is committed."""
        return len(committed) >= self.base_len + len(self.path)

    def rest(self, committed: Sequence[int]) -> Prepared:
        """The draft tokens that are not committed yet."""
        left = tree.after(self.proposal, committed[self.base_len + len(self.path) :])
        assert left is not None  # it agrees
        return Prepared(replace(left, base_len=len(committed)), self.origin)


class PreparedProposals:
    """Proposals of the draft that no round has used yet.

    Each is the path that it was prepared for, from some committed length on, then a chain or a tree. It is
    usable once the committed tokens have reached the end of the path, and for as long as they follow the
    proposal: a late one may contain tokens that are committed by now. What is left of a chain is what the
    draft would propose there, since a draft token depends only on seed, position and the tokens before.
    Under block verification it depends on the chain's own base too: what is left is another draw from
    the same distribution, and as good, since no round has judged it (docs/exactness.md).
    """

    def __init__(self) -> None:
        self._arrived: list[_Arrived] = []

    def add(self, path: Sequence[int], proposal: Proposal, origin: Origin = Origin()) -> None:
        """A proposal whose `base_len` is where the path begins."""
        self._arrived.append(_Arrived(proposal.base_len, path, proposal, origin))

    def take(self, committed: Sequence[int]) -> Prepared | None:
        """The longest proposal that follows the committed tokens; None if there is none.

        Keeps only those whose path may still be committed.
        """
        agreeing = [each for each in self._arrived if each.agrees(committed)]
        self._arrived = [each for each in agreeing if not each.is_reached(committed)]
        usable = [each.rest(committed) for each in agreeing if each.is_reached(committed)]
        longest = max(usable, key=lambda prepared: len(prepared.proposal.token_ids), default=None)
        return longest if longest and longest.proposal.token_ids else None
