"""Checks of what a model service sends. Pure.

A service may be broken, or something else may listen at its address. Messages are checked before the rule
judges them: token ids reach the client, and an invalid distribution would bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specwire.core import FloatArray, IntArray, Proposal, Verdict
from specwire.errors import InternalError

_SUM_TOLERANCE = 1e-3
"""Of a distribution: float32 probabilities of 150,000 tokens add up to 1 within 1e-4."""


def check_proposal(
    proposal: Proposal, vocab_size: int, *, matches_tokens: bool, may_be_tree: bool = False
) -> None:
    """Refuse a proposal that the rule or the target could not judge.

    Args:
        vocab_size: of the target, in tokens.
        matches_tokens: whether tokens are matched, without supports.
        may_be_tree: whether trees were ever asked for. How large and how deep one is is not checked: it may
            be for an earlier plan, and `Plan.limit` cuts it.

    Raises:
        InternalError: naming what is wrong.
    """
    if proposal.parents and not may_be_tree:
        raise InternalError(f"a tree of {len(proposal.parents)} nodes, where chains were asked for")
    _check_range("draft token", proposal.token_ids, vocab_size)
    wanted = 0 if matches_tokens else len(proposal.token_ids)
    if len(proposal.supports) != wanted:
        raise InternalError(f"{len(proposal.supports)} supports for {wanted} draft tokens")
    if not wanted:
        return
    lengths = [len(support.token_ids) for support in proposal.supports]
    ids = np.concatenate([support.token_ids for support in proposal.supports])
    probs = np.concatenate([support.probs for support in proposal.supports])
    _check_range("token of a support", ids, vocab_size)
    if not min(lengths) or not (np.isfinite(probs) & (probs > 0)).all():
        raise InternalError("a support has probabilities that are not positive numbers")
    sums = _sums(probs, lengths)
    if not (np.abs(sums - 1) < _SUM_TOLERANCE).all():
        raise InternalError(f"supports whose probabilities add up to {sums.tolist()}")
    rows = np.repeat(np.arange(wanted), lengths)
    if len(np.unique(rows * vocab_size + ids)) < len(ids):
        raise InternalError("a support names a token twice")
    drawn = np.repeat(np.asarray(proposal.token_ids), lengths) == ids
    if drawn.sum() != wanted:
        raise InternalError("a draft token is not in the support that it was drawn from")


def check_verdict(verdict: Verdict, proposal: Proposal, vocab_size: int, *, matches_tokens: bool) -> None:
    """Refuse a verdict that cannot be about this proposal.

    Args:
        vocab_size, matches_tokens: as for `check_proposal`.

    Raises:
        InternalError: naming what is wrong.
    """
    num_drafted = len(proposal.token_ids)
    if verdict.base_len != proposal.base_len:
        raise InternalError(f"an answer for base_len={verdict.base_len}, not {proposal.base_len}")
    if len(verdict.target_token_ids) != num_drafted + 1:
        raise InternalError(f"{len(verdict.target_token_ids)} target tokens for {num_drafted} draft tokens")
    _check_logprobs(verdict, proposal)
    if matches_tokens:
        _check_range("target token", verdict.target_token_ids, vocab_size)
        return
    lengths = [len(support.token_ids) for support in proposal.supports]
    if [len(probs) for probs in verdict.target_probs] != lengths or len(verdict.tail_mass) != num_drafted:
        raise InternalError("target probabilities that do not fit the supports")
    tails = np.asarray(verdict.target_token_ids[:-1], dtype=np.int64)
    masses = np.asarray(verdict.tail_mass, dtype=np.float64)
    _check_range("target token", tails[masses > 0], vocab_size)
    _check_range("target token", verdict.target_token_ids[-1:], vocab_size)
    if num_drafted:
        probs = np.concatenate(verdict.target_probs)
        sums = _sums(probs, lengths) + masses
        if (probs < 0).any() or (masses < 0).any() or not (np.abs(sums - 1) < _SUM_TOLERANCE).all():
            raise InternalError(f"target probabilities that add up to {sums.tolist()}")


def _sums(probs: FloatArray, lengths: Sequence[int]) -> FloatArray:
    """Sums of consecutive segments of these lengths, none of them empty."""
    return np.add.reduceat(probs.astype(np.float64), np.cumsum([0, *lengths[:-1]]))


def _check_range(name: str, token_ids: Sequence[int] | IntArray, vocab_size: int) -> None:
    ids = np.asarray(token_ids, dtype=np.int64)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise InternalError(f"{name} {outside[0]} is outside the vocabulary of {vocab_size}")


def _check_logprobs(verdict: Verdict, proposal: Proposal) -> None:
    """The log probability of any token that may be emitted must be there."""
    if not verdict.logprobs:
        return
    if len(verdict.logprobs) != len(verdict.target_token_ids):
        raise InternalError(f"log probabilities of {len(verdict.logprobs)} positions")
    drafted = [
        [proposal.token_ids[child] for child in proposal.children(node)]
        for node in range(-1, len(proposal.token_ids))
    ]
    for entry, target, draft in zip(verdict.logprobs, verdict.target_token_ids, drafted, strict=True):
        known = set(entry.token_ids.tolist())
        fits = len(entry.values) == len(entry.token_ids) and 0 <= entry.num_top <= len(entry.token_ids)
        if not fits or not known.issuperset(token_id for token_id in (target, *draft) if token_id >= 0):
            raise InternalError("log probabilities that lack a token that may be emitted")
