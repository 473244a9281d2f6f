"""Sampling steps that draft and verify share, over the rows of a step's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specwire.core import Logprobs
from specwire.rule import random, sampling, transfer
from specwire.rule.columns import GREEDY, Places, Rows, padded
from specwire.support import IntArray


def take_rows(rows: Tensor, places: Places) -> Tensor:
    """Some rows of a tensor; the tensor itself when all are wanted."""
    return rows if isinstance(places, slice) else rows[transfer.to_device(places, rows.device)]


def uniforms_for(rows: Rows, stream: random.Purpose, device: torch.device) -> Tensor:
    """One uniform number a row, float64 [num_rows] in [0, 1)."""
    return transfer.to_device(random.uniforms(rows.seeds, stream, rows.positions, rows.bases), device)


def choose_matched(log_probs: Tensor, rows: Rows) -> Tensor:
    """Each row's token where tokens are matched: the likeliest, or the Gumbel-max draw.

    Args:
        log_probs: [num_rows, vocab_size], after history and warps.
        rows: [num_rows], each greedy or under Gumbel coupling.

    Returns:
        int64 [num_rows].
    """
    return sampling.greedy(matched_scores(log_probs, rows))


def matched_scores(log_probs: Tensor, rows: Rows) -> Tensor:
    """The scores that `choose_matched` maximises: log probabilities, plus Gumbel noise unless greedy.

    Args, shapes: see there.

    Returns:
        [num_rows, vocab_size]; float64 if any row has noise, which keeps the order within the other rows.
    """
    noisy = rows.having(GREEDY, wanted=False)
    if noisy is None:
        return log_probs
    some = rows.take(noisy)
    keys = some.seeds, some.positions, some.nums_lists
    noise = coupled_noise(*keys, log_probs.shape[1], log_probs.device)
    if isinstance(noisy, slice):
        return sampling.gumbel_scores(log_probs, noise)
    scores = log_probs.double()
    places = transfer.to_device(noisy, scores.device)
    scores[places] = sampling.gumbel_scores(log_probs[places], noise)
    return scores


def coupled_noise(
    seeds: IntArray, positions: IntArray, nums_lists: IntArray, vocab_size: int, device: torch.device
) -> Tensor:
    """The noise that tokens are drawn with under Gumbel coupling: of several lists, the largest number.

    The largest of n independent standard Gumbel numbers is one plus log(n), so the draw has the same
    distribution for any number of lists. `random.gumbel_noise` itself where there is one. Where there are
    several, siblings of a tree share what is computed.

    Args:
        seeds, positions, nums_lists: int64 [num_rows].

    Returns:
        float64 [num_rows, vocab_size].
    """
    if nums_lists.max(initial=1) == 1:
        return random.gumbel_noise(seeds, positions, vocab_size, device)
    (seeds, positions, nums_lists), places = _distinct(seeds, positions, nums_lists)
    noise = random.gumbel_noise(seeds, positions, vocab_size, device)
    for index in range(1, nums_lists.max()):
        having = np.flatnonzero(nums_lists > index)
        more = random.gumbel_noise(seeds[having], positions[having], vocab_size, device, index)
        where = transfer.to_device(having, noise.device)
        noise[where] = torch.maximum(noise[where], more)
    return noise[transfer.to_device(places, noise.device)]


class Drawn(NamedTuple):
    """A draft token of each row, and the support that it was drawn from, on the device.

    Attributes:
        token_ids: int64 [num_rows]; -1 where no logit is finite.
        ids: int64 [num_rows, k], best first.
        probs: float32 [num_rows, k].
        lengths: int64 [num_rows], how many of these are in the support: the first ones, at least one. Where
            no logit is finite the draft is certain of token 0, a distribution like any other.
    """

    token_ids: Tensor
    ids: Tensor
    probs: Tensor
    lengths: Tensor


def draw_supported(log_probs: Tensor, rows: Rows, mass: float, max_support: int) -> tuple[Drawn, Tensor]:
    """Truncate first, then sample from exactly the numbers that are sent.

    Args:
        log_probs: [num_rows, vocab_size], after history and warps.
        mass, max_support: see `sampling.truncate_support`.

    Returns:
        What was drawn; and the ids with -1 beyond each support, and for rows without one.
    """
    ids, probs, lengths = sampling.truncate_support(log_probs.exp(), mass, max_support)
    columns = sampling.draw(probs, uniforms_for(rows, random.Purpose.DRAFT, probs.device))
    in_support = ids.masked_fill(~(probs > 0), -1)
    token_ids = in_support.gather(1, columns[:, None])[:, 0]
    is_there = lengths > 0
    ids[:, 0], probs[:, 0] = ids[:, 0].where(is_there, 0), probs[:, 0].where(is_there, 1)
    return Drawn(token_ids, ids, probs, lengths.clamp(min=1)), in_support


class Race(NamedTuple):
    """A draw with some of the lists of noise that a row has.

    Attributes:
        row: that the token follows.
        lists: at least one.
    """

    row: int
    lists: Sequence[int]


def raced_scores(log_probs: Tensor, rows: Rows, races: Sequence[Race]) -> Tensor:
    """The scores whose argmax is the token of each race.

    Races over different lists are independent draws from the row's distribution, and the best score of races
    over all of its lists is that of `matched_scores`.

    Args:
        log_probs: [num_rows, vocab_size], after history and warps.
        rows: [num_rows].

    Returns:
        float64 [num_races, vocab_size].
    """
    width = max(len(race.lists) for race in races)
    lists = np.array([[*race.lists, *[race.lists[0]] * (width - len(race.lists))] for race in races])
    at = np.array([race.row for race in races])
    keys, places = _distinct(rows.seeds[at].repeat(width), rows.positions[at].repeat(width), lists.ravel())
    noise = random.gumbel_noise(keys[0], keys[1], log_probs.shape[1], log_probs.device, keys[2])
    largest = noise[transfer.to_device(places.reshape(lists.shape), noise.device)].amax(dim=1)
    return sampling.gumbel_scores(take_rows(log_probs, at), largest)


def _distinct(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """Different columns of [n] arrays, [num_arrays, num_different], and which of them each place has, [n]."""
    found, places = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return found, places.reshape(-1)


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
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return padded(np.concatenate([np.empty(0, np.int64), *rows]), lengths, -1)
