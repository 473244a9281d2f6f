"""`python -m coordinator`: one coordinator in the foreground."""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager

from specwire.cli import kept
from specwire.config import preflight
from specwire.config.services import CoordinatorCommand
from specwire.rpc import process


def main(argv: list[str] | None = None) -> int:
    """Parse flags and variables, connect to the model services, serve until a signal."""
    return process.run_service(
        "coordinator", "Run one coordinator.", CoordinatorCommand, _prepare, argv, shows_life=kept.is_worker()
    )


def _prepare(config: CoordinatorCommand) -> AbstractAsyncContextManager[str]:
    if not kept.is_worker():
        preflight.check(config)
        if config.workers > 1:
            kept.run_workers(["coordinator"], config)
    from coordinator.service import serving  # after the flags were checked

    return serving(config)


if __name__ == "__main__":
    sys.exit(main())
