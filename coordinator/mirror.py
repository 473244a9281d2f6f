"""What a model service holds of a sequence, as its coordinator knows it. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Mirror:
    """The tokens that the peer of one stream holds.

    held       ├── committed before ──┤├─ draft tokens ─┤
    committed  ├── committed before ──┤├ accepted ┤ x        x: recovered or bonus
                                                 ▲ base_len: everything before is held already
    """

    def __init__(self) -> None:
        self._held: list[int] = []
        self._agreed_len = 0

    def advance(self, committed: Sequence[int], draft: Sequence[int] = ()) -> tuple[int, list[int]]:
        """Note that the peer will hold `committed` and then `draft`; returns what it must be told.

        Returns:
            `base_len`, up to which the peer holds the right tokens, and the committed ones after it.
        """
        base_len, held = self._agreed_len, self._held
        end = min(len(held), len(committed))
        while base_len < end and held[base_len] == committed[base_len]:
            base_len += 1
        del held[base_len:]
        held.extend(committed[base_len:])
        self._agreed_len = len(held)
        held.extend(draft)
        return base_len, list(committed[base_len:])

    def extend(self, committed: Sequence[int], draft: Sequence[int]) -> None:
        """Note draft tokens that the peer added after `committed`, unless it was told of more since."""
        if self._agreed_len == len(committed):
            del self._held[len(committed) :]
            self._held.extend(draft)
