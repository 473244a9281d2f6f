"""How draft tokens are chosen on a device, where nothing waits for the host: for chains that are drafted
there, as `sampling` and `rows` choose them on the way to the host.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specwire.core import MAX_SUPPORT, SUPPORT_MASS
from specwire.rule import sampling
from specwire.rule.captured import captured
from specwire.rule.columns import GREEDY, GUMBEL
from specwire.rule.rows import drawn_on_device

SHARPNESS = 2.0
"""Of the softmax that turns scores into shares. A draft that is near its target is right more often than its
scores say. With the embedded pair, trees of 32 nodes and 8 passes commit so many tokens a round at sharpness
1, 1.5, 2, 3 and 4: 4.97, 5.80, 6.22, 6.05, 5.85 (greedy), 4.55, 5.22, 5.32, 5.12, 5.02 (Gumbel coupling)."""


class Kind(NamedTuple):
    """What sequences have in common that are drafted together.

    Attributes:
        matched: the trait by which tokens are matched; 0 where they are drawn.
        is_cut: whether any of top-k, top-p and min-p is set.
    """

    matched: int
    is_cut: bool


def likeliest_on_device(scores: Tensor, *, most: int, sharpness: float = SHARPNESS) -> tuple[Tensor, ...]:
    """The likeliest tokens of each row, best first, [num_rows, most]; how many of them there are, none where
    no score is finite; and their shares, as the tokens."""
    best = scores.max(dim=-1, keepdim=True) if most <= 1 else scores.topk(min(most, scores.shape[1]), dim=-1)
    shares = (sharpness * best.values - (sharpness * scores).logsumexp(dim=-1, keepdim=True)).exp()
    are_there = (best.values > float("-inf")) & shares.isfinite()
    return best.indices, are_there.sum(dim=-1), shares


likeliest = captured(likeliest_on_device)


def choose(
    logits: Tensor, warps: Tensor, *noise: Tensor, kind: Kind, num_ranked: int = 0
) -> tuple[Tensor, ...]:
    """The next token of each row.

    Args:
        logits: [num_rows, vocab_size].
        warps: float32 [num_rows, 4], see `columns.Encoded`.
        noise: float32 [num_rows, vocab_size] under Gumbel coupling, uniform numbers float64 [num_rows] where
            tokens are drawn; none where they are the likeliest.

    Returns:
        The tokens, int64 [num_rows], -1 where no score is finite, and what `likeliest` returns, of one token
        at least; where they are drawn, the first four of `rows.drawn_on_device`.
    """
    scores = logits
    if kind.is_cut:
        scores = sampling.warped_on_device(logits, warps)
    elif kind.matched != GREEDY:
        scores = (logits / warps[:, :1]).log_softmax(dim=-1)
    if not kind.matched:
        return drawn_on_device(scores, *noise, mass=SUPPORT_MASS, max_support=MAX_SUPPORT)[:4]
    if kind.matched == GUMBEL:
        scores = scores + noise[0]
    token_ids = scores.argmax(dim=-1).masked_fill(~scores.amax(dim=-1).isfinite(), -1)
    return token_ids, *likeliest_on_device(scores, most=num_ranked)
