"""Work of an engine's thread that no request waits for, between steps."""

from __future__ import annotations

from typing import Protocol


class SpareWork(Protocol):
    """Work in short pieces. All of it is called on the engine's thread, but for `version`.

    Attributes:
        version: of the model's weights: pages that were computed with others are not found by new sequences.
        usual_s: what a piece usually takes; 0 before the first one.
    """

    version: int
    usual_s: float

    def wait_s(self) -> float | None:
        """How long until a piece is due, 0 if one is; None while there is nothing to do."""

    def do(self) -> None:
        """One piece; must not raise."""


class NoSpareWork:
    """Nothing to do, ever."""

    version = 0
    usual_s = 0.0

    def wait_s(self) -> float | None:
        """See `SpareWork`."""
        return None

    def do(self) -> None:
        """See `SpareWork`."""
