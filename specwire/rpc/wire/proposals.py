"""Proposals in columns, as nouns and back, and what makes them valid. No I/O.

One form on all wires: what a draft answers, what is sent ahead, what a target proposes by itself, and what
it is to judge. A proposal that is read here has been checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from specwire.core import MAX_NUM_DRAFT_TOKENS, MAX_PATH_LEN, Proposal, check_token_ids
from specwire.errors import InvalidRequestError
from specwire.proposals import chains, tree
from specwire.rpc.wire import columns
from specwire.support import NO_SUPPORT, FloatArray, IntArray, Support, certain
from specwire.v1 import common_pb2

NO_ID = 2**32 - 1
"""Padding of a support."""
SUM_TOLERANCE = 1e-3
"""Of a distribution: float32 probabilities of 150,000 tokens add up to 1 within 1e-4."""
_NO_IDS, _NO_PROBS = np.empty(0, "<u4"), np.empty(0, "<f4")


def to_proto(
    proposals: Sequence[Proposal], support_len: int | None = None, *, with_probs: bool = True
) -> common_pb2.Proposals:
    """One entry for each.

    Args:
        support_len: entries that each support is padded to, where the size must not depend on tokens; None
            for no padding.
        with_probs: of the supports.

    Raises:
        ValueError: a support has more entries.
    """
    laid_out = [chains.laid_out(each) for each in proposals]
    num_tokens = [len(token_ids) for token_ids, _ in laid_out]
    message = common_pb2.Proposals()
    parents = [() if each.leaves else each.parents for each in proposals]
    if any(parents):  # chains are spelt out beside trees
        filled = (own or range(-1, num - 1) for own, num in zip(parents, num_tokens, strict=True))
        message.parent_indices = columns.pack(filled, "<i1")
    columns.add_lists(message, "num_tokens", "token_ids", [token_ids for token_ids, _ in laid_out], "<i4")
    if any(each.leaves for each in proposals):
        message.num_chains.extend(len(each.leaves) or 1 for each in proposals)
    if any(own for _, own in laid_out):
        supports = [each for token_ids, own in laid_out for each in own or [NO_SUPPORT] * len(token_ids)]
        _add_supports(message, supports, support_len, with_probs=with_probs)
    return message


def _add_supports(
    message: common_pb2.Proposals, supports: Sequence[Support], support_len: int | None, *, with_probs: bool
) -> None:
    """One for each token; those of tokens that were matched stay empty."""
    lens = [len(each.token_ids) for each in supports]
    if support_len is not None and max(lens) > support_len:
        raise ValueError(f"a support of {max(lens)} entries, where all are padded to {support_len}")
    sent_lens = lens if support_len is None else [num and support_len for num in lens]
    ids, probs = np.full(sum(sent_lens), NO_ID, "<u4"), np.zeros(sum(sent_lens), "<f4")
    start = 0
    for support, num, sent_len in zip(supports, lens, sent_lens, strict=True):
        ids[start : start + num] = support.token_ids
        if with_probs:
            probs[start : start + num] = support.probs
        start += sent_len
    message.support_lens = columns.pack([sent_lens])
    message.support_token_ids = ids.tobytes()
    if with_probs:
        message.support_probs = probs.tobytes()


def from_proto(
    message: common_pb2.Proposals, base_lens: Sequence[int], vocab_size: int, source: str = ""
) -> list[Proposal]:
    """The proposals of a message, which the rule and the target can judge; `vocab_size` is the target's."""
    found = list[Proposal]()
    for each in each_from_proto(message, base_lens, vocab_size, source):
        if isinstance(each, InvalidRequestError):
            raise each
        found.append(each)
    return found


