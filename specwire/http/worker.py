"""`python -m specwire.http.worker LINE LISTENER`: one of several fronts, by inherited descriptors."""

from __future__ import annotations

import sys

from specwire.http import server
from specwire.http.connections import ListeningSocket
from specwire.rpc import process
from specwire.rpc.line import join
from specwire.telemetry import logs


async def _serve(line_fd: int, listener_fd: int) -> None:
    _line, _, config = await join(line_fd, {})
    logs.set_up(config.log_level, config.log_format, "http")
    with ListeningSocket(fileno=listener_fd) as listening:
        await process.run_until_signal(server.serving(config, listening))


if __name__ == "__main__":
    sys.exit(process.run_service(lambda: _serve(*map(int, sys.argv[1:]))))
