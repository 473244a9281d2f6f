"""The first process of a container, which has no default for signals: it ends while it waits or loads."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.processes import wait_until

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
CASES = {
    "coordinator": ("coordinator", "--address", "127.0.0.1:0", "--verify-address", "127.0.0.1:1"),
    "verify": ("verify_service", "--address", "127.0.0.1:0", "--model", "embedded"),
}

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and unshare of util-linux"
)


@pytest.mark.parametrize("name", CASES)
def test_sigterm_ends_it_within_a_second(name: str) -> None:
    module, *flags = CASES[name]
    command = [*UNSHARE, sys.executable, "-m", module, *flags, "--log-level", "info"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as outer:
        try:
            first = _child(outer.pid)
            _wait_for_handler(first)
            started_s = time.monotonic()
            first.send_signal(signal.SIGTERM)
            assert outer.wait(10) == 128 + signal.SIGTERM
            assert time.monotonic() - started_s < 1.0
        finally:
            outer.kill()


def _child(pid: int) -> psutil.Process:
    found: list[psutil.Process] = []

    def has_python() -> bool:
        found[:] = [each for each in psutil.Process(pid).children() if "python" in each.name()]
        return bool(found)

    wait_until(has_python, 10)
    return found[0]


def _wait_for_handler(process: psutil.Process) -> None:
    """Until SIGTERM is caught: before, the kernel ignores it for a first process."""

    def is_caught() -> bool:
        with open(f"/proc/{process.pid}/status") as status:
            [mask] = [line.split()[1] for line in status if line.startswith("SigCgt:")]
        return bool(int(mask, 16) & 1 << (signal.SIGTERM - 1))

    wait_until(is_caught, 30)
