"""From logits to tokens: processors, warps, draws and supports, for rows of many requests at once.

Every function takes and returns tensors and draws no random numbers of its own. One row is one position
of one sequence; the rows of a batch have different parameters, and a feature that no row uses costs nothing.
Nothing here waits for the device: no value is read back to the host.

The order is that of transformers' `generate`: `apply_history` (logit bias, penalties, grammar), `apply_warps`
(temperature, top-k, top-p, min-p), then a draw. The draft truncates its distribution *before* it samples
(`truncate_support`); the target's is reported on that support (`judge_support`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from specwire.core import check_token_id
from specwire.rule.columns import GREEDY, Doubles, Row, Rows
from specwire.rule.transfer import to_device
from specwire.support import IntArray


def apply_history(logits: Tensor, rows: Rows) -> Tensor:
    """Add logit biases, apply the penalties, exclude early ends, then what a grammar does not allow.

    The repetition penalty (Keskar et al. 2019, arXiv 1909.05858, as transformers defines it) counts
    prompt and output; the other two count the output only. Tokens outside the vocabulary, which a padded
    draft vocabulary may contain, are skipped.

    Args:
        logits: [num_rows, vocab_size], not modified.
        rows: [num_rows].

    Returns:
        `logits` itself if no row uses any of these, else a new float32 tensor.

    Raises:
        InvalidRequestError: a biased token is not in the vocabulary. Services refuse such a request when its
            stream opens, since an error here fails the whole batch.
    """
    edited = rows.edited
    if not edited:
        return logits
    scores = logits.to(torch.float32, copy=True)
    biases, repeated, counted, ends = (list[_Edit]() for _ in range(4))
    for index, row in edited.items():
        params, num_known = row.params, scores.shape[1]
        if bias := params.logit_bias:
            check_token_id(f"logit_bias[{max(bias)}]", max(bias), num_known)
            token_ids = np.fromiter(bias.keys(), np.int64)
            biases.append(_Edit(index, token_ids, np.fromiter(bias.values(), np.float64)))
        if params.repetition_penalty != 1:
            token_ids = np.unique(np.asarray(row.history, dtype=np.int64))
            repeated.append(_Edit(index, token_ids[token_ids < num_known], params.repetition_penalty))
        presence, frequency = params.presence_penalty, params.frequency_penalty
        if presence != 0 or frequency != 0:
            output = np.asarray(row.history[row.prompt_len :], dtype=np.int64)
            token_ids, counts = np.unique(output[output < num_known], return_counts=True)
            counted.append(_Edit(index, token_ids, presence + frequency * counts))
        if row.position - row.prompt_len < params.min_tokens:  # tokens that would end an output
            token_ids = np.unique(np.array(params.stop_token_ids, np.int64))
            ends.append(_Edit(index, token_ids[token_ids < num_known], -np.inf))
    _edit(scores, biases, torch.add)
    _edit(scores, repeated, lambda old, penalty: torch.where(old < 0, old * penalty, old / penalty))
    _edit(scores, counted, torch.sub)
    _edit(scores, ends, torch.add)
    _apply_masks(scores, edited)
    return scores


def _apply_masks(scores: Tensor, rows: Mapping[int, Row]) -> None:
    """Exclude, in place, what grammars do not allow; all rows in one transfer."""
    found = {i: row.masks.of_row(row.mask_row) for i, row in rows.items() if row.masks is not None}
    masks = {i: mask for i, mask in found.items() if mask is not None}
    if not masks:
        return
    bits = to_device(np.stack([*masks.values()]), scores.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=scores.device)
    allowed = (bits[:, :, None] >> shifts & 1).bool().flatten(1)
    width = scores.shape[1]
    allowed = F.pad(allowed, (0, max(0, width - allowed.shape[1])))[:, :width]
    places = to_device(np.array([*masks], np.int64), scores.device)
    scores[places] = scores[places].masked_fill(~allowed, -torch.inf)


class _Edit(NamedTuple):
    """Values for distinct tokens of one row, or one for all of them."""

    row: int
    token_ids: IntArray
    values: npt.NDArray[np.floating[Any]] | float


def _edit(scores: Tensor, edits: Sequence[_Edit], combine: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace scores by `combine(score, value)`, in place, all rows in one transfer and one scatter."""
    if not edits:
        return
    lengths = [len(edit.token_ids) for edit in edits]
    where = np.stack(
        [np.repeat([edit.row for edit in edits], lengths), np.concatenate([edit.token_ids for edit in edits])]
    )
    at_row, at_token = to_device(where, scores.device)
    each = [np.broadcast_to(np.asarray(edit.values, np.float64), len(edit.token_ids)) for edit in edits]
    values = to_device(np.concatenate(each), scores.device).to(scores.dtype)
    scores[at_row, at_token] = combine(scores[at_row, at_token], values)


