"""The replicas of one model service: who is there, and who takes the next stream. Knows no grpc."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from coordinator.peers.addresses import Names, follow
from coordinator.peers.replicas import Replica, SentPrefixes, choose
from specwire.config.fields import DNS, split_addresses


class Pool:
    """All replicas of the draft or of the verify service.

    Attributes:
        role: "verify" or "draft".
        replicas: all of them, whether available or not.
    """

    def __init__(
        self,
        role: str,
        addresses: str,
        make: Callable[[str], Replica],
        names: Names,
        *,
        is_needed: bool,
    ) -> None:
        """Nothing happens before `start`.

        Args:
            is_needed: nothing can be generated without one of them.
            addresses: as the coordinator's flags take them: `HOST:PORT` or `dns:///NAME:PORT`, with commas.
            make: a replica for an address; it looks by itself whether the service is there.
            names: how names are looked up.
        """
        self.role = role
        self.replicas: list[Replica] = []
        self._entries = split_addresses(f"{role}_address", addresses) if addresses else ()
        self._make = make
        self._is_needed = is_needed
        self._names = names
        self._listed: dict[str, Sequence[str]] = {}
        self._prefixes = SentPrefixes()
        self._num_taken = 0
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- who is there -------------------------------------------------------------------------------

    @property
    def available(self) -> list[Replica]:
        """Those that a new stream may go to."""
        return [replica for replica in self.replicas if not replica.unavailable and not replica.is_leaving]

    @property
    def unavailable(self) -> str:
        """Why no new stream can be opened; empty when one can."""
        if not self._entries and not self.replicas:
            return f"no {self.role} service is configured"
        if self.available:
            return ""
        reasons = [f"{self.role} service {r.address}: {r.unavailable}" for r in self.replicas]
        return "; ".join(reasons) or f"{self.role} service {', '.join(self._entries)}: no such name"

    def start(self) -> None:
        """Look for the replicas from now on."""
        listed = [entry for entry in self._entries if not entry.startswith(DNS)]
        if listed:
            self._update("", listed)
        for name in set(self._entries) - set(listed):
            update = functools.partial(self._update, name)
            self._spawn(follow(name, update, self._names))

    async def met(self) -> None:
        """Wait until all names were looked up and all replicas asked once. One that does not fit is left out.

        Raises:
            HandshakeError: one does not fit, and none is there that does.
        """
        sources = {entry if entry.startswith(DNS) else "" for entry in self._entries}
        while len(self._listed) < len(sources) or not all(replica.was_asked for replica in self.replicas):
            await self._changed()
        refused = [replica.refused for replica in self.replicas if replica.refused]
        if refused and not self.available:
            raise refused[0]

    async def wait(self, timeout_s: float) -> None:
        """Until a replica is available, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0.0)):
                while not self.available:
                    await self._changed()

    def adopt(self, replica: Replica) -> None:
        """Another replica."""
        replica.on_change = self._news.set
        self.replicas.append(replica)

    def _update(self, source: str, addresses: Sequence[str]) -> None:
        """What an entry of the list stands for now. Replicas that are not listed any more drain away."""
        self._listed[source] = addresses
        wanted = {address: None for found in self._listed.values() for address in found}
        for replica in list(self.replicas):
            replica.is_leaving = replica.address not in wanted
            wanted.pop(replica.address, None)
            self._close_if_over(replica)
        for address in wanted:
            self.adopt(self._make(address))
        self._news.set()

    async def _changed(self) -> None:
        self._news.clear()
        await self._news.wait()

    # --- who takes a stream -------------------------------------------------------------------------

    def choose(
        self, token_ids: Sequence[int], avoid: Collection[Replica] = (), salt: str = ""
    ) -> Replica | None:
        """The available replica that a stream beginning with these tokens is best opened at, if any.

        One that was lost and has not answered since is tried by one stream at a time; by more only where
        nothing can be done without it.

        Args:
            salt: only streams of the same one share prefixes.
        """
        candidates = [replica for replica in self.available if replica not in avoid]
        tried = [replica for replica in candidates if replica.is_proven or not replica.num_streams]
        if tried or not self._is_needed:
            candidates = tried
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        incarnations = {replica.info.incarnation for replica in candidates if replica.info}
        return choose(candidates, self._prefixes.holder(token_ids, incarnations, salt))

    def opened(self, replica: Replica, token_ids: Sequence[int], salt: str = "") -> None:
        """A stream was opened there, and will be sent these tokens."""
        self._num_taken += 1
        replica.num_streams += 1
        replica.last_taken = self._num_taken
        if replica.info and len(self.replicas) > 1:
            self._prefixes.note(token_ids, replica.info.incarnation, salt)

    def closed(self, replica: Replica) -> None:
        """A stream there has ended."""
        replica.num_streams -= 1
        self._close_if_over(replica)

    def _close_if_over(self, replica: Replica) -> None:
        if replica.is_leaving and not replica.num_streams and replica in self.replicas:
            self.replicas.remove(replica)
            self._spawn(replica.close())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Let go of all of them."""
        for task in list(self._tasks):
            task.cancel()
        for replica in self.replicas:
            await replica.close()
