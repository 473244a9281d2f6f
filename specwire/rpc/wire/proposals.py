"""Proposals in columns, as nouns and back, and what makes them valid. No I/O.

One form on all wires: what a draft answers, what is sent ahead, what a target proposes by itself, and what
it is to judge. A proposal that is read here has been checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specwire.core import MAX_NUM_DRAFT_TOKENS, MAX_PATH_LEN, Proposal, check_token_ids
from specwire.errors import InvalidRequestError
from specwire.proposals import chains, tree
from specwire.rpc.wire import columns
from specwire.support import NO_SUPPORT, FloatArray, IntArray, Support, certain
from specwire.v1 import common_pb2, draft_pb2, verify_pb2

NO_ID = 2**32 - 1
"""Padding of a support."""
_SUM_TOLERANCE = 1e-3
"""Of a distribution: float32 probabilities of 150,000 tokens add up to 1 within 1e-4."""


def to_proto(
    proposals: Sequence[Proposal], support_len: int = 0, *, with_probs: bool = True
) -> common_pb2.Proposals:
    """One entry for each.

    Args:
        support_len: entries that each support is padded to, where the size must not depend on tokens.
        with_probs: of the supports.
    """
    laid_out = [chains.laid_out(each) for each in proposals]
    num_tokens = [len(token_ids) for token_ids, _ in laid_out]
    parents = [() if each.leaves else each.parents for each in proposals]
    message = common_pb2.Proposals(
        num_tokens=num_tokens,
        token_ids=columns.pack((token_ids for token_ids, _ in laid_out), "<i4"),
        parent_indices=columns.pack_parents(parents, num_tokens),
    )
    if any(each.leaves for each in proposals):
        message.num_chains.extend([len(each.leaves) or 1 for each in proposals])
    if any(own for _, own in laid_out):
        supports = [each for token_ids, own in laid_out for each in own or [NO_SUPPORT] * len(token_ids)]
        _add_supports(message, supports, support_len, with_probs=with_probs)
    return message


def _add_supports(
    message: common_pb2.Proposals, supports: Sequence[Support], support_len: int, *, with_probs: bool
) -> None:
    """One for each token; those of tokens that were matched stay empty."""
    lens = np.fromiter((len(each.token_ids) for each in supports), np.int64, len(supports))
    sent_lens = np.where(lens, np.maximum(lens, support_len), 0)
    padding = sent_lens - lens  # of each support, after its entries
    places = np.arange(lens.sum()) + np.repeat(np.cumsum(padding) - padding, lens)
    ids = np.full(sent_lens.sum(), NO_ID, "<u4")
    ids[places] = np.concatenate([each.token_ids for each in supports])
    message.support_lens = sent_lens.astype("<u4").tobytes()
    message.support_token_ids = ids.tobytes()
    if with_probs:
        probs = np.zeros(len(ids), "<f4")
        probs[places] = np.concatenate([each.probs for each in supports])
        message.support_probs = probs.tobytes()


def from_proto(
    message: common_pb2.Proposals, base_lens: Sequence[int], vocab_size: int, source: str = ""
) -> list[Proposal]:
    """The proposals of a message, which the rule and the target can judge.

    Args:
        base_lens: of each, in tokens.
        vocab_size: of the target, in tokens.

    Raises:
        InvalidRequestError: naming what is wrong with the columns, or with one of the proposals.
    """
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
    """As `from_proto`; what is wrong with a proposal takes its place.

    Args:
        with_probs: whether the probabilities of supports must have been sent.

    Raises:
        InvalidRequestError: the columns do not fit each other.
    """
    num = len(base_lens)
    columns.check_lengths(message, num, "num_tokens")
    num_tokens, total = columns.counts_of("num_tokens", message.num_tokens)
    token_ids = columns.unpack("token_ids", message.token_ids, total, "<i4")
    parents = columns.split_parents(message.parent_indices, num_tokens)
    num_chains = message.num_chains or [1] * num
    if message.num_chains:
        columns.check_lengths(message, num, "num_chains")
    drawn = _Drawn.of(message, total, with_probs=with_probs)
    try:
        drawn.check(token_ids, vocab_size)
        is_sound = True
    except InvalidRequestError:
        is_sound = False  # one of them is not: each is checked by itself
    found = list[Proposal | InvalidRequestError]()
    token_lists, start = columns.split(token_ids.tolist(), num_tokens), 0
    for i, own_ids in enumerate(token_lists):
        tokens = slice(start, start := start + len(own_ids))
        own = drawn.within(tokens)
        try:
            if not is_sound:
                own.check(token_ids[tokens], vocab_size)
            found.append(_proposal(base_lens[i], own_ids, own, parents[i], num_chains[i], source))
        except InvalidRequestError as error:
            found.append(error)
    return found


class _Drawn(NamedTuple):
    """What the tokens of a message were drawn from; padding is left out.

    Attributes:
        sent_lens: [num_tokens], of each token's support, padding included; empty where all were matched.
        bounds: [num_tokens + 1], where each support begins in the columns below, and the end of the last one.
        ids: int64, of all supports.
        probs: float32, for these; empty where they were not sent.
    """

    sent_lens: Sequence[int]
    bounds: Sequence[int]
    ids: IntArray
    probs: FloatArray

    @classmethod
    def of(cls, message: common_pb2.Proposals, num_tokens: int, *, with_probs: bool) -> _Drawn:
        """Of so many tokens.

        Raises:
            InvalidRequestError: the columns do not fit each other, or padding comes before an id.
        """
        sent_lens = columns.unpack(
            "support_lens", message.support_lens, num_tokens if message.support_lens else 0
        )
        num_sent = int(sent_lens.sum(dtype=np.int64))
        ids = columns.ids_of("support_token_ids", message.support_token_ids, num_sent)
        num_probs = num_sent if with_probs or message.support_probs else 0
        probs = columns.unpack("support_probs", message.support_probs, num_probs, "<f4")
        rows, is_entry = np.repeat(np.arange(len(sent_lens)), sent_lens), ids != NO_ID
        if (is_entry[1:] & ~is_entry[:-1] & (rows[1:] == rows[:-1])).any():
            raise InvalidRequestError("support_token_ids", NO_ID, "comes before an id of its support")
        bounds = np.cumsum([0, *np.bincount(rows[is_entry], minlength=len(sent_lens))])
        probs = probs[is_entry] if num_probs else probs
        return cls(sent_lens.tolist(), bounds.tolist(), ids[is_entry], probs)

    def within(self, tokens: slice) -> _Drawn:
        """Of some of the tokens; copies, since a proposal that is kept must not keep all of its message."""
        if not self.sent_lens:
            return self
        first, last = self.bounds[tokens.start], self.bounds[tokens.stop]
        bounds = [bound - first for bound in self.bounds[tokens.start : tokens.stop + 1]]
        ids, probs = self.ids[first:last].copy(), self.probs[first:last].copy()
        return _Drawn(self.sent_lens[tokens], bounds, ids, probs)

    def supports(self) -> Sequence[Support]:
        """One for each token. Without probabilities, one with a single token is certain of it."""
        if not any(self.sent_lens):
            return ()
        supports = [
            Support(self.ids[start:end], self.probs[start:end]) for start, end in pairwise(self.bounds)
        ]
        if not len(self.probs):
            return [each if len(each.token_ids) > 1 else certain(each.token_ids)[0] for each in supports]
        return supports

    def check(self, token_ids: IntArray, vocab_size: int) -> None:
        """Refuse supports that these tokens were not drawn from, and what is no distribution.

        Raises:
            InvalidRequestError: naming what is wrong.
        """
        check_token_ids("token_ids", token_ids, vocab_size)
        if not any(self.sent_lens):
            return
        check_token_ids("support_token_ids", self.ids, vocab_size)
        rows = np.repeat(np.arange(len(token_ids)), np.diff(self.bounds))
        ordered = np.sort(rows * vocab_size + self.ids)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise InvalidRequestError(
                "support_token_ids", int(twice[0]) % vocab_size, "is in a support twice"
            )
        has_own = np.zeros(len(token_ids), np.bool_)
        has_own[rows[self.ids == token_ids[rows]]] = True
        is_drawn = np.array(self.sent_lens) > 0
        for token_id in token_ids[is_drawn & ~has_own][:1].tolist():
            raise InvalidRequestError("support_token_ids", token_id, "is missing where it was drawn from")
        if len(self.probs):
            self._check_probs(rows, is_drawn)

    def _check_probs(self, rows: IntArray, is_drawn: npt.NDArray[np.bool_]) -> None:
        if not (self.probs > 0).all():
            raise InvalidRequestError("support_probs", float(self.probs.min()), "must be positive numbers")
        sums = np.bincount(rows, self.probs, len(is_drawn))[is_drawn]
        if not (np.abs(sums - 1) < _SUM_TOLERANCE).all():
            raise InvalidRequestError("support_probs", sums.tolist(), "must add up to 1")


def _proposal(
    base_len: int,
    token_ids: Sequence[int],
    drawn: _Drawn,
    parents: Sequence[int],
    num_chains: int,
    source: str,
) -> Proposal:
    """Raises:
    InvalidRequestError: parents that are no tree, a tree with supports, or no such chains.
    """
    support_len = max(drawn.sent_lens, default=0)
    if support_len and not all(drawn.sent_lens):
        problem = f"must be over 0 for all {len(token_ids)} tokens or for none"
        raise InvalidRequestError("support_lens", 0, problem)
    supports = drawn.supports()
    may_be_several = supports and 1 <= num_chains <= MAX_NUM_DRAFT_TOKENS and len(token_ids) % num_chains == 0
    if num_chains != 1 and not may_be_several:
        raise InvalidRequestError("num_chains", num_chains, f"does not fit {len(token_ids)} tokens")
    parents = tree.checked_parents(parents, len(token_ids)) if parents else ()
    if supports and parents:
        raise InvalidRequestError("support_lens", support_len, "must be 0 for a tree")
    if num_chains > 1:
        return _merged(token_ids, supports, num_chains, base_len, source, support_len)
    return Proposal(base_len, token_ids, supports, source, parents, support_len)


def _merged(
    token_ids: Sequence[int],
    supports: Sequence[Support],
    num_chains: int,
    base_len: int,
    source: str,
    support_len: int,
) -> Proposal:
    """Several chains as one proposal.

    Raises:
        InvalidRequestError: tokens that follow the same tokens have different supports.
    """
    length = len(token_ids) // num_chains
    starts = range(0, len(token_ids), length)
    own_ids = [token_ids[start : start + length] for start in starts]
    own_supports = [supports[start : start + length] for start in starts]
    found = chains.merged(own_ids, own_supports, base_len, source=source, support_len=support_len)
    for ours, theirs in zip(supports, chains.laid_out(found)[1], strict=True):
        if ours is not theirs and not (
            np.array_equal(ours.token_ids, theirs.token_ids) and np.array_equal(ours.probs, theirs.probs)
        ):
            raise InvalidRequestError("support_probs", num_chains, "differ after the same tokens")
    return found


def paths_of(
    message: draft_pb2.PreparedProposals | verify_pb2.AheadProposals, vocab_size: int
) -> list[Sequence[int]]:
    """The path of each proposal: the tokens between its `base_lens` and it.

    Raises:
        InvalidRequestError: columns that do not fit each other, or tokens outside the vocabulary.
    """
    path_lens, total = columns.counts_of("path_lens", message.path_lens)
    token_ids = columns.unpack("path_token_ids", message.path_token_ids, total)
    check_token_ids("path_token_ids", token_ids, vocab_size)
    return columns.split(token_ids.tolist(), path_lens)


def check_path(base_len: int, path: Sequence[int]) -> None:
    """Refuse a proposal that follows what no sequence has.

    Raises:
        InvalidRequestError: naming what is out of range.
    """
    if base_len < 0:
        raise InvalidRequestError("base_lens", base_len, "must be at least 0")
    if len(path) > MAX_PATH_LEN:
        raise InvalidRequestError("path_lens", len(path), f"over {MAX_PATH_LEN} tokens")