def each_from_proto(
    message: common_pb2.Proposals,
    base_lens: Sequence[int],
    vocab_size: int,
    source: str = "",
    *,
    with_probs: bool = True,
) -> list[Proposal | InvalidRequestError]:
    """As `from_proto`; what is wrong with a proposal takes its place, but for columns that do not fit.

    Args:
        with_probs: whether the probabilities of supports must have been sent.
    """
    num = len(base_lens)
    num_tokens, token_ids = columns.read_lists(message, num, "num_tokens", "token_ids", "<i4")
    parents: Sequence[Sequence[int]] = [()] * num
    if message.parent_indices:
        all_parents = columns.unpack("parent_indices", message.parent_indices, sum(num_tokens), "<i1")
        parents = columns.split(all_parents.tolist(), num_tokens)
    [num_chains] = columns.read(message, num, ["num_chains"], {"num_chains": 1})
    drawn = _TokenColumns.of(message, token_ids, with_probs=with_probs)
    try:
        drawn.check(vocab_size)
        is_sound = True
    except InvalidRequestError:
        is_sound = False  # one of them is not: each is checked by itself
    found, start = list[Proposal | InvalidRequestError](), 0
    for i, own_ids in enumerate(columns.split(token_ids.tolist(), num_tokens)):
        tokens = slice(start, start := start + len(own_ids))
        try:
            if not is_sound:
                drawn.within(tokens).check(vocab_size)
            own = drawn.supports(tokens) if drawn.sent_lens else ()
            support_len = max(drawn.sent_lens[tokens]) if own else 0
            proposal = Proposal(base_lens[i], own_ids, own, source, parents[i], support_len)
            found.append(_sound(proposal, num_chains[i]))
        except InvalidRequestError as error:
            found.append(error)
    return found


class _TokenColumns(NamedTuple):
    """Tokens, and what they were drawn from; padding is left out.

    Attributes:
        token_ids: int32 [num_tokens].
        sent_lens: [num_tokens], of each token's support, padding included; empty where all were matched.
        bounds: [num_tokens + 1], where each support begins in the columns below, and the end of the last one.
        ids: uint32, of all supports.
        probs: float32, for these; empty where they were not sent.
    """

    token_ids: IntArray
    sent_lens: Sequence[int]
    bounds: Sequence[int]
    ids: IntArray
    probs: FloatArray

    @classmethod
    def of(cls, message: common_pb2.Proposals, token_ids: IntArray, *, with_probs: bool) -> _TokenColumns:
        """All of a message, checked as columns."""
        if not (message.support_lens or message.support_token_ids or message.support_probs):
            return cls(token_ids, (), (0,), _NO_IDS, _NO_PROBS)
        num = len(token_ids) if message.support_lens else 0
        sent_lens = columns.unpack("support_lens", message.support_lens, num).astype(np.int64)
        ends = np.cumsum(sent_lens)
        num_sent = int(sent_lens.sum())
        ids = columns.unpack("support_token_ids", message.support_token_ids, num_sent)
        num_probs = num_sent if with_probs or message.support_probs else 0
        probs = columns.unpack("support_probs", message.support_probs, num_probs, "<f4")
        is_entry = ids != NO_ID
        if not is_entry.all():
            firsts = np.flatnonzero(is_entry[1:] & ~is_entry[:-1]) + 1  # entries after padding
            if not np.isin(firsts, ends).all():
                raise InvalidRequestError("support_token_ids", NO_ID, "comes before an id of its support")
            ends = np.cumsum(is_entry)[ends - 1] * (ends > 0)
            ids, probs = ids[is_entry], probs[is_entry] if num_probs else probs
        return cls(token_ids, sent_lens.tolist(), [0, *ends.tolist()], ids, probs)

    def within(self, tokens: slice) -> _TokenColumns:
        """Some of the tokens."""
        bounds = self.bounds[tokens.start : tokens.stop + 1] or [0]
        entries = slice(bounds[0], bounds[-1])
        bounds = [bound - bounds[0] for bound in bounds]
        ids, probs = self.ids[entries], self.probs[entries]
        return _TokenColumns(self.token_ids[tokens], self.sent_lens[tokens], bounds, ids, probs)

    def supports(self, tokens: slice) -> Sequence[Support]:
        """Of each of some tokens; copies, since a proposal that is kept must not keep all of its message.

        Without probabilities, a support of one token is certain of it.
        """
        sent_lens, bounds = self.sent_lens[tokens], self.bounds[tokens.start : tokens.stop + 1]
        if not any(sent_lens):
            return ()
        if not all(sent_lens):
            problem = f"must be over 0 for all {len(sent_lens)} tokens or for none"
            raise InvalidRequestError("support_lens", 0, problem)
        first, last = bounds[0], bounds[-1]
        ids, probs = self.ids[first:last].astype(np.int64), self.probs[first:last].copy()
        parts = [slice(start - first, end - first) for start, end in pairwise(bounds)]
        if len(probs):
            return [Support(ids[part], probs[part]) for part in parts]
        return [Support(own, probs) if len(own := ids[part]) > 1 else certain(own)[0] for part in parts]

    def check(self, vocab_size: int) -> None:
        """Refuse tokens and supports that the rule or the target could not judge."""
        check_token_ids("token_ids", self.token_ids, vocab_size)
        if not any(self.sent_lens):
            return
        check_token_ids("support_token_ids", self.ids, vocab_size)
        lens, is_missing = np.diff(self.bounds), np.array(self.sent_lens) > 0
        ordered = np.sort(np.repeat(np.arange(len(lens)) * vocab_size, lens) + self.ids)
        for key in ordered[1:][ordered[1:] == ordered[:-1]][:1].tolist():
            raise InvalidRequestError("support_token_ids", key % vocab_size, "is in a support twice")
        hits = np.flatnonzero(self.ids == np.repeat(self.token_ids, lens))
        is_missing[np.searchsorted(self.bounds, hits, side="right") - 1] = False
        for token_id in self.token_ids[is_missing][:1].tolist():
            raise InvalidRequestError("support_token_ids", token_id, "is missing where it was drawn from")
        if not len(self.probs):
            return
        if not (self.probs > 0).all():
            raise InvalidRequestError("support_probs", float(self.probs.min()), "must be positive numbers")
        starts = np.array(self.bounds[:-1])[lens > 0]
        sums = np.add.reduceat(self.probs, starts, dtype=np.float64)
        if not (np.abs(sums - 1) < SUM_TOLERANCE).all():
            raise InvalidRequestError("support_probs", sums.tolist(), "must add up to 1")


