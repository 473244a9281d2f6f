"""What tokens of chains are chosen by on the device: which sequences that suits, and the numbers it reads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from specwire.engine.cache.kv_cache import SequenceCache
from specwire.engine.drawn import Drawn
from specwire.engine.model.chains import Choice
from specwire.errors import ResourceExhaustedError
from specwire.rule import random
from specwire.rule.choices import Kind, choose
from specwire.rule.columns import EDITED, GREEDY, GUMBEL, MATCHED, Encoded, Rows
from specwire.rule.transfer import to_device, to_host

_MOST_NOISE = 1 << 24
"""Numbers that a chain reads; 4 bytes each are kept, and 12 needed for a moment."""


def kind_of(encoded: Encoded) -> Kind | None:
    """How its tokens are chosen; None where that looks at a history, as penalties and grammars do."""
    traits, _, (_, *cuts) = encoded
    if traits & EDITED:
        return None
    matched = traits & MATCHED
    return Kind(matched, is_cut=cuts != [0.0, 1.0, 0.0] and matched != GREEDY)


def decoded(
    runner: Any,
    kind: Kind,
    caches: Sequence[SequenceCache],
    rows: Rows,
    num_steps: int,
    logits: Tensor,
    *,
    num_ranked: int = 0,
) -> list[Drawn]:
    """What is drawn at each step of chains; nothing where the device does not decode, and the host does.

    Args:
        runner: a `ModelRunner`.
        caches: of their sequences, which hold what the logits follow.
        rows: of the next token of each, all of this kind.
        logits, num_ranked: see `choice`.
    """
    if kind.matched == GUMBEL and num_steps * logits.numel() > _MOST_NOISE:
        return []
    columns = rows.encoded, rows.firsts, rows.base_lens
    found = None
    with suppress(ResourceExhaustedError):
        choice_ = choice(kind, *columns, num_steps, logits, num_ranked=num_ranked)
        found = runner.decode(caches, logits, choice_)
    # Copies: on a CPU the next call would overwrite what a proposal still holds.
    steps = zip(*map(np.array, to_host(*found)), strict=True) if found is not None else ()
    if kind.matched:
        return [Drawn.matched(*step) for step in steps]
    return [Drawn.supported(*step, num_ranked=num_ranked) for step in steps]


def choice(
    kind: Kind,
    encoded: Sequence[Encoded],
    firsts: Sequence[int],
    bases: Sequence[int],
    num_steps: int,
    logits: Tensor,
    *,
    num_ranked: int = 0,
) -> Choice:
    """For sequences of a kind.

    Args:
        encoded, firsts, bases: [num_sequences], as in `Rows`: of the next token of each.
        logits: after the last token of each, [num_sequences, vocab_size].
        num_ranked: likeliest tokens that are wanted where tokens are matched, beside the chosen one.
    """
    device, (num, vocab_size) = logits.device, logits.shape
    seeds = np.tile([each.seed for each in encoded], num_steps)
    positions = (np.arange(num_steps)[:, None] + firsts).reshape(-1)
    warps = np.array([each.warps for each in encoded], np.float32)
    columns = [to_device(np.tile(warps, (num_steps, 1, 1)), device)]
    if kind.matched == GUMBEL:
        noise = random.gumbel_noise(seeds, positions, vocab_size, device)
        columns.append(noise.float().view(num_steps, num, vocab_size))
    elif not kind.matched:
        uniforms = random.uniforms(seeds, random.Purpose.DRAFT, positions, np.tile(bases, num_steps))
        columns.append(to_device(uniforms.reshape(num_steps, num), device))
    return Choice(_function(kind, num_ranked if kind.matched else 0), columns)


@functools.cache
def _function(kind: Kind, num_ranked: int) -> functools.partial[tuple[Tensor, ...]]:
    """One for each kind: what is captured is known by it."""
    return functools.partial(choose, kind=kind, num_ranked=num_ranked)
