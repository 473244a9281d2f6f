"""Sampling steps that draft and verify share, over the rows of a step's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specwire.core import IntArray, Logprobs
from specwire.rule import random, sampling, transfer
from specwire.rule.sampling import Row


def take_rows(rows: Tensor, indices: Sequence[int]) -> Tensor:
    """Some rows of a tensor; the tensor itself when all are wanted."""
    return rows if len(indices) == len(rows) else rows[transfer.indices(indices, rows.device)]


def uniforms_for(rows: Sequence[Row], stream: random.Purpose, device: torch.device) -> Tensor:
    """One uniform number a row, float64 [num_rows] in [0, 1)."""
    bases = [row.params.key_base(row.base_len) for row in rows]
    values = random.uniforms([row.seed for row in rows], stream, [row.position for row in rows], bases)
    return transfer.to_device(values, device)


def choose_matched(log_probs: Tensor, rows: Sequence[Row]) -> Tensor:
    """Each row's token where tokens are matched: the likeliest, or the Gumbel-max draw.

    Args:
        log_probs: [num_rows, vocab_size], after history and warps.
        rows: [num_rows], each greedy or under Gumbel coupling.

    Returns:
        int64 [num_rows].
    """
    return sampling.greedy(matched_scores(log_probs, rows))


def matched_scores(log_probs: Tensor, rows: Sequence[Row]) -> Tensor:
    """The scores that `choose_matched` maximises: log probabilities, plus Gumbel noise unless greedy.

    Args, shapes: see there.

    Returns:
        [num_rows, vocab_size]; float64 if any row has noise, which keeps the order within the other rows.
    """
    noisy = [i for i, row in enumerate(rows) if not row.params.greedy]
    if not noisy:
        return log_probs
    noise = random.gumbel_noise(
        [rows[i].seed for i in noisy],
        [rows[i].position for i in noisy],
        log_probs.shape[1],
        log_probs.device,
    )
    if len(noisy) == len(rows):
        return sampling.gumbel_scores(log_probs, noise)
    scores = log_probs.double()
    index = transfer.indices(noisy, scores.device)
    scores[index] = sampling.gumbel_scores(log_probs[index], noise)
    return scores


def position_logprobs(logits: Tensor, candidates: Sequence[IntArray], num_top: int) -> list[Logprobs]:
    """Log probabilities of each row's candidates and likeliest tokens, before warps and penalties.

    Args:
        logits: [num_rows, vocab_size], raw.
        candidates: [num_rows] arrays of token ids.
        num_top: number of likeliest tokens to report.
    """
    padded = transfer.to_device(pad_ids(candidates), logits.device)
    values, top_ids, top_values = transfer.to_host(*sampling.top_logprobs(logits, padded, num_top))
    return [
        Logprobs(
            np.concatenate([ids, top_ids[i]]),
            np.concatenate([values[i, : len(ids)], top_values[i]]),
            top_ids.shape[1],
        )
        for i, ids in enumerate(candidates)
    ]


def pad_ids(rows: Sequence[IntArray]) -> IntArray:
    """int64 [num_rows, longest row], -1 where a row is shorter."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), -1, dtype=np.int64)
    for out, ids in zip(padded, rows, strict=True):
        out[: len(ids)] = ids
    return padded
