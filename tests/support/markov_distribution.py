"""How well tokens fit the distribution that a Markov target should give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from transformers import (
    RepetitionPenaltyLogitsProcessor,
)

from specwire import Completion, SamplingParams
from tests.support.pairs import MARKOV_VOCAB_SIZE
from tests.support.parameters import warped

PROMPT = [3]
FEW = {i: -100.0 for i in range(MARKOV_VOCAB_SIZE) if i not in (1, 4, 9)}
"""Biases that leave three tokens, so that three successive ones are tested for their joint distribution."""
_LEAST_EXPECTED = 5.0
Allowed = Callable[[Sequence[int]], npt.NDArray[np.bool_]]


def fit_p_value(
    completions: list[Completion],
    logits: torch.Tensor,
    params: SamplingParams,
    num_before: int = 1,
    allowed: Allowed | None = None,
) -> float:
    """How well the tokens fit the distribution that these parameters make of the target's logits.

    Args:
        num_before: tokens before that they are grouped by. With two, three successive tokens are tested for
            their joint distribution; that takes few possible tokens, or many generated ones.
        allowed: of a grammar, which tokens may follow those of the output.
    """
    size = MARKOV_VOCAB_SIZE
    excess: defaultdict[tuple[int, ...], Any] = defaultdict(lambda: np.zeros(size))
    expected: defaultdict[tuple[int, ...], Any] = defaultdict(lambda: np.zeros(size))
    covariance: defaultdict[tuple[int, ...], Any] = defaultdict(lambda: np.zeros((size, size)))
    for done in completions:
        tokens = [*PROMPT, *done.token_ids]
        rows = reference_distributions(tokens, logits, params, allowed)
        for i, (token_id, probs) in enumerate(zip(done.token_ids, rows, strict=True), start=1):
            if probs[token_id] == 0:
                return 0.0
            before = tuple(tokens[max(0, i - num_before) : i])
            excess[before] -= probs
            excess[before][token_id] += 1
            expected[before] += probs
            covariance[before] += np.diag(probs) - np.outer(probs, probs)
    statistic, freedom = 0.0, 0
    for before, each in excess.items():
        pool = _pool(expected[before])
        if len(pool) < 2:
            continue
        deviation, spread = pool @ each, pool @ covariance[before] @ pool.T
        inverse = np.linalg.pinv(spread, rcond=1e-6, hermitian=True)
        statistic += float(deviation @ inverse @ deviation)
        freedom += np.linalg.matrix_rank(spread, tol=1e-6 * max(spread.max(), 1e-300), hermitian=True)
    assert freedom > 0, "nothing was left to chance"
    return float(stats.chi2.sf(statistic, freedom))


def _pool(expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[num_cells, vocab_size] which tokens are counted together, so that 5 of each cell are expected.

    A token of which 0.003 are expected occurs once in one of 300 runs, and would be a p-value of 1e-60.
    """
    cells: list[npt.NDArray[np.float64]] = []
    held = np.zeros(len(expected))
    for token_id in np.argsort(expected):
        held[token_id] = 1
        if held @ expected >= _LEAST_EXPECTED:
            cells.append(held)
            held = np.zeros(len(expected))
    if held.any() and cells:
        cells[-1] = cells[-1] + held
    return np.array(cells or [held])


def reference_distributions(
    tokens: list[int], logits: torch.Tensor, params: SamplingParams, allowed: Allowed | None = None
) -> np.ndarray:
    """float64 [len(tokens) - 1, vocab_size]: of each output token, by transformers' own classes."""
    scores = logits[tokens[:-1]].clone()
    for token_id, bias in params.logit_bias.items():
        scores[:, token_id] += bias
    history = torch.tensor(tokens)
    if params.repetition_penalty != 1:
        penalise = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        for i in range(len(scores)):
            scores[i] = penalise(history[None, : i + 1], scores[i : i + 1])[0]
    counts = torch.zeros_like(scores)
    for i in range(1, len(scores)):
        counts[i] = counts[i - 1]
        counts[i, tokens[i]] += 1  # tokens[i] is output for i >= len(PROMPT) = 1
    scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    scores[: params.min_tokens, list(params.stop_token_ids)] = -torch.inf
    if allowed is not None:
        masks = [allowed(tokens[1:i]) for i in range(1, len(tokens))]
        scores[~torch.from_numpy(np.stack(masks))] = -torch.inf
    return torch.softmax(warped(scores, params).double(), dim=-1).numpy()
