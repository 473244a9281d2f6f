"""Proposals that have arrived, found by the tokens that they follow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from specwire.core import Proposal
from specwire.proposals import tree


class Prepared(NamedTuple):
    """A proposal that follows the committed tokens.

    Attributes:
        origin: what its keeper knows about it.
    """

    proposal: Proposal
    origin: Any


class _Arrived:
    """A proposal, and the path that it was prepared for, from the proposal's `base_len` on.

    Attributes:
        end_len: committed length at which the path is committed, in tokens.
        is_chain: whether no token of the proposal is followed by several.
        followed: the path, and a chain after it.
    """

    __slots__ = ("end_len", "followed", "is_chain", "origin", "path", "proposal")

    def __init__(self, path: Sequence[int], proposal: Proposal, origin: Any) -> None:
        self.path, self.proposal, self.origin = path, proposal, origin
        self.end_len = proposal.base_len + len(path)
        self.is_chain = not (proposal.parents or proposal.leaves)
        self.followed = [*path, *(proposal.token_ids if self.is_chain else ())]

    def rest(self, committed: Sequence[int]) -> Prepared:
        """The draft tokens that are not committed yet."""
        whole, base_len = self.proposal, len(committed)
        if self.end_len < base_len:
            left = tree.after(whole, committed[self.end_len :])
            assert left is not None  # it agrees
            whole = left
        if whole.base_len != base_len:  # `dataclasses.replace` takes five times as long
            others = whole.source, whole.parents, whole.support_len, whole.leaves
            whole = Proposal(base_len, whole.token_ids, whole.supports, *others)
        return Prepared(whole, self.origin)


class PreparedProposals:
    """Proposals that no round has used yet.

    Each is the path that it was prepared for, from some committed length on, then a chain or a tree. It is
    usable once the committed tokens have reached the end of the path, and for as long as they follow the
    proposal: a late one may contain tokens that are committed by now. Where tokens are matched, what is left
    of a chain is what the draft would propose there, since a draft token depends only on seed, position and
    the tokens before. Where they are sampled it depends on the chain's own base too: what is left is another
    draw from the same distribution, and as good, since no round has judged it (docs/exactness.md).
    """

    def __init__(self, most: int, most_entries: int | None = None) -> None:
        """Empty.

        Args:
            most: proposals that are kept; over it, the oldest ones are dropped.
            most_entries: of their supports together, likewise; None for no limit.
        """
        self._arrived: list[_Arrived] = []
        self._dropped: list[_Arrived] = []  # freed later: that takes longer than to find one
        self._most = most
        self._most_entries = most_entries

    def __bool__(self) -> bool:
        return bool(self._arrived)

    def add(self, path: Sequence[int], proposal: Proposal, origin: Any = None) -> None:
        """A proposal whose `base_len` is where the path begins."""
        self._dropped = []
        self._arrived.append(_Arrived(path, proposal, origin))
        if len(self._arrived) > self._most:
            del self._arrived[0]
        if proposal.supports and self._most_entries is not None:
            kept = [each.proposal for each in self._arrived]
            while sum(len(each.supports) * each.support_len for each in kept) > self._most_entries:
                del self._arrived[0], kept[0]

    def find(self, origin: Any, committed: Sequence[int]) -> Proposal | None:
        """What is left of the one with this origin; None if it does not follow the committed tokens.

        Keeps only those that do, or may do so later.
        """
        if not self._arrived:
            return None
        reached, ahead = self._agreeing(committed)
        self._arrived = reached + ahead
        known = (each for each in reached if each.origin == origin)
        return next((each.rest(committed).proposal for each in known), None)

    def take(self, committed: Sequence[int]) -> Prepared | None:
        """What is left of the last proposal that follows the committed tokens; None if there is none.

        The last is the one whose path reaches farthest, of several there the newest: how long a proposal is
        may depend on tokens that were not judged, which must not decide between two. Keeps only those whose
        path may still be committed.
        """
        if not self._arrived:
            return None
        self._dropped = self._arrived
        reached, self._arrived = self._agreeing(committed)
        if len(reached) > 1:
            reached.sort(key=attrgetter("end_len"))
        for each in reversed(reached):
            if (rest := each.rest(committed)).proposal.token_ids:
                return rest
        return None

    def _agreeing(self, committed: Sequence[int]) -> tuple[list[_Arrived], list[_Arrived]]:
        """Those that follow the committed tokens, and those that may do so later."""
        num_tokens = len(committed)
        reached: list[_Arrived] = []
        ahead: list[_Arrived] = []
        since: dict[int, list[int]] = {}
        for each in self._arrived:
            base_len = each.proposal.base_len
            tokens = since.get(base_len)
            if tokens is None:
                tokens = since[base_len] = list(committed[base_len:])
            # Most do not: they were prepared for other outcomes, which one comparison says.
            agrees = each.followed[: len(tokens)] == tokens
            if not agrees and not each.is_chain:
                num = len(each.path)  # then some of the tree after it may be committed
                agrees = each.followed == tokens[:num] and tree.after(each.proposal, tokens[num:]) is not None
            if agrees and base_len <= num_tokens:
                (reached if each.end_len <= num_tokens else ahead).append(each)
        return reached, ahead
