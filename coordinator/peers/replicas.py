"""The replicas of a model service, and which of them a new stream goes to. Knows no grpc."""

from __future__ import annotations

import abc
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from specwire import clock
from specwire.core import ModelInfo
from specwire.proposals.estimate.costs import CostModel

if TYPE_CHECKING:
    from coordinator.peers.link import SharedLink

log = logging.getLogger(__name__)

LOADING = "loads its model"
"""Why a replica is unavailable that will serve by itself."""
_PAGE_LEN = 64
_MAX_PAGES = 128
MAX_KNOWN_PAGES = 1 << 14
_SLACK_RATIO = 1.5
_SLACK_STREAMS = 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_DOUBLINGS = 6
"""After so many the longest pause is reached; a service may fail any number of times."""
_MAX_COST_RATIO = 8.0
"""A proposal that takes so many times what others took is not waited for, whatever it saves."""


class Replica(abc.ABC):
    """One process of a model service, as this coordinator knows it.

    Attributes:
        role: "verify" or "draft".
        address: HOST:PORT.
        info: what it said in the last handshake; None before the first.
        unavailable: why no new stream goes there; empty when one may.
        incompatibility: why it cannot be used at all; None if it can, or that is not known yet.
        was_contacted: whether the first handshake has ended, successfully or not.
        is_leaving: whether its address is no longer listed; it is closed after its last stream.
        num_streams: streams that this coordinator has open there.
        num_other_streams: streams of other coordinators, as the service last reported.
        num_held_pages, num_pages: of its KV cache, held by sequences and in all, as it last reported.
        num_lost: how often it was lost after it had been available.
        num_failures: how often it was lost since it last answered a request.
        is_overdue: whether a proposal was waited for as long as one may take, and nothing arrived since.
        last_used: number of the last stream opened there, among all of its pool.
        on_change: called when `unavailable` becomes empty or non-empty, and after the first handshake.
    """

    def __init__(self, role: str, address: str) -> None:
        self.role = role
        self.address = address
        self.info: ModelInfo | None = None
        self.unavailable = "has not answered yet"
        self.incompatibility: Exception | None = None
        self.was_contacted = self.is_leaving = self.is_overdue = False
        self.num_streams = self.num_other_streams = self.num_lost = self.num_failures = 0
        self.num_held_pages = self.num_pages = 0
        self._costs = CostModel(2)
        self._learnt_from = 0
        self._not_before_s = 0.0
        self.last_used = 0
        self.on_change: Callable[[], None] = lambda: None
        self._link: SharedLink | None = None

    @property
    def load(self) -> int:
        """Streams open there, of all coordinators."""
        return self.num_streams + self.num_other_streams

    @property
    def is_proven(self) -> bool:
        """Whether it has answered a request since it was last lost or overdue. A handshake does not prove its
        device."""
        return not (self.num_failures or self.is_overdue)

    def link(self) -> SharedLink:
        """The stream for new sequences; another one after it was lost."""
        if self._link is None or self._link.error is not None:
            self._link = self._open_link()
        return self._link

    @abc.abstractmethod
    def _open_link(self) -> SharedLink:
        """Open a stream."""

    async def close(self) -> None:
        """Release what it holds."""
        if self._link is not None:
            self._link.close()
            await self._link.ended()

    def longest_s(self, num_steps: int, num_prefill_tokens: int) -> float:
        """How long a proposal may take by what others took, in seconds; 0 before the first one."""
        return self._costs.bound((num_steps, num_prefill_tokens), _MAX_COST_RATIO) / 1e9

    def learn(self, num_steps: int, num_prefill_tokens: int, wall_ns: int, message_number: int) -> None:
        """A proposal took so long. All that came in one message were made together: the first one counts."""
        if message_number == self._learnt_from:
            return
        self._learnt_from = message_number
        self._costs.add((num_steps, num_prefill_tokens), max(1, wall_ns))

    def mark_ready(self, info: ModelInfo) -> None:
        """A handshake succeeded: new streams may go there, after its pause if it has one."""
        if clock.stopwatch_ns() / 1e9 < self._not_before_s:
            return
        was_unavailable = bool(self.unavailable)
        if was_unavailable and self.was_contacted:
            log.warning("%s service %s is back", self.role, self.address)
        self.info, self.unavailable, self.incompatibility, self.was_contacted = info, "", None, True
        if was_unavailable:
            self.on_change()

    def mark_unavailable(self, reason: str) -> None:
        """It takes no new streams, but may finish those that it has; or it is not up yet."""
        if not self.unavailable or not self.was_contacted:
            log.warning("%s service %s: %s", self.role, self.address, reason)
        self.unavailable, self.was_contacted = reason, True
        self.on_change()

    def mark_lost(self, reason: str) -> None:
        """It failed with all its streams; it is used again after the next handshake.

        If it is lost again before it has answered a request, it pauses first, longer each time.
        """
        if not self.unavailable:
            self.num_lost += 1
            self.num_failures += 1
            num_doublings = min(self.num_failures - 2, _MAX_DOUBLINGS)
            pause_s = _FIRST_PAUSE_S * 2**num_doublings if self.num_failures > 1 else 0.0
            self._not_before_s = clock.stopwatch_ns() / 1e9 + min(pause_s, _LONGEST_PAUSE_S)
            if self._link is not None:
                self._link.retire()
                self._link = None
        self.mark_unavailable(reason)

    def mark_proven(self) -> None:
        """It answered a request, so its device works."""
        if not self.is_proven:
            self.num_failures, self.is_overdue = 0, False
            self.on_change()

    def mark_incompatible(self, error: Exception) -> None:
        """It is up, and cannot be used with the target."""
        is_new = str(error) != str(self.incompatibility)
        self.incompatibility, self.unavailable, self.was_contacted = error, str(error), True
        if is_new:
            log.warning("%s service %s is left out: %s", self.role, self.address, error)
            self.on_change()