def _sound(proposal: Proposal, num_chains: int) -> Proposal:
    """As it is judged: several chains share nodes, and what is spelt out as a tree may be a chain."""
    num_tokens, has_supports = len(proposal.token_ids), bool(proposal.supports)
    may_be_several = has_supports and 1 <= num_chains <= MAX_NUM_DRAFT_TOKENS
    if num_chains != 1 and (not may_be_several or num_tokens % num_chains):
        raise InvalidRequestError("num_chains", num_chains, f"does not fit {num_tokens} tokens")
    if proposal.parents:
        proposal.parents = tree.checked_parents(proposal.parents, num_tokens)
        if proposal.parents and has_supports:
            raise InvalidRequestError("support_lens", proposal.support_len, "must be 0 for a tree")
    return _merged(proposal, num_chains) if num_chains > 1 else proposal


def _merged(proposal: Proposal, num_chains: int) -> Proposal:
    """Several chains as one proposal; tokens that follow the same tokens must have the same supports."""
    supports, length = proposal.supports, len(proposal.token_ids) // num_chains
    starts = range(0, len(supports), length)
    found = chains.merged(
        [proposal.token_ids[start : start + length] for start in starts],
        [supports[start : start + length] for start in starts],
        proposal.base_len,
        source=proposal.source,
        support_len=proposal.support_len,
    )
    for ours, theirs in zip(supports, chains.laid_out(found)[1], strict=True):
        if ours is not theirs and not (
            np.array_equal(ours.token_ids, theirs.token_ids) and np.array_equal(ours.probs, theirs.probs)
        ):
            raise InvalidRequestError("support_probs", num_chains, "differ after the same tokens")
    return found


def num_bytes(path: Sequence[int], proposal: Proposal, support_len: int) -> int:
    """About the size of a proposal ahead in a message, whose supports have so many entries."""
    return 32 + 4 * (len(path) + len(proposal.token_ids)) + 8 * support_len * len(proposal.supports)


def check_path(base_len: int, path: Sequence[int]) -> None:
    """Refuse a proposal that follows what no sequence has."""
    if base_len < 0:
        raise InvalidRequestError("base_lens", base_len, "must be at least 0")
    if len(path) > MAX_PATH_LEN:
        raise InvalidRequestError("path_lens", len(path), f"over {MAX_PATH_LEN} tokens")
