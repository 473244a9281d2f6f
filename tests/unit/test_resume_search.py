"""Where a client looks for a coordinator after a loss, for how long, and what it may be told."""

from __future__ import annotations

from typing import Any

import pytest

from specwire import (
    Client,
    InvalidRequestError,
    ResourceExhaustedError,
    RetryPolicy,
    ServiceUnavailableError,
    StreamIdleError,
)
from specwire.client.arguments import addresses
from specwire.client.resume import NotServedError, Search


def gone(*, may_recover: bool = True) -> NotServedError:
    return NotServedError(ServiceUnavailableError("gone"), may_recover=may_recover)


def full(retry_after_ms: int) -> NotServedError:
    return NotServedError(ResourceExhaustedError("full", retry_after_ms), may_recover=False)


class TestSearch:
    """Which address is asked when."""

    @staticmethod
    def search(num: int, refusal: NotServedError, until_s: float, full_until_s: float = -1e9) -> Search:
        policy = RetryPolicy(pause_s=1.0)
        return Search(policy, num, 0, refusal, until_s=until_s, full_until_s=full_until_s)

    @staticmethod
    def turns(search: Search, num: int) -> list[tuple[int, float]]:
        """Each one is refused."""
        turns = []
        for _ in range(num):
            turn = search.next(now_s=0.0)
            assert turn is not None
            search.refused(turn[0], gone())
            turns.append(turn)
        return turns

    def test_the_others_first_then_all_with_pauses_that_double(self) -> None:
        search = self.search(3, gone(), until_s=100.0)
        assert self.turns(search, 8) == [(1, 0), (2, 0), (1, 1.0), (2, 0), (0, 0), (1, 2.0), (2, 0), (0, 0)]

    def test_an_idle_stream_goes_on_where_it_was_and_at_once(self) -> None:
        idle = NotServedError(StreamIdleError("no token was taken"), may_recover=True)
        search = self.search(3, idle, until_s=100.0)
        assert self.turns(search, 4) == [(0, 0), (1, 0), (2, 0), (0, 1.0)]

    def test_pauses_are_bounded(self) -> None:
        search = self.search(1, gone(), until_s=1e9)
        pauses = [search.next(0.0) for _ in range(10)]
        assert pauses[-1] == (0, 10.0)

    def test_ends_in_time(self) -> None:
        assert self.search(1, gone(), until_s=5.0).next(4.5) is None
        assert self.search(1, gone(), until_s=5.0).next(3.5) == (0, 1.0)

    def test_without_patience_every_other_address_is_asked_once(self) -> None:
        search = self.search(2, gone(), until_s=-1e9)
        assert search.next(0.0) == (1, 0.0)
        search.refused(1, gone())
        assert search.next(0.0) is None
        assert isinstance(search.error, ServiceUnavailableError)

    def test_who_said_no_is_not_asked_again(self) -> None:
        search = self.search(2, gone(may_recover=False), until_s=100.0)
        assert search.next(0.0) == (1, 0.0)
        search.refused(1, gone())
        assert search.next(0.0) == (1, 1.0)
        search.refused(1, gone(may_recover=False))
        assert search.next(0.0) is None

    def test_who_is_full_is_asked_when_they_say(self) -> None:
        search = self.search(1, full(300), until_s=-1e9, full_until_s=100.0)
        assert search.next(0.0) == (0, 0.3)
        search.refused(0, full(500))
        assert search.next(99.6) is None
        assert isinstance(search.error, ResourceExhaustedError)
        assert search.error.retry_after_ms == 500

    def test_being_full_is_the_most_helpful_answer(self) -> None:
        search = self.search(2, gone(), until_s=-1e9)
        search.refused(1, full(20))
        assert isinstance(search.error, ResourceExhaustedError)


@pytest.mark.parametrize("field", ["patience_s", "pause_s", "max_resumes"])
def test_a_policy_that_cannot_be(field: str) -> None:
    negative: dict[str, Any] = {field: -1}
    with pytest.raises(InvalidRequestError, match=field):
        RetryPolicy(**negative)


def test_addresses_as_people_write_them() -> None:
    assert addresses("a:1, b:2") == addresses(["a:1", "b:2"]) == ("a:1", "b:2")
    with pytest.raises(InvalidRequestError, match="address=b: is not HOST:PORT"):
        Client("a:1,b")
    with pytest.raises(InvalidRequestError, match="address"):
        Client([])
