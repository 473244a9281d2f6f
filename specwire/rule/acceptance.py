"""The acceptance rules: how much of a proposal is kept, and which token follows. numpy only.

Rejection sampling (Leviathan et al. 2023, arXiv 2211.17192, section 2.3; Chen et al. 2023, arXiv
2302.01318, algorithm 2) is applied to a draft distribution that is zero outside a small support S. Outside
S the residual equals the target, so the target's mass there and one token drawn from it are all that the rule
needs of the rest of the vocabulary: the full rule, in O(support) bytes.

Block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2) judges the draft tokens of a round
together, from the same numbers: outside S its residual is the target times the probability that the prefix is
kept. `docs/exactness.md` has the argument.

k-SEQ (SpecTr, Sun et al. 2023, arXiv 2310.15141) judges several chains that were drawn independently: at each
position the draft tokens of those that have the tokens kept so far (`kseq.py`).

Matching (greedy decoding; Gumbel coupling, Daliri, Musco, Suresh 2024, arXiv 2408.07978, algorithm 2)
compares token ids: the emitted token is always the target's own. That holds for any tree of any source.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specwire.core import NO_TOKEN, Outcome, Proposal, Rule, SamplingParams, Verdict
from specwire.errors import InternalError
from specwire.proposals import chains, tree
from specwire.rule.kseq import Selection
from specwire.rule.random import DoubleArray, Purpose, uniforms
from specwire.rule.random import uniform as uniform_at
from specwire.support import Support

_Probs = npt.NDArray[np.floating[Any]]


class Uniforms(Protocol):
    """Uniform numbers in [0, 1) by draft position."""

    def __getitem__(self, i: int, /) -> float: ...


def acceptance_probability(token_prob_draft: float, token_prob_target: float) -> float:
    """min(1, target / draft): how likely a draft token is kept (Leviathan et al., section 2.3).

    Args:
        token_prob_draft: probability of the token under the distribution it was sampled from, positive.
        token_prob_target: its probability under the target.
    """
    return min(token_prob_target / token_prob_draft, 1.0)  # in this order NaN stays NaN, which rejects


def residual(
    draft_support: Support, target_probs: _Probs, tail_mass: float, keep_prob: float = 1.0
) -> tuple[DoubleArray, float]:
    """The residual distribution, unnormalised: max(0, keep_prob · target - draft).

    Leviathan et al., section 2.3; with `keep_prob` Sun et al., equation 4.

    Args:
        draft_support: the draft's distribution; normalised here in float64.
        target_probs: [support_size], the target's probabilities on the support.
        tail_mass: the target's mass outside the support, where the draft is zero.
        keep_prob: probability that the draft tokens before are kept, given these tokens; 1 in the token rule.

    Returns:
        float64 weights [support_size], and the weight of everything outside the support. Together they
        sum to the probability that the round ends here.
    """
    draft_probs = draft_support.probs.astype(np.float64)
    draft_probs /= draft_probs.sum()
    weights = target_probs.astype(np.float64)
    weights *= keep_prob
    weights -= draft_probs
    np.maximum(weights, 0.0, out=weights)
    return weights, keep_prob * max(float(tail_mass), 0.0)


def accept(proposal: Proposal, verdict: Verdict, params: SamplingParams, seed: int) -> Outcome:
    """Apply the rule that `params` names, with random numbers addressed by absolute position and the
    round's base.

    Where the accepted path ends before a row without a token, the round ends with the path's last token, and
    the next one begins at that row. Then the request fails as in plain decoding, after the same tokens.

    Raises:
        InternalError: proposal and verdict do not match.
    """
    outcome = _accept(proposal, verdict, params, seed)
    if outcome.next_token != NO_TOKEN:
        return outcome
    if not outcome.path:
        raise InternalError("a verdict without a token after the committed ones")
    return Outcome(outcome.path[:-1], proposal.token_ids[outcome.path[-1]])


def _accept(proposal: Proposal, verdict: Verdict, params: SamplingParams, seed: int) -> Outcome:
    if params.matches_tokens:
        return accept_by_match(proposal, verdict)
    base, num_draft_tokens = proposal.base_len, len(proposal.token_ids)
    residual_uniforms = _ResidualUniforms(seed, base)
    if proposal.leaves and params.rule is Rule.KSEQ:

        def uniform_of(i: int, chain: int) -> float:
            return uniform_at(seed, Purpose.ACCEPT, base + i, base, chain)

        return accept_by_kseq(proposal, verdict, uniform_of, residual_uniforms)
    rule = accept_by_block if params.rule is Rule.BLOCK else accept_by_rejection
    accept_uniforms = uniforms(seed, Purpose.ACCEPT, range(base, base + num_draft_tokens), base)
    return rule(proposal, verdict, accept_uniforms, residual_uniforms)


class _ResidualUniforms:
    """By draft position; a round needs one at most."""

    def __init__(self, seed: int, base: int) -> None:
        self._seed, self._base = seed, base

    def __getitem__(self, i: int) -> float:
        return uniform_at(self._seed, Purpose.RESIDUAL, self._base + i, self._base)


def accept_by_match(proposal: Proposal, verdict: Verdict) -> Outcome:
    """Keep the longest path that equals the target's own tokens, then take the target's next one.

    As in the other rules, that is `NO_TOKEN` if the path ends before a row without a token.

    Raises:
        InternalError: proposal and verdict do not match.
    """
    _check_fit(proposal, verdict)
    path: list[int] = []
    while proposal.parents:
        node = path[-1] if path else -1
        token_id = int(verdict.target_token_ids[node + 1])
        matching = tree.child(proposal.token_ids, proposal.parents, node, token_id)
        if matching is None:
            return Outcome(path, token_id)
        path.append(matching)
    num_accepted = 0
    for draft_token in proposal.token_ids:
        if draft_token != verdict.target_token_ids[num_accepted]:
            break
        num_accepted += 1
    return Outcome(range(num_accepted), int(verdict.target_token_ids[num_accepted]))


def accept_by_rejection(
    proposal: Proposal,
    verdict: Verdict,
    accept_uniforms: Sequence[float] | DoubleArray,
    residual_uniforms: Uniforms | DoubleArray,
) -> Outcome:
    """Keep draft tokens until one is rejected, then draw the recovered token; else add the bonus token.

    Token x is kept if u · draft_probs[x] < target_probs[x], written as u < `acceptance_probability`:
    strictly, since u may be 0 and a token that the target excludes must be rejected.

    Args:
        proposal: γ draft tokens, each with the support it was sampled from.
        verdict: the target on these supports, with its tail tokens and the bonus token.
        accept_uniforms: [γ] in [0, 1), independent of those that sampled the draft tokens.
        residual_uniforms: [γ] in [0, 1), independent of both.

    Raises:
        InternalError: proposal and verdict do not match, or are not probabilities.
    """
    _check_judged(proposal, verdict)
    proposal, verdict = _judgeable(proposal, verdict)
    for i, uniform in enumerate(accept_uniforms[: len(proposal.token_ids)]):
        if not uniform < acceptance_probability(*_token_probs(proposal, verdict, i)):
            weights = _residual_at(proposal, verdict, i)
            return Outcome(range(i), _recover(proposal, verdict, i, weights, residual_uniforms[i]))
    return Outcome(range(len(proposal.token_ids)), int(verdict.target_token_ids[-1]))


def accept_by_block(
    proposal: Proposal,
    verdict: Verdict,
    accept_uniforms: Sequence[float] | DoubleArray,
    residual_uniforms: Uniforms | DoubleArray,
) -> Outcome:
    """Keep the longest prefix whose coin says so, judged from the end; then as `accept_by_rejection`.

    Args, Raises: see there. The numbers must be independent of those of all other rounds, and so must be
    those that sampled the draft tokens: how many are kept depends on all of them.
    """
    _check_judged(proposal, verdict)
    proposal, verdict = _judgeable(proposal, verdict)
    keep_probs = _keep_probs(proposal, verdict)
    num_kept = len(proposal.token_ids)
    if not num_kept or accept_uniforms[num_kept - 1] < keep_probs[-1]:
        return Outcome(range(num_kept), int(verdict.target_token_ids[-1]))
    while True:
        num_kept -= 1
        weights = _residual_at(proposal, verdict, num_kept, keep_probs[num_kept])
        if not num_kept or accept_uniforms[num_kept - 1] < _stop_prob(weights, keep_probs[num_kept]):
            recovered = _recover(proposal, verdict, num_kept, weights, residual_uniforms[num_kept])
            return Outcome(range(num_kept), recovered)


def accept_by_kseq(
    proposal: Proposal,
    verdict: Verdict,
    accept_uniforms: Callable[[int, int], float],
    residual_uniforms: Uniforms | DoubleArray,
) -> Outcome:
    """Keep a draft token of several chains, then another one of those that have it, until none is accepted.

    The chains were drawn independently. So the tokens that follow the kept ones in the chains that have them
    are draws from one distribution, whatever decided about the tokens before.

    Args:
        proposal: chains of one length, see `specwire.proposals.chains`.
        verdict: the target on its supports.
        accept_uniforms: in [0, 1), by draft position and chain, independent of those that sampled the tokens.
        residual_uniforms: [γ] in [0, 1), independent of both.

    Raises:
        InternalError: proposal and verdict do not match, or are not probabilities.
    """
    _check_judged(proposal, verdict, may_be_tree=True)
    paths = chains.paths(proposal)
    alive, path = [*range(len(paths))], list[int]()
    for i in range(len(paths[0])):
        row = path[-1] + 1 if path else 0
        if verdict.target_token_ids[row] == NO_TOKEN:
            return Outcome(path, NO_TOKEN)
        candidates = [(chain, paths[chain][i]) for chain in alive]
        support, target_probs = _judged_support(proposal, verdict, row)
        draft_probs = support.probs.astype(np.float64)
        draft_probs /= draft_probs.sum()
        selection = Selection(draft_probs, target_probs, len(candidates))
        uniform_of = functools.partial(accept_uniforms, i)
        accepted = _first_accepted(proposal, selection, row, candidates, uniform_of)
        if accepted is None:
            weights = np.append(selection.residual(), _tail_weight(verdict, row))
            return Outcome(path, _recover(proposal, verdict, row, weights, residual_uniforms[i]))
        path.append(accepted)
        alive = [chain for chain, node in candidates if node == accepted]
    return Outcome(path, int(verdict.target_token_ids[path[-1] + 1]))


def _judged_support(proposal: Proposal, verdict: Verdict, row: int) -> tuple[Support, _Probs]:
    """A row's support, and the target's probabilities on it."""
    support, target_probs = proposal.supports[row], verdict.target_probs[row]
    if len(support.token_ids) != len(target_probs) or len(target_probs) == 0:
        raise InternalError(f"{len(target_probs)} target probabilities for {len(support.token_ids)} tokens")
    return support, target_probs


def _first_accepted(
    proposal: Proposal,
    selection: Selection,
    row: int,
    candidates: Sequence[tuple[int, int]],
    uniform_of: Callable[[int], float],
) -> int | None:
    """The node of the first chain whose token is accepted; chains with the same token are judged one by one.

    Args:
        candidates: chains, and the node of each.
        uniform_of: in [0, 1), by chain.
    """
    token_ids = proposal.supports[row].token_ids
    for chain, node in candidates:
        token_id = proposal.token_ids[node]
        slot = int((token_ids == token_id).argmax())
        if token_ids.item(slot) != token_id:
            raise InternalError(f"draft token {token_id} is not in the support it was sampled from")
        if uniform_of(chain) < selection.acceptance_probability(slot):
            return node
    return None


def _keep_probs(proposal: Proposal, verdict: Verdict) -> list[float]:
    """[γ + 1] probability that at least i draft tokens are kept, given the first i (Sun et al.: p_i)."""
    keep_probs = [1.0]
    for i in range(len(proposal.token_ids)):
        token_prob_draft, token_prob_target = _token_probs(proposal, verdict, i)
        keep_probs.append(acceptance_probability(token_prob_draft, keep_probs[-1] * token_prob_target))
    return keep_probs


def _stop_prob(weights: DoubleArray, keep_prob: float) -> float:
    """Probability that a round which keeps no longer prefix keeps this one (Sun et al.: h_i for i < γ)."""
    mass = float(weights.sum())
    others = 1.0 - keep_prob
    return mass / (mass + others) if others else 1.0


def _check_fit(proposal: Proposal, verdict: Verdict) -> None:
    if verdict.base_len != proposal.base_len:
        raise InternalError(f"verdict at {verdict.base_len} for a proposal at {proposal.base_len}")
    if len(verdict.target_token_ids) != len(proposal.token_ids) + 1:
        raise InternalError(
            f"{len(verdict.target_token_ids)} target tokens for {len(proposal.token_ids)} draft tokens"
        )


def _check_judged(proposal: Proposal, verdict: Verdict, *, may_be_tree: bool = False) -> None:
    _check_fit(proposal, verdict)
    if proposal.parents and not may_be_tree:
        raise InternalError("a tree where tokens are not matched")
    num_draft_tokens = len(proposal.token_ids)
    if not len(proposal.supports) == len(verdict.target_probs) == len(verdict.tail_mass) == num_draft_tokens:
        raise InternalError(f"{num_draft_tokens} draft tokens, but not as many supports and judgements")


def _judgeable(proposal: Proposal, verdict: Verdict) -> tuple[Proposal, Verdict]:
    """A chain up to its first row without a token: what follows is never reached.

    Where that is depends on the tokens before alone, so the rule's law holds for the shorter chain.
    """
    if NO_TOKEN not in verdict.target_token_ids:
        return proposal, verdict
    num_tokens = verdict.target_token_ids.index(NO_TOKEN)
    judged = replace(
        verdict,
        target_token_ids=verdict.target_token_ids[: num_tokens + 1],
        target_probs=verdict.target_probs[:num_tokens],
        tail_mass=verdict.tail_mass[:num_tokens],
    )
    return proposal.first(num_tokens), judged


def _token_probs(proposal: Proposal, verdict: Verdict, i: int) -> tuple[float, float]:
    """Probability of draft token i under the distribution it was sampled from, and under the target."""
    (support, target_probs), token_id = _judged_support(proposal, verdict, i), proposal.token_ids[i]
    slot = int((support.token_ids == token_id).argmax())
    draft_prob = support.probs.item(slot)
    if support.token_ids.item(slot) != token_id or not draft_prob > 0:
        raise InternalError(f"draft token {token_id} is not in the support it was sampled from")
    # The draft drew from its float32 numbers over their sum, so these quotients are its exact distribution.
    return draft_prob / float(support.probs.sum(dtype=np.float64)), target_probs.item(slot)


def _residual_at(proposal: Proposal, verdict: Verdict, i: int, keep_prob: float = 1.0) -> DoubleArray:
    """[support_size + 1] the residual of draft position i; its last entry is the tail's."""
    tail_mass = _tail_weight(verdict, i)
    weights, tail = residual(proposal.supports[i], verdict.target_probs[i], tail_mass, keep_prob)
    return np.concatenate((weights, (tail,)))


