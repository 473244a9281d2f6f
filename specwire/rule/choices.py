"""How draft tokens are chosen on a device, where nothing waits for the host: for chains that are drafted
there, as `sampling` and `rows` choose them on the way to the host.

Each function takes logits [num_rows, vocab_size], warps float32 [num_rows, 4] (see `columns.Encoded`), and
noise float32 [num_rows, vocab_size] or uniform numbers float64 [num_rows]. The first of its results is the
tokens, int64 [num_rows].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from specwire.core import MAX_SUPPORT, SUPPORT_MASS
from specwire.rule import sampling
from specwire.rule.columns import GREEDY, GUMBEL
from specwire.rule.rows import drawn_on_device

SHARPNESS = 2.0
"""Of the softmax that turns scores into shares, as for a draft service; the calibration corrects it."""


class Kind(NamedTuple):
    """What sequences have in common that are drafted together.

    Attributes:
        matched: the trait by which tokens are matched; 0 where they are drawn.
        is_cut: whether any of top-k, top-p and min-p is set.
    """

    matched: int
    is_cut: bool


def _likeliest(logits: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return _matched(logits)


def _coupled(logits: Tensor, warps: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
    return _matched((logits / warps[:, :1]).log_softmax(dim=-1) + noise)


def _coupled_cut(logits: Tensor, warps: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
    return _matched(sampling.warped_on_device(logits, warps) + noise)


def _matched(scores: Tensor) -> tuple[Tensor, ...]:
    """The tokens, -1 where no score is finite, and their shares."""
    best, token_ids = scores.max(dim=-1)
    shares = (SHARPNESS * best - (SHARPNESS * scores).logsumexp(dim=-1)).exp()
    return token_ids.masked_fill(~shares.isfinite(), -1), shares


def _drawn(logits: Tensor, warps: Tensor, uniforms: Tensor) -> tuple[Tensor, ...]:
    return _supported((logits / warps[:, :1]).log_softmax(dim=-1), uniforms)


def _drawn_cut(logits: Tensor, warps: Tensor, uniforms: Tensor) -> tuple[Tensor, ...]:
    return _supported(sampling.warped_on_device(logits, warps), uniforms)


def _supported(log_probs: Tensor, uniforms: Tensor) -> tuple[Tensor, ...]:
    return drawn_on_device(log_probs, uniforms, mass=SUPPORT_MASS, max_support=MAX_SUPPORT)[:4]


CHOICES: Mapping[Kind, Callable[..., tuple[Tensor, ...]]] = {
    Kind(GREEDY, False): _likeliest,
    Kind(GUMBEL, False): _coupled,
    Kind(GUMBEL, True): _coupled_cut,
    Kind(0, False): _drawn,
    Kind(0, True): _drawn_cut,
}
