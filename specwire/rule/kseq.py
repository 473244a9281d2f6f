"""k-SEQ: one token of the target's distribution out of several draft tokens that were drawn independently.

Sun, Suresh, Ro, Beirami, Jain, Yu 2023 (SpecTr, arXiv 2310.15141), algorithm 3 and section 5. The draft
tokens x_1 ... x_k are looked at in turn. x is accepted with probability min(1, target(x) / (ρ · draft(x))),
and if none is, the token is drawn from the residual. With

    β = Σ min(draft, target / ρ)                        a draft token is accepted
    1 - (1 - β)^k = c · β,  c = Σ_{j<k} (1 - β)^j       one of them is
    residual ∝ target - c · min(draft, target / ρ)

token v comes by acceptance with probability c · min(draft(v), target(v) / ρ), and by the residual with the
rest of target(v): the target, provided that the residual is not negative anywhere, which is c ≤ ρ. The
smallest such ρ accepts the most. For one draft token it is 1, and all of this is rejection sampling.
numpy only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from specwire.rule.random import DoubleArray

_Probs = npt.NDArray[np.floating[Any]]
_NUM_BISECTIONS = 52
"""Halvings of [1, k]: ρ is known to a rounding."""


class Selection:
    """How one of several draft tokens is selected.

    Attributes:
        rho: ρ above.
        draft_accepted: β, the probability that one draft token is accepted.
        num_effective: c, so that c · β is the probability that any of them is.
    """

    def __init__(self, draft_probs: DoubleArray, target_probs: _Probs, num_drafts: int) -> None:
        """Args:
        draft_probs: [support_size], positive, with the sum 1; all that the draft tokens were drawn from.
        target_probs: [support_size] of the same tokens.
        num_drafts: k, at least 1.
        """
        self._draft_probs = draft_probs
        self._target_probs = target_probs.astype(np.float64)
        self.rho = find_rho(draft_probs, self._target_probs, num_drafts)
        self._common = np.minimum(draft_probs, self._target_probs / self.rho)
        self.draft_accepted = min(1.0, float(self._common.sum()))
        self.num_effective = _num_effective(self.draft_accepted, num_drafts)

    def acceptance_probability(self, slot: int) -> float:
        """Of a draft token, by its place in the support."""
        draft_prob, target_prob = self._draft_probs.item(slot), self._target_probs.item(slot)
        return min(target_prob / (self.rho * draft_prob), 1.0)  # in this order NaN stays NaN, which rejects

    def residual(self) -> DoubleArray:
        """[support_size] the residual on the support, unnormalised; outside of it, it is the target."""
        weights: DoubleArray = self._target_probs - self.num_effective * self._common
        return np.maximum(weights, 0.0, out=weights)


def find_rho(draft_probs: DoubleArray, target_probs: DoubleArray, num_drafts: int) -> float:
    """The smallest ρ with c ≤ ρ.

    As ρ grows, β falls and c grows, but ρ · β - c · β grows: there is one root, in [1, k].

    Args, shapes: as of `Selection`.
    """
    low, high = 1.0, float(num_drafts)
    if num_drafts == 1:
        return low
    ratios = target_probs / draft_probs
    order = ratios.argsort()
    ordered = ratios[order]
    # β(ρ) is the draft's mass where the ratio is over ρ, and the target's over ρ elsewhere.
    target_below = np.concatenate(([0.0], target_probs[order].cumsum()))
    draft_below = np.concatenate(([0.0], draft_probs[order].cumsum()))
    draft_mass = draft_below.item(-1)
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        below = int(ordered.searchsorted(middle))
        beta = draft_mass - draft_below.item(below) + target_below.item(below) / middle
        if _num_effective(min(1.0, beta), num_drafts) <= middle:
            high = middle
        else:
            low = middle
    return high


def _num_effective(beta: float, num_drafts: int) -> float:
    """Σ_{j<k} (1 - β)^j: exact where 1 - (1 - β)^k divided by β would not be."""
    rejected, found = 1.0 - beta, 0.0
    for _ in range(num_drafts):
        found = found * rejected + 1.0
    return found