def _tail_weight(verdict: Verdict, i: int) -> float:
    """The target's mass outside of the support of a row."""
    return max(0.0, float(verdict.tail_mass[i])) if verdict.target_token_ids[i] >= 0 else 0.0


def _recover(proposal: Proposal, verdict: Verdict, i: int, weights: DoubleArray, uniform: float) -> int:
    """Draw from the residual of draft position i: a token of its support, or the tail token."""
    token_ids = proposal.supports[i].token_ids
    if not weights.any():
        # Draft and target are equal up to rounding. A rejection then has a probability of the order of that
        # rounding (1e-7 in float32), and drawing from the target's own distribution is right within it.
        weights = np.append(verdict.target_probs[i], 0.0)
    slot = _draw(weights, uniform)
    return int(verdict.target_token_ids[i] if slot == len(token_ids) else token_ids[slot])


def _draw(weights: _Probs, uniform: float) -> int:
    """Invert the cumulative weights; never an index of weight zero, whatever `uniform` rounds to."""
    cumulative = weights.cumsum(dtype=np.float64)
    total = cumulative[-1]
    if not 0 < total < np.inf:
        raise InternalError(f"the target's probabilities sum to {total}")
    threshold = min(uniform * total, math.nextafter(total, 0.0))
    return int(cumulative.searchsorted(threshold, side="right"))
