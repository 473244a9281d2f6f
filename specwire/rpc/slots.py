"""How many calls each caller may have open. For one event loop; knows no grpc."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

from specwire.errors import ResourceExhaustedError

_RETRY_AFTER_MS = 1_000


class Slots:
    """Slots that open calls hold, counted for each key that has a limit: a caller, a connection.

    Args:
        what: the plural noun of what is counted, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def held(self, limits: Mapping[str, int]) -> Iterator[None]:
        """Hold a slot of each key while the body runs.

        Args:
            limits: key to its number of slots.

        Raises:
            ResourceExhaustedError: a key has no slot left.
        """
        for key, most in limits.items():
            if self._held[key] >= most:
                problem = f"{most} {self._what} of {key} are open, which is the most"
                raise ResourceExhaustedError(problem, _RETRY_AFTER_MS)
        self._held.update(limits.keys())
        try:
            yield
        finally:
            self._held.subtract(limits.keys())
            for key in limits:
                if not self._held[key]:
                    del self._held[key]
