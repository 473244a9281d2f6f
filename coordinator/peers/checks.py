"""Checks of what a model service sends: whether an answer fits what was asked. Pure.

A service may be broken, or something else may listen at its address. What can be told without the request is
checked as a message is read (`specwire.rpc.wire`), before the rule judges it: token ids reach the client, and
an invalid distribution would bias the output.
"""

from __future__ import annotations

from specwire.core import NO_TOKEN, Proposal, Verdict
from specwire.errors import InternalError


def check_proposal(
    proposal: Proposal, *, matches_tokens: bool, may_be_tree: bool = False, num_chains: int = 1
) -> None:
    """Refuse a proposal of a kind that its sequence cannot have.

    Args:
        matches_tokens: whether tokens are matched, without supports.
        may_be_tree: whether trees were ever asked for. How large and how deep one is is not checked: it may
            be for an earlier plan, and `Plan.limit` cuts it.
        num_chains: most that were ever asked for.

    Raises:
        InternalError: naming what is wrong.
    """
    if len(proposal.leaves) > num_chains:
        raise InternalError(f"{len(proposal.leaves)} chains, where {num_chains} were asked for")
    if proposal.parents and not (may_be_tree or proposal.leaves):
        raise InternalError(f"a tree of {len(proposal.parents)} nodes, where chains were asked for")
    wanted = 0 if matches_tokens else len(proposal.token_ids)
    if len(proposal.supports) != wanted:
        raise InternalError(f"{len(proposal.supports)} supports for {wanted} draft tokens")


def check_verdict(verdict: Verdict, proposal: Proposal) -> None:
    """Refuse a verdict that cannot be about this proposal.

    Raises:
        InternalError: naming what is wrong.
    """
    num_drafted = len(proposal.token_ids)
    if verdict.base_len != proposal.base_len:
        raise InternalError(f"an answer for base_len={verdict.base_len}, not {proposal.base_len}")
    if len(verdict.target_token_ids) != num_drafted + 1:
        raise InternalError(f"{len(verdict.target_token_ids)} target tokens for {num_drafted} draft tokens")
    if verdict.target_token_ids[0] == NO_TOKEN:
        raise InternalError("no token after the committed ones")
    if proposal.supports or verdict.target_probs:
        lengths = [len(support.token_ids) for support in proposal.supports]
        if [*map(len, verdict.target_probs)] != lengths or len(verdict.tail_mass) != len(lengths):
            raise InternalError("target probabilities that do not fit the supports")
    if verdict.logprobs:
        _check_logprobs(verdict, proposal)


def _check_logprobs(verdict: Verdict, proposal: Proposal) -> None:
    """The log probability of any token that may be emitted must be there."""
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
