"""What a process is doing, asked from outside: `kill -USR1 PID` has it write the stacks of its threads."""

from __future__ import annotations

import faulthandler
import signal

SIGNAL = signal.SIGUSR1
_STDERR = 2


def show_on_signal() -> None:
    """On standard error, at `SIGNAL` and where the process crashes; it goes on after the signal."""
    faulthandler.enable(_STDERR)
    faulthandler.register(SIGNAL, _STDERR)
