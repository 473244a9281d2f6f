"""Supports: draft distributions on few tokens, as arrays. A client loads `core.py`, and no numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Support:
    """A draft distribution on the finite set of tokens where it is non-zero.

    Attributes:
        token_ids: int64 [support_size], distinct.
        probs: float32 [support_size], positive: exactly those that the draft token was sampled from.
    """

    token_ids: IntArray
    probs: FloatArray


NO_SUPPORT = Support(np.empty(0, np.int64), np.empty(0, np.float32))
_ONE = np.ones(1, dtype=np.float32)


def certain(token_ids: Iterable[int]) -> list[Support]:
    """Of each token, the distribution that has nothing else."""
    return [Support(np.array([token_id]), _ONE) for token_id in token_ids]
