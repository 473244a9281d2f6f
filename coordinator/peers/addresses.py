"""Where the replicas of a service are: a list, or a DNS name that is looked up again and again."""

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
    """`HOST:PORT` for every address of a name, each once.

    Raises:
        OSError: the name is not known, or nobody who might know it answers.
    """
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for *_, address in found}
    return sorted(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


@dataclass(frozen=True, slots=True)
class Names:
    """How names are looked up: by what, and how often, in seconds."""

    resolve: Resolve = resolve_by_system
    every_s: float = 3.0


async def follow(entry: str, update: Callable[[Sequence[str]], None], names: Names) -> None:
    """Look a `dns:///NAME:PORT` up again and again, and pass on what is found.

    A look-up that fails changes nothing: a DNS server that is down must not take the replicas along, and
    those that are gone are known by their health.
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
