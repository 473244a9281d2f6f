"""A service as a child process, when it does not do what it should."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specwire.supervisor import Service

HANGS = """
import signal, threading
from specwire import stacks
stacks.show_on_signal()
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def waits_for_ever():
    print("ready 127.0.0.1:1", flush=True)
    threading.Event().wait()

waits_for_ever()
"""


def test_what_hangs_is_ended_by_force_and_says_where_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    service = Service("hangs", [], {"PYTHONPATH": path})
    service.ready(30)
    assert service.stop(0.2) == -9
    service._forwarder.join(10)
    told = capfd.readouterr().err
    assert "hangs has not ended within 0.2 s: ended by force" in told
    assert "in waits_for_ever" in told