def apply_warps(logits: Tensor, rows: Rows) -> Tensor:
    """Temperature, top-k, top-p and min-p, in this order and as transformers' warpers define them.

    Greedy rows pass through: only their argmax counts, and rounding in log_softmax could make close logits
    equal.

    Args:
        logits: [num_rows, vocab_size], not modified.
        rows: [num_rows].

    Returns:
        float32 log probabilities [num_rows, vocab_size], -inf where a token is excluded; of greedy rows the
        logits. A row without a finite maximum had logits that are not finite, or overflowed.
    """
    scores = logits.float()
    greedy_rows = rows.having(GREEDY)
    if isinstance(greedy_rows, slice):
        return scores
    if rows.warps is not None:
        scores = _warped(scores, rows.warps)
    log_probs = torch.log_softmax(scores, dim=-1)
    if greedy_rows is None:
        return log_probs
    places = to_device(greedy_rows, scores.device)
    return log_probs.index_copy(0, places, scores[places])


def _warped(scores: Tensor, warps: Doubles) -> Tensor:
    """Scores after the warps [num_rows, len(WARPS)] of `columns.Encoded`."""
    temperatures, top_ks, top_ps, min_ps = warps.T
    if (temperatures != 1).any():
        scores = scores / _column(temperatures, scores)
    scores = _exclude(scores, top_ks, (top_ks > 0) & (top_ks < scores.shape[1]), _outside_top_k)
    scores = _exclude(scores, top_ps, top_ps < 1, _outside_top_p)
    return _exclude(scores, min_ps, min_ps > 0, _below_min_p)


