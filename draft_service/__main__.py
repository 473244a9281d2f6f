"""`python -m draft_service`: one draft service in the foreground."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractAsyncContextManager

from specwire.config import preflight
from specwire.config.services import DraftCommand
from specwire.engine import threads
from specwire.rpc import process


def main(argv: list[str] | None = None) -> int:
    """Parse flags and variables, load the model, serve until a signal."""
    return process.run_service("draft", "Run one draft service.", DraftCommand, _prepare, argv)


def _prepare(config: DraftCommand) -> AbstractAsyncContextManager[str]:
    preflight.check(config)
    process.end_at_once_by_signals(signal.SIGINT, signal.SIGTERM)
    threads.spin_briefly(os.environ)
    with process.importing():
        from draft_service.service import serving  # loads torch: after the flags were checked

    return serving(config)


if __name__ == "__main__":
    sys.exit(main())
