"""Rounds of a target less some layers that are replayed for another threshold."""

from __future__ import annotations

import pytest

from benchmarks.early_exit import Place, replay
from tools.layers.objective import Costs

SURE, UNSURE = 0.9, 0.3


def test_rounds_by_hand() -> None:
    """Six places: at the first two tokens of three are right, at the fourth none, at the fifth all."""
    never = Place([SURE] * 3, 0)
    places = [
        Place([SURE, UNSURE, SURE], 2),
        never,
        never,
        Place([UNSURE, SURE, SURE], 0),
        Place([SURE] * 3, 3),
    ]
    found = replay([places], first=0.5, target_rate=0.9, most=3)
    assert (found.num_drafted, found.num_accepted) == ([2, 1, 3], [2, 0, 3])
    assert found.tokens_a_round == pytest.approx(8 / 3)
    costs = Costs([10.0, 11.0, 12.0, 13.0], 0.0, 0.0)
    assert found.speedup(costs, draft_ms=5.0) == pytest.approx(80 / (22 + 16 + 28))


def test_a_threshold_of_zero_lets_all_through() -> None:
    """And one that begins high ends proposals after their first token; each text begins anew."""
    texts = [[Place([SURE, UNSURE], 2)], [Place([UNSURE, SURE], 1)]]
    assert replay(texts, first=0.0, target_rate=0.9, most=2).num_drafted == [2, 2]
    assert replay(texts, first=0.95, target_rate=0.9, most=2).num_drafted == [1, 1]
