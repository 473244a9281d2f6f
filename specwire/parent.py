"""A child process that ends with its parent, even if the parent is killed (Linux: PR_SET_PDEATHSIG).

The child asks for it itself, as its environment says. The usual way, a function that runs between fork and
exec, makes Python fork instead of vfork, and then gRPC's fork handlers now and then abort the child of a
process whose gRPC threads are at work.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_NAME = "_SPECWIRE_PARENT"
_PR_SET_PDEATHSIG = 1


def environment() -> dict[str, str]:
    """Variables for a child of this process that calls `end_with_it`."""
    return {_NAME: str(os.getpid())}


def end_with_it() -> None:
    """Have SIGTERM sent to this process when the thread that started it ends, or now if it has ended already.

    Does nothing in a process that was not started with `environment()`; its own children are not.
    """
    parent = os.environ.pop(_NAME, "")
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGTERM)