def warped_on_device(scores: Tensor, warps: Tensor) -> Tensor:
    """As `apply_warps` for a draft, whose tokens are judged: nothing depends on a value of the host.

    Args:
        scores: float32 [num_rows, vocab_size].
        warps: float32 [num_rows, len(WARPS)], see `columns.Encoded`.

    Returns:
        float32 log probabilities [num_rows, vocab_size], -inf where a token is excluded.
    """
    temperatures, top_ks, top_ps, min_ps = warps[:, :, None].unbind(1)
    ordered, order = torch.sort(scores / temperatures, dim=-1, descending=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    kept = ordered.masked_fill((top_ks > 0) & (rank >= top_ks), -torch.inf)
    probs = kept.softmax(dim=-1)
    is_out = (probs.cumsum(dim=-1) - probs >= top_ps) | (probs < min_ps * probs[:, :1])
    kept = kept.masked_fill(is_out & (rank > 0), -torch.inf)
    return torch.empty_like(kept).scatter(1, order, kept).log_softmax(dim=-1)


def _column(values: Doubles, like: Tensor) -> Tensor:
    """[num_rows, 1], of the device and type of `like`."""
    return to_device(np.ascontiguousarray(values), like.device).to(like.dtype)[:, None]


def _exclude(
    scores: Tensor,
    settings: Doubles,
    is_set: npt.NDArray[np.bool_],
    rule: Callable[[Tensor, Doubles], Tensor],
) -> Tensor:
    """Set to -inf what `rule` excludes in the rows that have a setting; the other rows cost nothing."""
    if not is_set.any():
        return scores
    if is_set.all():
        return scores.masked_fill(rule(scores, settings), -torch.inf)
    chosen = to_device(np.flatnonzero(is_set), scores.device)
    part = scores[chosen]
    return scores.index_copy(0, chosen, part.masked_fill(rule(part, settings[is_set]), -torch.inf))


def _outside_top_k(scores: Tensor, top_ks: Doubles) -> Tensor:
    """Below the k-th largest score; ties with it stay."""
    counts = top_ks.astype(np.int64)
    largest = torch.topk(scores, int(counts.max()), dim=-1).values
    last = to_device(counts, scores.device)[:, None] - 1
    return scores < largest.gather(1, last)


def _outside_top_p(scores: Tensor, top_ps: Doubles) -> Tensor:
    """The least likely tokens whose total mass is at most 1 - p; the likeliest token always stays."""
    ordered, order = torch.sort(scores, dim=-1)
    excluded = ordered.softmax(dim=-1).cumsum(dim=-1) <= _column(1 - top_ps, scores)
    excluded[:, -1] = False
    return torch.zeros_like(excluded).scatter(1, order, excluded)


def _below_min_p(scores: Tensor, min_ps: Doubles) -> Tensor:
    """Less likely than min_p times the likeliest token."""
    probs = scores.softmax(dim=-1)
    return probs < _column(min_ps, scores) * probs.amax(dim=-1, keepdim=True)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverting the cumulative distribution in float64.

    A token of probability zero is never drawn: not at u = 0, not where u times the total rounds up to
    the total, and not where a parallel sum on a device is not quite monotone.

    Args:
        probs: [num_rows, n], not negative, normalised or not.
        uniforms: float64 [num_rows] in [0, 1).

    Returns:
        int64 [num_rows]: indices into the rows; 0 for a row of zeros.
    """
    cumulative = probs.double().cumsum(dim=-1).masked_fill_(probs <= 0, 0)
    total = cumulative.amax(dim=-1, keepdim=True)
    threshold = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative > threshold).to(torch.uint8).argmax(dim=-1)


def truncate_support(probs: Tensor, mass: float, max_support: int) -> tuple[Tensor, Tensor, Tensor]:
    """Truncate each distribution to few tokens; the draft then samples from exactly what this returns.

    Keeps the smallest set of likeliest tokens that holds `mass`, at most `max_support` of them. A vocabulary
    no larger than `max_support` keeps every token of positive probability.

    Args:
        probs: float32 [num_rows, vocab_size].
        mass: in (0, 1], as a share of each row's total.
        max_support: in tokens, at least 1.

    Returns:
        The likeliest token ids, int64 [num_rows, k], best first; their probabilities, float32 [num_rows, k],
        renormalised, 0 for those that are not kept; and int64 [num_rows], how many are kept, which are the
        first ones. k is `min(vocab_size, max_support)`.
    """
    vocab_size = probs.shape[1]
    likeliest, token_ids = torch.topk(probs, min(vocab_size, max_support), dim=-1)
    kept = likeliest.double()
    if vocab_size > max_support:
        wanted = mass * probs.sum(dim=-1, keepdim=True, dtype=torch.float64)
        held_before = kept.cumsum(dim=-1) - kept
        beyond = held_before >= wanted
        beyond[:, 0] = False  # rounding must not leave a row empty
        kept = kept.masked_fill(beyond, 0)
    declared = (kept / kept.sum(dim=-1, keepdim=True)).float()
    return token_ids, declared, (declared > 0).sum(dim=-1)


def judge_support(probs: Tensor, support_ids: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's probabilities on a draft's support, and one token drawn outside the support.

    With an empty support the tail token is a draw from the whole distribution: the bonus token. So draft rows
    and the last row take the same call. Ids outside the vocabulary have probability zero.

    Args:
        probs: float32 [num_rows, vocab_size], the target's distribution.
        support_ids: int64 [num_rows, k], distinct, padded with -1.
        uniforms: float64 [num_rows] in [0, 1), of the stream `TARGET`.

    Returns:
        `target_probs`, float32 [num_rows, k], 0 at the padding; `tail_mass`, float64 [num_rows]; and
        `tail_token`, int64 [num_rows], -1 where no mass lies outside. The sums are normalised in
        float64, so that `target_probs` and `tail_mass` add up to 1.
    """
    vocab_size = probs.shape[1]
    total = probs.sum(dim=-1, keepdim=True, dtype=torch.float64)
    known = (support_ids >= 0) & (support_ids < vocab_size)
    slots = support_ids.masked_fill(~known, vocab_size)
    outside = F.pad(probs, (0, 1))  # the extra column takes the padding
    target_probs = outside.gather(1, slots).double() / total
    outside.scatter_(1, slots, 0)
    # Summed over the tokens outside: 1 minus the mass inside would cancel a small tail.
    tail_mass = outside.sum(dim=-1, dtype=torch.float64) / total[:, 0]
    tail_token = draw(outside, uniforms).masked_fill(tail_mass <= 0, -1)
    return target_probs.float(), tail_mass, tail_token
