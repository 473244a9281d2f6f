"""Proposals in columns, as nouns and back, and what makes them valid. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specwire.core import MAX_NUM_DRAFT_TOKENS, MAX_PATH_LEN, Proposal, check_token_ids
from specwire.errors import InvalidRequestError
from specwire.proposals import chains, tree
from specwire.rpc.wire import columns
from specwire.support import FloatArray, IntArray, Support
from specwire.v1 import common_pb2

NO_ID = 2**32 - 1
"""Padding of a support."""
_SUM_TOLERANCE = 1e-3
"""Of a distribution: float32 probabilities of 150,000 tokens add up to 1 within 1e-4."""


def to_proto(proposals: Sequence[Proposal], support_len: int) -> common_pb2.Proposals:
    """One entry for each.

    Args:
        support_len: entries that each support is padded to: the size must not depend on tokens.
    """
    laid_out = [_LaidOut.of(each) for each in proposals]
    token_ids = [each.token_ids for each in laid_out]
    num_tokens = [*map(len, token_ids)]
    message = common_pb2.Proposals(
        num_tokens=num_tokens,
        token_ids=columns.pack(token_ids, "<i4"),
        parent_indices=columns.pack_parents(
            [() if each.leaves else each.parents for each in proposals], num_tokens
        ),
    )
    if any(each.leaves for each in proposals):
        message.num_chains.extend([len(each.leaves) or 1 for each in proposals])
    if any(each.supports for each in proposals):
        _add_supports(message, laid_out, support_len)
    return message


class _LaidOut(NamedTuple):
    """The tokens of a proposal as they are sent, each with its support where it was drawn from one."""

    token_ids: Sequence[int]
    supports: Sequence[Support]

    @classmethod
    def of(cls, proposal: Proposal) -> _LaidOut:
        """Several chains come one after another."""
        if not proposal.leaves or not proposal.supports:
            return cls(proposal.token_ids, proposal.supports)
        token_ids, supports = chains.split(proposal)
        return cls([*chain.from_iterable(token_ids)], [*chain.from_iterable(supports)])


def _add_supports(message: common_pb2.Proposals, proposals: Sequence[_LaidOut], support_len: int) -> None:
    has_supports = [bool(each.supports) for each in proposals]
    supports = [support for each in proposals for support in each.supports]
    ids = np.full((len(supports), support_len), NO_ID, "<u4")
    probs = np.zeros((len(supports), support_len), "<f4")
    for row, support in enumerate(supports):
        ids[row, : len(support.token_ids)] = support.token_ids
        probs[row, : len(support.probs)] = support.probs
    message.has_supports.extend(has_supports)
    message.support_len = support_len
    message.support_token_ids, message.support_probs = ids.tobytes(), probs.tobytes()


class ProposalColumns(NamedTuple):
    """The proposals of a message, before they are split; padding of supports included.

    Attributes:
        num_tokens: of each proposal.
        token_ids: int32, of all proposals.
        parents: of each; empty where all are chains.
        has_supports: of each.
        support_ids: int64 [tokens of proposals with supports, support_len].
        support_probs: float32, for these.
        num_chains: of each, one after another.
    """

    num_tokens: list[int]
    token_ids: IntArray
    parents: list[Sequence[int]]
    has_supports: list[bool]
    support_ids: IntArray
    support_probs: FloatArray
    num_chains: list[int]

    @property
    def is_drawn(self) -> npt.NDArray[np.bool_]:
        """Tokens of proposals with supports."""
        return np.repeat(np.array(self.has_supports, np.bool_), self.num_tokens)

    @property
    def is_entry(self) -> npt.NDArray[np.bool_]:
        """Entries of supports that are not padding."""
        is_entry: npt.NDArray[np.bool_] = self.support_ids != NO_ID
        return is_entry


def columns_from_proto(message: common_pb2.Proposals, num: int) -> ProposalColumns:
    """The columns of `num` proposals.

    Raises:
        InvalidRequestError: they do not fit each other.
    """
    columns.check_lengths(message, num, "num_tokens")
    num_tokens, total = columns.counts_of("num_tokens", message.num_tokens)
    token_ids = columns.unpack("token_ids", message.token_ids, total, "<i4")
    parents = columns.split_parents(message.parent_indices, num_tokens)
    has_supports = list(message.has_supports) or [False] * num
    if len(has_supports) != num:
        raise InvalidRequestError("has_supports", len(has_supports), f"must have {num} entries")
    num_rows = sum(n for n, has in zip(num_tokens, has_supports, strict=True) if has)
    length = message.support_len
    if length < 0:
        raise InvalidRequestError("support_len", length, "must be at least 0")
    ids = columns.ids_of("support_token_ids", message.support_token_ids, num_rows * length)
    probs = columns.unpack("support_probs", message.support_probs, num_rows * length, "<f4")
    shape = num_rows, length
    num_chains = list(message.num_chains) or [1] * num
    if len(num_chains) != num:
        raise InvalidRequestError("num_chains", len(num_chains), f"must have {num} entries")
    return ProposalColumns(
        num_tokens, token_ids, parents, has_supports, ids.reshape(shape), probs.reshape(shape), num_chains
    )


def check(found: ProposalColumns, vocab_size: int) -> None:
    """Refuse proposals that the rule or the target could not judge.

    Args:
        vocab_size: of the target, in tokens.

    Raises:
        InvalidRequestError: naming what is wrong.
    """
    check_token_ids("token_ids", found.token_ids, vocab_size)
    if not any(found.has_supports):
        return
    drawn, ids, is_entry = found.token_ids[found.is_drawn], found.support_ids, found.is_entry
    check_token_ids("support_token_ids", ids[is_entry], vocab_size)
    probs = np.where(is_entry, found.support_probs, 0.0)
    is_first = is_entry[:, 1:] <= is_entry[:, :-1]
    if not is_entry.any(axis=1).all() or not is_first.all() or not (probs[is_entry] > 0).all():
        raise InvalidRequestError("support_probs", probs.min(initial=1.0), "must be positive numbers")
    sums = probs.sum(axis=1, dtype=np.float64)
    if not (np.abs(sums - 1) < _SUM_TOLERANCE).all():
        raise InvalidRequestError("support_probs", sums.tolist(), "must add up to 1")
    ordered = np.sort(ids, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_ID)).any():
        raise InvalidRequestError("support_token_ids", ids.tolist(), "has an id twice")
    if not (ids == drawn[:, None]).any(axis=1).all():
        raise InvalidRequestError("support_token_ids", ids.tolist(), "lacks the token that was drawn from it")


def split(found: ProposalColumns, base_lens: Sequence[int], source: str = "") -> list[Proposal]:
    """Each by itself, without padding.

    Raises:
        InvalidRequestError: parents that are no tree, a tree with supports, or tokens that are not so many
            chains.
    """
    token_lists = columns.split(found.token_ids.tolist(), found.num_tokens)
    lengths, num_rows = found.is_entry.sum(axis=1).tolist(), 0
    proposals = []
    for base_len, token_ids, parents, has, num_chains in zip(
        base_lens, token_lists, found.parents, found.has_supports, found.num_chains, strict=True
    ):
        if num_chains != 1:
            _check_chains(num_chains, token_ids, has_supports=has)
        if not has:
            known = tree.checked_parents(parents, len(token_ids)) if parents else ()
            proposals.append(Proposal(base_len, token_ids, (), source, known))
            continue
        if parents and tree.checked_parents(parents, len(token_ids)):
            raise InvalidRequestError("has_supports", True, "must be false for a tree")
        rows = slice(num_rows, num_rows + len(token_ids))
        num_rows = rows.stop
        own = _supports(found.support_ids[rows], found.support_probs[rows], lengths[rows])
        support_len = found.support_ids.shape[1]
        if num_chains > 1:
            proposals.append(_merged(token_ids, own, num_chains, base_len, source, support_len))
            continue
        proposals.append(Proposal(base_len, token_ids, own, source, support_len=support_len))
    return proposals


def _check_chains(num_chains: int, token_ids: Sequence[int], *, has_supports: bool) -> None:
    """Raises:
    InvalidRequestError: the tokens are not so many chains of one length.
    """
    if not (has_supports and 1 <= num_chains <= MAX_NUM_DRAFT_TOKENS) or len(token_ids) % num_chains:
        raise InvalidRequestError("num_chains", num_chains, f"does not fit {len(token_ids)} tokens")


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
    starts = range(0, num_chains * length, length) if length else [0] * num_chains
    own_ids = [token_ids[start : start + length] for start in starts]
    own_supports = [supports[start : start + length] for start in starts]
    found = chains.merged(own_ids, own_supports, base_len, source=source, support_len=support_len)
    for declared, agreed in zip(own_supports, chains.split(found)[1], strict=True):
        for ours, theirs in zip(declared, agreed, strict=True):
            if ours is not theirs and not (
                np.array_equal(ours.token_ids, theirs.token_ids) and np.array_equal(ours.probs, theirs.probs)
            ):
                raise InvalidRequestError("support_probs", num_chains, "differ after the same tokens")
    return found


def _supports(ids: IntArray, probs: FloatArray, lengths: Sequence[int]) -> list[Support]:
    """Of one proposal; copies, since a proposal that is kept must not keep all of its message."""
    return [
        Support(own_ids[:length], own_probs[:length])
        for own_ids, own_probs, length in zip(ids.copy(), probs.copy(), lengths, strict=True)
    ]


def paths_of(message: Any, vocab_size: int) -> list[Sequence[int]]:
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
