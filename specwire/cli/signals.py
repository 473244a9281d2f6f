"""How a command ends at a signal."""

from __future__ import annotations

import signal
import sys

from specwire.telemetry import stacks


def end_on_signals(terminated: int = 128 + signal.SIGTERM) -> None:
    """Handle SIGINT explicitly too, as shells start background commands with it ignored.

    Args:
        terminated: the exit status after SIGTERM.
    """
    stacks.show_on_signal()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(terminated))
