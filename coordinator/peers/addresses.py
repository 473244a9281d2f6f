"""Where the replicas of a service are: a list, or a DNS name that is resolved periodically."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from specwire.config.fields import DNS, split_address

log = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve_by_system(name: str, port: int) -> Sequence[str]:
    """`HOST:PORT` for each distinct address of a name.

    Raises:
        OSError: the name is unknown, or no name server answers.
    """
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for *_, address in found}
    return sorted(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


@dataclass(frozen=True, slots=True)
class Names:
    """How names are resolved, and how often."""

    resolve: Resolve = resolve_by_system
    every_s: float = 3.0


async def follow(entry: str, update: Callable[[Sequence[str]], None], names: Names) -> None:
    """Resolve `dns:///NAME:PORT` periodically, and pass the addresses to `update`.

    A failed look-up changes nothing: replicas must survive an outage of the DNS server, and the loss of a
    replica shows in its health.
    """
    name, port = split_address("address", entry.removeprefix(DNS))
    found: Sequence[str] = ()
    problem = ""
    while True:
        try:
            found, problem = await names.resolve(name.strip("[]"), port), ""
        except OSError as error:
            if str(error) != problem:
                log.warning("%s: %s; keeping %s", entry, error, ", ".join(found) or "nothing")
            problem = str(error)
        update(found)
        await asyncio.sleep(names.every_s)
