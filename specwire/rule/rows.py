"""Sampling steps that draft and verify share, over the rows of a step's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specwire.core import Logprobs
from specwire.rule import random, sampling, transfer
from specwire.rule.captured import captured
from specwire.rule.columns import GREEDY, Places, Rows, padded
from specwire.support import IntArray


def take_rows(rows: Tensor, places: Places) -> Tensor:
    """Some rows of a tensor; the tensor itself when all are wanted."""
    return rows if isinstance(places, slice) else rows[transfer.to_device(places, rows.device)]


def uniforms_for(rows: Rows, stream: random.Purpose, device: torch.device) -> Tensor:
    """One uniform number a row, float64 [num_rows] in [0, 1)."""
    return transfer.to_device(random.uniforms(rows.seeds, stream, rows.positions, rows.bases), device)


def choose_matched(log_probs: Tensor, rows: Rows) -> Tensor:
    """Each row's token where tokens are matched, int64 [num_rows]; the lowest id among ties.

    Args:
        log_probs: [num_rows, vocab_size], after history and warps; -inf is never chosen.
        rows: [num_rows], each greedy or under Gumbel coupling.
    """
    return matched_scores(log_probs, rows).argmax(dim=-1)


def matched_scores(log_probs: Tensor, rows: Rows) -> Tensor:
    """The scores that `choose_matched` maximises: log probabilities, plus Gumbel noise unless greedy. Their
    argmax is a Gumbel-max draw then (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

    Returns:
        [num_rows, vocab_size]; float64 if any row has noise, which keeps the order within the other rows.
    """
    noisy = rows.having(GREEDY, wanted=False)
    if noisy is None:
        return log_probs
    some = rows.take(noisy)
    noise = random.gumbel_noise(some.seeds, some.positions, log_probs.shape[1], log_probs.device)
    scores = log_probs.double()
    if isinstance(noisy, slice):
        return scores + noise
    scores[transfer.to_device(noisy, scores.device)] += noise
    return scores


def draw_supported(log_probs: Tensor, rows: Rows, mass: float, max_support: int) -> tuple[Tensor, ...]:
    """What `drawn_on_device` returns, for these rows. See `Captured` for how long it stays."""
    uniforms = uniforms_for(rows, random.Purpose.DRAFT, log_probs.device)
    return _draw_supported(log_probs, uniforms, mass=mass, max_support=max_support)


def drawn_on_device(
    log_probs: Tensor, uniforms: Tensor, *, mass: float, max_support: int
) -> tuple[Tensor, ...]:
    """Truncate first, then sample from exactly the numbers that are sent. Reads no value back to the host.

    Args:
        log_probs: [num_rows, vocab_size], after history and warps.
        uniforms: float64 [num_rows] in [0, 1).
        mass, max_support: see `sampling.truncate_support`.

    Returns:
        A draft token of each row, int64 [num_rows], -1 where no logit is finite; then the support that it was
        drawn from: token ids, int64 [num_rows, k], best first, their probabilities, float32, and int64
        [num_rows], how many of these are in the support, the first ones, at least one (where no logit is
        finite the draft is certain of token 0, a distribution like any other); last the ids with -1 beyond
        each support, and for rows without one.
    """
    ids, probs, lengths = sampling.truncate_support(log_probs.exp(), mass, max_support)
    in_support = ids.masked_fill(~(probs > 0), -1)
    token_ids = in_support.gather(1, sampling.draw(probs, uniforms)[:, None])[:, 0]
    is_there = lengths > 0
    ids[:, 0], probs[:, 0] = ids[:, 0].where(is_there, 0), probs[:, 0].where(is_there, 1)
    return token_ids, ids, probs, lengths.clamp(min=1), in_support


_draw_supported = captured(drawn_on_device)


def position_logprobs(logits: Tensor, candidates: Sequence[IntArray], num_top: int) -> list[Logprobs]:
    """Log probabilities (nats) of each row's candidates and likeliest tokens, before warps and penalties.

    Args:
        logits: [num_rows, vocab_size], raw.
        candidates: [num_rows] arrays of token ids; those outside the vocabulary report -inf.
        num_top: number of likeliest tokens to report, as far as there are any; 0 for none.
    """
    lengths = np.fromiter(map(len, candidates), np.int64, len(candidates))
    ids = padded(np.concatenate([np.empty(0, np.int64), *candidates]), lengths, -1)
    token_ids = transfer.to_device(ids, logits.device)
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    vocab_size = log_probs.shape[1]
    known = (token_ids >= 0) & (token_ids < vocab_size)
    own = log_probs.gather(1, token_ids.masked_fill(~known, 0)).masked_fill(~known, -torch.inf)
    top = torch.topk(log_probs, min(num_top, vocab_size), dim=-1)
    values, top_ids, top_values = transfer.to_host(own, top.indices, top.values)
    return [
        Logprobs(
            np.concatenate([ids, top_ids[i]]),
            np.concatenate([values[i, : len(ids)], top_values[i]]),
            top_ids.shape[1],
        )
        for i, ids in enumerate(candidates)
    ]
