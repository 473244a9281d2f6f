"""Fixtures in a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import pytest


def entered(
    make: Callable[[], AbstractContextManager[Any]], *, scope: Literal["module", "function"] = "module"
) -> Any:
    """What a context manager yields, once for the tests of a file, or for each test."""

    @pytest.fixture(scope=scope)
    def fixture() -> Iterator[Any]:
        with make() as found:
            yield found

    return fixture
