"""Names of blocks, and where proposals end that a target drafts without some of its layers."""

from __future__ import annotations

import pytest

from specwire.config.blocks import Block, check_layers, parse_skip, skip_text
from specwire.errors import ConfigError
from verify_service.threshold import Threshold


def test_names_of_blocks() -> None:
    found = parse_skip("layers", "m3, a3,m12")
    assert found == (Block(3, "a"), Block(3, "m"), Block(12, "m"))
    assert parse_skip("layers", skip_text(found)) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [("3", "'3' is no block"), ("a3,", "'' is no block"), ("a03", "is no block"), ("a3,a3", "a block twice")],
)
def test_what_names_no_blocks(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_layers("layers", text)


def test_the_threshold_rises_where_proposals_are_refused_and_falls_where_they_are_not() -> None:
    """Up to its bounds, and it stays where a proposal was right and as long as it might be."""
    threshold = Threshold()
    first = threshold.value
    threshold.learn(0, 4, was_longest=True)
    assert threshold.value == pytest.approx(first + 0.001)
    for _ in range(10):
        threshold.learn(4, 4, was_longest=True)
    kept = threshold.value
    threshold.learn(4, 4, was_longest=True)
    assert threshold.value == kept
    threshold.learn(2, 2, was_longest=False)
    assert threshold.value == pytest.approx(kept - 0.001)
    for _ in range(2000):
        threshold.learn(0, 1, was_longest=False)
    assert threshold.value == 1.0
