"""Stacks of a running process: at `kill -USR1 PID` it writes those of its threads."""

from __future__ import annotations

import faulthandler
import signal

SIGNAL = signal.SIGUSR1
_STDERR = 2


def show_on_signal() -> None:
    """Write them to standard error at `SIGNAL`, after which the process continues, and at a crash."""
    faulthandler.enable(_STDERR)
    faulthandler.register(SIGNAL, _STDERR)
