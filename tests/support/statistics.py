"""Goodness of fit for the exactness tests, over pure functions and over the wire alike.

All tests of this kind use fixed seeds: a false alarm can occur once, when a test is written, and
never in a later run of the same code. `FALSE_ALARM_RATE` is the bound for one test function as a whole;
a test that compares k distributions hands each 1/k of it (Bonferroni).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import stats

FALSE_ALARM_RATE = 1e-6
"""Chance that one test function with random seeds would fail on right code."""
CLEARLY_WRONG = 1e-9
"""A negative control counts as caught below this p-value."""
_MIN_EXPECTED = 5.0
"""Cells expected rarer than this are pooled: the usual bound for the chi-square approximation."""


def chi_square_p_value(counts: npt.ArrayLike, expected_probs: npt.ArrayLike) -> float:
    """Pearson's chi-square test of counts against a distribution, rare cells pooled.

    Args:
        counts: [...] how often each outcome came up.
        expected_probs: same shape; sums to 1.

    Returns:
        Chance of a fit at least this bad; exactly 0 where an impossible outcome came up.
    """
    seen = np.asarray(counts, dtype=np.float64).ravel()
    expected = np.asarray(expected_probs, dtype=np.float64).ravel()
    assert seen.shape == expected.shape
    assert abs(expected.sum() - 1) < 1e-5, f"the reference distribution sums to {expected.sum()}"
    if seen[expected == 0].any():
        return 0.0
    seen, expected = seen[expected > 0], expected[expected > 0]
    seen, expected = _pool(seen, expected / expected.sum() * seen.sum())
    if len(seen) < 2:
        return 1.0
    statistic = float(((seen - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(seen) - 1))


def _pool(
    seen: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Merge the rarest cells into one that is expected often enough."""
    order = np.argsort(expected, kind="stable")
    seen, expected = seen[order], expected[order]
    num_rare = int((expected < _MIN_EXPECTED).sum())
    while 0 < num_rare < len(expected) and expected[:num_rare].sum() < _MIN_EXPECTED:
        num_rare += 1
    if num_rare == 0:
        return seen, expected
    return (
        np.append(seen[num_rare:], seen[:num_rare].sum()),
        np.append(expected[num_rare:], expected[:num_rare].sum()),
    )


def sequence_p_values(sequences: npt.NDArray[np.int64], joint_probs: npt.NDArray[np.float64]) -> list[float]:
    """p-values of the distribution at every position, then of the whole sequences.

    Args:
        sequences: [num_sequences, num_positions] token ids.
        joint_probs: [vocab_size] * num_positions, the probability of every sequence.
    """
    num_positions = sequences.shape[1]
    counts = np.zeros(joint_probs.shape)
    np.add.at(counts, tuple(sequences.T), 1)
    p_values = []
    for position in range(num_positions):
        others = tuple(axis for axis in range(num_positions) if axis != position)
        p_values.append(chi_square_p_value(counts.sum(axis=others), joint_probs.sum(axis=others)))
    return [*p_values, chi_square_p_value(counts, joint_probs)]


def assert_same_distribution(
    sequences: npt.NDArray[np.int64], joint_probs: npt.NDArray[np.float64], num_tests: int = 1
) -> None:
    """Fail where sequences do not follow a distribution, at any position or as a whole.

    Args:
        sequences: [num_sequences, num_positions] token ids.
        joint_probs: [vocab_size] * num_positions.
        num_tests: calls that share `FALSE_ALARM_RATE`.
    """
    p_values = sequence_p_values(sequences, joint_probs)
    bound = FALSE_ALARM_RATE / (len(p_values) * num_tests)
    assert min(p_values) > bound, f"p-values by position, then jointly: {p_values}; bound {bound}"
