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
from pathlib import Path

_NAME = "_SPECWIRE_PARENT"
_PR_SET_PDEATHSIG = 1
_ROOT = Path(__file__).resolve().parents[1]


def python(*args: str) -> list[str]:
    """The command line of a child that runs this Python.

    By itself Python looks into the working directory first, with -m and -c, and would take a user's file or
    folder there for a module of its own or of ours that has this name.
    """
    is_ours = os.path.exists(os.curdir) and os.path.samefile(os.curdir, _ROOT)
    return [sys.executable, *([] if is_ours else ["-P"]), *args]


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