def choose(replicas: Iterable[Replica], holder: str | None = None) -> Replica | None:
    """The replica that a new stream goes to; None if there is none.

    The one that caches the longest prefix of the sequence, unless it has over two more streams than one and a
    half times those of the least loaded; else the least loaded one, among equals the least recently used.

    Args:
        replicas: all that it may go to.
        holder: incarnation of the one that caches the longest prefix.
    """
    candidates = list(replicas)
    if not candidates:
        return None
    least = min(candidates, key=lambda replica: (replica.load, replica.last_used))
    most = _SLACK_RATIO * least.load + _SLACK_STREAMS
    holders = (
        replica
        for replica in candidates
        if holder and replica.info and replica.info.incarnation == holder and replica.load <= most
    )
    return next(holders, least)


class SentPrefixes:
    """Which replica was last sent which prefix of a sequence, in pages of 64 tokens.

    Bounded: the least recently used pages are forgotten first. Replicas are identified by their incarnation,
    since a restarted one has an empty cache. Sequences of different salts share no pages, so the placement of
    a stream tells its client nothing about the prompts of others.
    """

    def __init__(self) -> None:
        self._incarnations: OrderedDict[int, str] = OrderedDict()

    def note(self, token_ids: Sequence[int], incarnation: str, salt: str = "") -> None:
        """A sequence with this prefix was sent there."""
        for page in _pages(token_ids, salt):
            self._incarnations[page] = incarnation
            self._incarnations.move_to_end(page)
        while len(self._incarnations) > MAX_KNOWN_PAGES:
            self._incarnations.popitem(last=False)

    def holder(self, token_ids: Sequence[int], incarnations: Collection[str], salt: str = "") -> str | None:
        """The one of these incarnations that was sent the longest prefix; None if none was."""
        for page in reversed(_pages(token_ids, salt)):
            found = self._incarnations.get(page)
            if found in incarnations:
                return found
        return None


def _pages(token_ids: Sequence[int], salt: str) -> list[int]:
    """A hash for each leading full page, of the salt and all tokens up to its end. A collision can only cost
    a badly placed stream."""
    hashes: list[int] = []
    for start in range(0, min(len(token_ids) // _PAGE_LEN, _MAX_PAGES) * _PAGE_LEN, _PAGE_LEN):
        page = tuple(token_ids[start : start + _PAGE_LEN])
        hashes.append(hash((hashes[-1] if hashes else salt, page)))
    return hashes
