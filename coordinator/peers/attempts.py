"""How often, how long and where a request is retried after its stream has failed. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from coordinator.peers.replicas import Replica
from specwire import clock
from specwire.errors import ResourceExhaustedError, ServiceUnavailableError, SpecwireError

RETRY_AFTER_MS = 1000
MAX_FAILURES = 4
"""Streams that may fail in a row for one request; after that many the request may be the cause."""


class Attempts:
    """The failed attempts of one request.

    Attributes:
        failed: replicas whose stream failed, to be used again only if there is no other.
        full: replicas that have no room at the moment.
        num_failures: streams that have failed.
    """

    def __init__(self, timeout_s: float, remaining_s: Callable[[], float | None]) -> None:
        """Waits end `timeout_s` after the first failure, and with the request's deadline.

        Args:
            remaining_s: until that deadline; None without one.
        """
        self.failed: set[Replica] = set()
        self.full: set[Replica] = set()
        self._timeout_s = timeout_s
        self._remaining_s = remaining_s
        self.num_failures = 0
        self._first_ns: int | None = None
        self._last_error: SpecwireError | None = None

    @property
    def has_waited(self) -> bool:
        """Whether a stream has failed, or none could be opened."""
        return self._first_ns is not None

    def wait_s(self) -> float:
        """How long to wait for a replica, in seconds; 0 or less when the time is up."""
        now_ns = clock.stopwatch_ns()
        if self._first_ns is None:
            self._first_ns = now_ns
        left_s = self._timeout_s - (now_ns - self._first_ns) / 1e9
        remaining_s = self._remaining_s()
        return left_s if remaining_s is None else min(left_s, remaining_s)

    def add(self, replica: Replica, error: SpecwireError) -> None:
        """A stream failed there.

        Raises:
            SpecwireError: too many streams have failed, or the replica can never have room.
        """
        self.wait_s()
        self._last_error = error
        if isinstance(error, ResourceExhaustedError):
            if error.retry_after_ms is None:
                raise error
            self.full.add(replica)
            return
        self.num_failures += 1
        self.failed.add(replica)
        if self.num_failures >= MAX_FAILURES:
            raise ServiceUnavailableError(
                f"verify service {replica.address}: the last of {MAX_FAILURES} streams that failed: {error}",
                RETRY_AFTER_MS,
            )

    def give_up(self, reason: str, expected_s: float) -> SpecwireError:
        """The error for the client when no replica is left to try, and one is expected in so many seconds."""
        if isinstance(self._last_error, ResourceExhaustedError):
            return self._last_error
        problem = reason or f"verify service: {self._last_error}"
        return ServiceUnavailableError(problem, math.ceil(expected_s * 1e3))
