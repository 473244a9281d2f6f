"""`python -m coordinator.workers FD`: one worker, for the parent at the other end of a line."""

from __future__ import annotations

import sys

from coordinator.service import serving
from coordinator.workers.worker import Worker
from specwire.rpc import process
from specwire.telemetry import logs


async def _serve(fd: int) -> None:
    worker = await Worker.join(fd)
    logs.set_up(worker.config.log_level, worker.config.log_format, "coordinator")
    await process.run_until_signal(serving(worker.config, worker=worker))


if __name__ == "__main__":
    sys.exit(process.run_service(lambda: _serve(int(sys.argv[1]))))
