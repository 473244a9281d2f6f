"""Which cases of a test are in `make test`."""

from __future__ import annotations

import pytest

from tests.support.sample import chosen


@pytest.mark.parametrize(("num_cases", "count"), [(1, 1), (2, 1), (4, 2), (12, 4), (40, 14), (3, 5)])
def test_as_many_as_are_wanted_with_the_first(num_cases: int, count: int) -> None:
    kept = chosen(num_cases, count)
    assert len(kept) == min(num_cases, count)
    assert 0 in kept
    assert all(place < num_cases for place in kept)


def test_of_a_table_different_rows_and_columns() -> None:
    num_columns = 4
    kept = chosen(3 * num_columns, 4)
    assert len({place % num_columns for place in kept}) == num_columns
    assert len({place // num_columns for place in kept}) == 3
