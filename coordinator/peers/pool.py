"""All replicas of one model service: discovery, availability and placement. Knows no grpc."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from coordinator.peers.replicas import Replica, SentPrefixes, choose
from coordinator.peers.waits import Waits
from specwire import clock
from specwire.config.fields import DNS, split_address, split_addresses

log = logging.getLogger(__name__)

RESOLVED_EVERY_S = 3.0
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0


async def resolve(name: str, port: int) -> Sequence[str]:
    """`HOST:PORT` for each distinct address of a name.

    Raises:
        OSError: the name is unknown, or no name server answers.
    """
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for *_, address in found}
    return sorted(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


class Pool:
    """All replicas of the draft or of the verify service.

    Attributes:
        role: "verify" or "draft".
        replicas: all of them, whether available or not.
        waits: time limits of all waits for them.
        num_disagreements: rounds where the service, going on by itself, came to another outcome than we did.
    """

    def __init__(self, role: str, addresses: str, make: Callable[[str], Replica], *, is_needed: bool) -> None:
        """Nothing happens before `start`.

        Args:
            addresses: as the coordinator's flags take them: `HOST:PORT` or `dns:///NAME:PORT`, with commas.
            make: makes the replica for an address, which monitors its service by itself.
            is_needed: nothing can be generated without one of them.
        """
        self.role = role
        self.replicas: list[Replica] = []
        self.waits = Waits()
        self.num_disagreements = 0
        self._entries = split_addresses(f"{role}_address", addresses) if addresses else ()
        self._make = make
        self._is_needed = is_needed
        self._listed: dict[str, Sequence[str]] = {}
        self._prefixes = SentPrefixes()
        self._num_opened = 0
        self._change = asyncio.Event()
        self._had_some = False
        self._lost_s: float | None = None
        self._last_outage_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    # --- discovery and availability -----------------------------------------------------------------

    @property
    def available(self) -> list[Replica]:
        """The replicas that a new stream may go to."""
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
        """Discover replicas from now on."""
        listed = [entry for entry in self._entries if not entry.startswith(DNS)]
        if listed:
            self._update("", listed)
        for name in set(self._entries) - set(listed):
            self._spawn(self._follow(name))

    async def _follow(self, entry: str) -> None:
        """Resolve `dns:///NAME:PORT` periodically.

        A failed look-up changes nothing: replicas must survive an outage of the DNS server, and the loss of a
        replica shows in its health.
        """
        name, port = split_address("address", entry.removeprefix(DNS))
        found: Sequence[str] = ()
        problem = ""
        while True:
            try:
                found, problem = await resolve(name.strip("[]"), port), ""
            except OSError as error:
                if str(error) != problem:
                    log.warning("%s: %s; keeping %s", entry, error, ", ".join(found) or "nothing")
                problem = str(error)
            self._update(entry, found)
            await asyncio.sleep(RESOLVED_EVERY_S)

    async def all_contacted(self) -> None:
        """Wait until all names were resolved and all first handshakes have ended.

        Raises:
            HandshakeError: a replica is incompatible, and none is available.
        """
        sources = {entry if entry.startswith(DNS) else "" for entry in self._entries}
        while len(self._listed) < len(sources) or not all(replica.was_contacted for replica in self.replicas):
            await self._wait_for_change()
        errors = [replica.incompatibility for replica in self.replicas if replica.incompatibility]
        if errors and not self.available:
            raise errors[0]

    async def wait(self, timeout_s: float) -> None:
        """Until a replica is available, or for at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0.0)):
                while not self.available:
                    await self._wait_for_change()

    def add(self, replica: Replica) -> None:
        """Use another replica."""
        replica.on_change = self._changed
        self.replicas.append(replica)

    def _update(self, source: str, addresses: Sequence[str]) -> None:
        """Set the addresses of one source (a DNS name, or "" for the list). Replicas that no source lists any
        more are closed after their last streams."""
        self._listed[source] = addresses
        wanted = {address: None for found in self._listed.values() for address in found}
        for replica in list(self.replicas):
            replica.is_leaving = replica.address not in wanted
            wanted.pop(replica.address, None)
            self._close_if_drained(replica)
        for address in wanted:
            self.add(self._make(address))
        self._changed()

    def expected_s(self) -> float:
        """How long until a replica may be available: what is left of an outage as long as the last one; in a
        longer one, as long again as it has lasted."""
        if self._lost_s is None:
            return _SHORTEST_WAIT_S
        lasted_s = clock.stopwatch_ns() / 1e9 - self._lost_s
        left_s = self._last_outage_s - lasted_s
        return min(max(left_s if left_s > 0 else lasted_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)

    def _changed(self) -> None:
        now_s = clock.stopwatch_ns() / 1e9
        if self.available:
            if self._lost_s is not None:
                self._last_outage_s = now_s - self._lost_s
            self._had_some, self._lost_s = True, None
        elif self._had_some and self._lost_s is None:
            self._lost_s = now_s
        self._change.set()

    async def _wait_for_change(self) -> None:
        self._change.clear()
        await self._change.wait()

    # --- placement ----------------------------------------------------------------------------------

    def choose(
        self, token_ids: Sequence[int], avoid: Collection[Replica] = (), salt: str = ""
    ) -> Replica | None:
        """The available replica at which to open a stream of a sequence with these tokens, if any.

        A replica that was lost or overdue and has not answered since gets one stream at a time; more only if
        the service is needed and no other replica is available.

        Args:
            salt: only streams of the same salt share prefixes.
        """
        candidates = [replica for replica in self.available if replica not in avoid]
        usable = [replica for replica in candidates if replica.is_proven or not replica.num_streams]
        if usable or not self._is_needed:
            candidates = usable
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        incarnations = {replica.info.incarnation for replica in candidates if replica.info}
        return choose(candidates, self._prefixes.holder(token_ids, incarnations, salt))

    def opened(self, replica: Replica, token_ids: Sequence[int], salt: str = "") -> None:
        """A stream was opened there, for a sequence with these tokens."""
        self._num_opened += 1
        replica.num_streams += 1
        replica.last_used = self._num_opened
        if replica.info and len(self.replicas) > 1:
            self._prefixes.note(token_ids, replica.info.incarnation, salt)

    def closed(self, replica: Replica) -> None:
        """A stream there has ended."""
        replica.num_streams -= 1
        self._close_if_drained(replica)

    def _close_if_drained(self, replica: Replica) -> None:
        if replica.is_leaving and not replica.num_streams and replica in self.replicas:
            self.replicas.remove(replica)
            self._spawn(replica.close())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close all replicas."""
        for task in list(self._tasks):
            task.cancel()
        for replica in self.replicas:
            await replica.close()
