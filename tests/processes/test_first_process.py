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
ANY_PORT = ("--address", "127.0.0.1:0")
CASES = {
    "coordinator": ("coordinator", *ANY_PORT, "--verify-address", "127.0.0.1:1"),
    "verify": ("verify_service", *ANY_PORT, "--model", "embedded"),
    "specwire coordinator": ("specwire.cli", "coordinator", *ANY_PORT, "--verify-address", "127.0.0.1:1"),
    "specwire draft": ("specwire.cli", "draft", *ANY_PORT, "--model", "embedded"),
    "specwire http": ("specwire.cli", "http", *ANY_PORT),
    "specwire health": ("specwire.cli", "health"),
}

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and unshare of util-linux"
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_sigterm_as_soon_as_it_can_be_noticed(name: str) -> None:
    """Caught, or blocked until something catches it; before, the kernel ignores it for a first process."""
    assert _status_after(name, signal.SIGTERM, 0.0) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("specwire coordinator", signal.SIGTERM),
        pytest.param("specwire draft", signal.SIGINT, marks=pytest.mark.serial),
        pytest.param("verify", signal.SIGTERM, marks=pytest.mark.serial),
    ],
)
def test_a_signal_while_it_waits_or_loads(name: str, number: signal.Signals) -> None:
    """Loading torch's libraries is not interrupted, and takes seconds beside other tests."""
    assert _status_after(name, number, 1.5) == 128 + number


def _status_after(name: str, number: signal.Signals, after_s: float) -> int:
    """The exit status of a command that gets a signal, and ends soon."""
    module, *flags = CASES[name]
    command = [*UNSHARE, sys.executable, "-m", module, *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as outer:
        try:
            first = _child(outer.pid)
            _wait_until_noticed(first, number)
            time.sleep(after_s)
            started_s = time.monotonic()
            first.send_signal(number)
            status = outer.wait(10)
            assert time.monotonic() - started_s < 5.0, "beside other tests it takes up to 1.5 s"
            return status
        finally:
            outer.kill()


def _child(pid: int) -> psutil.Process:
    found: list[psutil.Process] = []

    def has_python() -> bool:
        found[:] = [each for each in psutil.Process(pid).children() if "python" in each.name()]
        return bool(found)

    wait_until(has_python, 10)
    return found[0]


def _wait_until_noticed(process: psutil.Process, number: signal.Signals) -> None:

    def is_noticed() -> bool:
        with open(f"/proc/{process.pid}/status") as status:
            masks = [line.split()[1] for line in status if line.startswith(("SigCgt:", "SigBlk:"))]
        return any(int(mask, 16) & 1 << (number - 1) for mask in masks)

    wait_until(is_noticed, 30)
