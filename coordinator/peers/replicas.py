"""Several processes of one model service, and which of them a new stream goes to. Knows no grpc."""

from __future__ import annotations

import abc
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from specwire.core import ModelInfo
from specwire.estimate import clock
from specwire.estimate.costs import CostModel

if TYPE_CHECKING:
    from coordinator.peers.streams import Call

log = logging.getLogger(__name__)

_PAGE_LEN = 64
_MAX_PAGES = 128
_MAX_KNOWN_PAGES = 1 << 14
_SLACK_RATIO = 1.5
_SLACK_STREAMS = 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Replica(abc.ABC):
    """One process of a model service, as this coordinator knows it.

    Attributes:
        role: "verify" or "draft".
        address: HOST:PORT.
        info: what it said in the last handshake; None before the first.
        unavailable: why no new stream goes there; empty when one may.
        refused: whether that is because it does not fit.
        was_asked: whether the first handshake has ended, either way.
        is_leaving: whether its address is not listed any more: it is closed with its last stream.
        num_streams: streams that this coordinator has open there.
        num_others: streams of others, as the service said last.
        num_lost: how often it was there and then was not.
        num_failures: how often it was lost since it last answered a request.
        costs: of a proposal there, in nanoseconds: its tokens, and committed ones that were new.
        on_change: called when `unavailable` has become or ceased to be empty, and after the first handshake.
    """

    def __init__(self, role: str, address: str) -> None:
        self.role = role
        self.address = address
        self.info: ModelInfo | None = None
        self.unavailable = "has not answered yet"
        self.refused: Exception | None = None
        self.was_asked = self.is_leaving = False
        self.num_streams = self.num_others = self.num_lost = self.num_failures = 0
        self.costs = CostModel(2)
        self._not_before_s = 0.0
        self.last_taken = 0
        self.on_change: Callable[[], None] = lambda: None

    @property
    def load(self) -> int:
        """Streams open there, of this coordinator and of others."""
        return self.num_streams + self.num_others

    @property
    def is_proven(self) -> bool:
        """Whether it has answered since it was lost, if it ever was. A handshake proves no device."""
        return not self.num_failures

    @abc.abstractmethod
    def open_stream(self, timeout_s: float | None) -> Call:
        """One sequence's stream; `timeout_s` is its deadline, None for none."""

    async def close(self) -> None:  # noqa: B027 - not every kind holds something
        """Let go of it."""

    def came(self, info: ModelInfo) -> None:
        """A handshake succeeded: new streams may go there, at the end of its pause."""
        if clock.stopwatch_ns() / 1e9 < self._not_before_s:
            return
        was_away = bool(self.unavailable)
        if was_away and self.was_asked:
            log.warning("%s service %s is back", self.role, self.address)
        self.info, self.unavailable, self.refused, self.was_asked = info, "", None, True
        if was_away:
            self.on_change()

    def left(self, reason: str) -> None:
        """It takes no new streams and finishes those that it has; or it is not there yet."""
        if not self.unavailable or not self.was_asked:
            log.warning("%s service %s: %s", self.role, self.address, reason)
        self.unavailable, self.was_asked = reason, True
        self.on_change()

    def lost(self, reason: str) -> None:
        """It failed, and its streams with it; it is used again after the next handshake.

        One that was lost again before it had answered anything pauses first, longer each time.
        """
        if not self.unavailable:
            self.num_lost += 1
            self.num_failures += 1
            pause_s = _FIRST_PAUSE_S * 2 ** (self.num_failures - 2) if self.num_failures > 1 else 0.0
            self._not_before_s = clock.stopwatch_ns() / 1e9 + min(pause_s, _LONGEST_PAUSE_S)
        self.left(reason)

    def answered(self) -> None:
        """It answered a request: its device computes."""
        if self.num_failures:
            self.num_failures = 0
            self.on_change()

    def misfits(self, error: Exception) -> None:
        """It is there, and cannot be used."""
        is_news = str(error) != str(self.refused)
        self.refused, self.unavailable, self.was_asked = error, str(error), True
        if is_news:
            log.warning("%s service %s is left out: %s", self.role, self.address, error)
            self.on_change()


AnyReplica = TypeVar("AnyReplica", bound=Replica)


def choose(replicas: Iterable[AnyReplica], holder: str | None = None) -> AnyReplica | None:
    """The replica that a new stream goes to; None if there is none.

    The least loaded one, and of several the one that was taken longest ago; but the one that holds the
    longest beginning of the sequence, unless it has over two more streams than one and a half times those
    of the least loaded.

    Args:
        replicas: all that may take it.
        holder: incarnation of the one that holds it.
    """
    candidates = list(replicas)
    if not candidates:
        return None
    least = min(candidates, key=lambda replica: (replica.load, replica.last_taken))
    most = _SLACK_RATIO * least.load + _SLACK_STREAMS
    holders = (
        replica
        for replica in candidates
        if holder and replica.info and replica.info.incarnation == holder and replica.load <= most
    )
    return next(holders, least)


class SentPrefixes:
    """Which replica was last sent which beginning of a sequence, in pages of 64 tokens.

    Bounded: what was not met for the longest time is forgotten first. Replicas are known by their
    incarnation, since a restarted one holds nothing of what was sent before. A sequence of another salt finds
    nothing there: so where it is placed tells its client nothing about the prompts of others.
    """

    def __init__(self, capacity: int = _MAX_KNOWN_PAGES) -> None:
        self._capacity = capacity
        self._incarnations: OrderedDict[int, str] = OrderedDict()

    def note(self, token_ids: Sequence[int], incarnation: str, salt: str = "") -> None:
        """A sequence that begins with these tokens was sent there."""
        for page in _pages(token_ids, salt):
            self._incarnations[page] = incarnation
            self._incarnations.move_to_end(page)
        while len(self._incarnations) > self._capacity:
            self._incarnations.popitem(last=False)

    def holder(self, token_ids: Sequence[int], incarnations: Collection[str], salt: str = "") -> str | None:
        """Of these incarnations, the one that was sent the longest beginning; None if none was."""
        for page in reversed(_pages(token_ids, salt)):
            found = self._incarnations.get(page)
            if found in incarnations:
                return found
        return None


def _pages(token_ids: Sequence[int], salt: str) -> list[int]:
    """A name for each leading full page, which depends on the salt and all tokens up to its end. Two that
    share a name by chance cost a stream that is placed badly, and nothing else."""
    names: list[int] = []
    for start in range(0, min(len(token_ids) // _PAGE_LEN, _MAX_PAGES) * _PAGE_LEN, _PAGE_LEN):
        page = tuple(token_ids[start : start + _PAGE_LEN])
        names.append(hash((names[-1] if names else salt, page)))
    return names
