"""Proposals that have arrived, found by the tokens that they follow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specwire.core import Proposal, Support


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
class _Chain:
    """A path and the draft tokens after it.

    Attributes:
        base_len: committed length that it extends, in tokens.
        path_len: how many of its tokens are the path.
        token_ids: path and draft tokens.
        supports: of the draft tokens; empty where tokens are matched.
        origin: how it was made.
    """

    base_len: int
    path_len: int
    token_ids: list[int]
    supports: Sequence[Support]
    origin: Origin

    def agrees(self, committed: Sequence[int]) -> bool:
        """Whether all tokens committed since `base_len` are on the chain."""
        since = list(committed[self.base_len :])
        return self.base_len <= len(committed) and self.token_ids[: len(since)] == since

    def is_reached(self, committed: Sequence[int]) -> bool:
        """Whether its path is committed."""
        return len(committed) >= self.base_len + self.path_len

    def rest(self, committed: Sequence[int]) -> Prepared:
        """The draft tokens that are not committed yet."""
        num_since = len(committed) - self.base_len
        supports = self.supports[num_since - self.path_len :]
        return Prepared(Proposal(len(committed), self.token_ids[num_since:], supports), self.origin)


class PreparedProposals:
    """Proposals of the draft that no round has used yet.

    Each is a chain of tokens from some committed length on: the path that it was prepared for, then its draft
    tokens. It is usable once the committed tokens have reached the end of the path, and for as long as they
    follow the chain: a late proposal may contain tokens that are committed by now. What is left of it is what
    the draft would propose there, since a draft token depends only on seed, position and the tokens before.
    Under block verification it depends on the chain's own base too: what is left is another draw from
    the same distribution, and as good, since no round has judged it (docs/exactness.md).
    """

    def __init__(self) -> None:
        self._chains: list[_Chain] = []

    def add(self, path: Sequence[int], proposal: Proposal, origin: Origin = Origin()) -> None:
        """A proposal whose `base_len` is where the path begins."""
        token_ids = [*path, *proposal.token_ids]
        self._chains.append(_Chain(proposal.base_len, len(path), token_ids, proposal.supports, origin))

    def take(self, committed: Sequence[int]) -> Prepared | None:
        """The longest proposal that follows the committed tokens; None if there is none.

        Keeps only those whose path may still be committed.
        """
        agreeing = [chain for chain in self._chains if chain.agrees(committed)]
        self._chains = [chain for chain in agreeing if not chain.is_reached(committed)]
        usable = [chain.rest(committed) for chain in agreeing if chain.is_reached(committed)]
        longest = max(usable, key=lambda prepared: len(prepared.proposal.token_ids), default=None)
        return longest if longest and longest.proposal.token_ids else None
