"""`specwire http --workers N`: fronts that accept from one listener. One that hangs accepts nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from specwire.cli.workers import Worker, kept
from specwire.config.client import HttpConfig
from specwire.config.fields import split_address


@contextlib.asynccontextmanager
async def serving(config: HttpConfig) -> AsyncIterator[str]:
    """Run `config.workers` fronts; yields their `HOST:PORT`, and ends gracefully.

    Raises:
        ConfigError: one of them cannot start, with its own reason, or the address cannot be bound.
    """
    from specwire.http import server

    host, _ = split_address("address", config.address)
    with server.bound(config.address) as listening:
        fds = [listening.fileno()]
        fronts = [Worker("specwire.http.worker", n, config, fds) for n in range(1, config.workers + 1)]
        async with kept(fronts, config.grace_s):
            yield f"{host}:{listening.getsockname()[1]}"
