"""`python -m verify_service`: one verify service in the foreground, or several as its children."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractAsyncContextManager

from specwire.config import preflight
from specwire.config.services import VerifyCommand
from specwire.engine import threads
from specwire.rpc import process


def main(argv: list[str] | None = None) -> int:
    """Parse flags and variables, load the model, serve until a signal."""
    return process.run_service("verify", "Run one verify service, or several.", VerifyCommand, _prepare, argv)


def _prepare(config: VerifyCommand) -> AbstractAsyncContextManager[str]:
    preflight.check(config)
    process.end_at_once_by_signals(signal.SIGINT, signal.SIGTERM)
    threads.spin_briefly(os.environ)
    if config.replicas > 1:
        from verify_service import replicas

        replicas.run(config)
    with process.importing():
        from verify_service.service import serving  # loads torch: after the flags were checked

    return serving(config)


if __name__ == "__main__":
    sys.exit(main())
