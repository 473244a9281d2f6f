"""A service as a child process, when it does not do what it should."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from specwire.cli.kept import KeptService
from specwire.errors import ServiceUnavailableError
from tests.support.processes import wait_until

HANGS = """
import signal, threading
from specwire.telemetry import logs
logs.show_stacks_on_signal()
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def waits_for_ever():
    print("ready 127.0.0.1:1", flush=True)
    threading.Event().wait()

waits_for_ever()
"""


@dataclasses.dataclass(frozen=True)
class Flagless:
    """The config of a service without flags."""


def test_what_hangs_is_ended_by_force_says_where_it_was_and_is_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    kept = KeptService("a worker", ["hangs"], Flagless(), {"PYTHONPATH": path}, max_silence_s=0.3)
    first, forwarder = kept.process, kept._forwarder
    kept.ready(30)

    def is_ended() -> bool:
        kept.end_if_silent()
        return first.poll() is not None

    wait_until(is_ended, 30)
    kept.restart_if_due(0.0)
    kept.restart_if_due(1.0)
    assert kept.process is not first
    assert (first.returncode, kept.kill()) == (-9, -9)
    forwarder.join(10)
    told = capfd.readouterr().err + caplog.text
    assert "a worker hangs: no sign of life for 0.3 s" in told
    assert "hangs has not ended in time: ended by force" in told
    assert "in waits_for_ever" in told


DIES = """
import sys
print("ready 127.0.0.1:1", flush=True) if "serves" in sys.argv else None
sys.exit("error: its reason")
"""


@pytest.mark.parametrize("serves", [True, False])
def test_what_dies_at_once_again_and_again_ends_all_with_its_reason(
    serves: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In simulated time, with real processes."""
    (tmp_path / "dies.py").write_text(DIES)
    starts: list[str] = []

    class Dying(KeptService):
        def start(self, *more: str) -> None:
            starts.append(" ".join(more))
            super().start(*more, *(["serves"] if serves or not more else []))

    kept = Dying("the service", ["dies"], Flagless(), {"PYTHONPATH": str(tmp_path)}, max_failures=4)
    kept.ready(30)
    end_at(kept, now_s=0.0)
    for now_s in (0.5, 1.5, 3.5):
        assert not kept.address or kept.process.poll() is not None
        kept.restart_if_due(now_s - 0.01)
        num_starts = len(starts)
        kept.restart_if_due(now_s)
        assert len(starts) == num_starts + 1, "not before its pause is over"
        if now_s < 3.5:
            end_at(kept, now_s)
    reason = "ended with status 1" if serves else "does not start: its reason"
    with pytest.raises(ServiceUnavailableError, match=f"the service {reason}, 4 times in a row"):
        end_at(kept, 3.5)
    assert starts == ["", *["--address 127.0.0.1:1"] * 3]
    pauses = [message.split()[-2] for message in caplog.messages if "starts again" in message]
    assert pauses == ["0.5", "1", "2"]


def end_at(kept: KeptService, now_s: float) -> None:
    """Its end is seen at this time."""
    kept.process.wait(30)
    if not kept.address:
        kept.restart_if_due(now_s)  # its line is read, or that there is none
    if kept.address:
        kept.restart_if_due(now_s)


def test_what_has_served_for_long_begins_with_a_short_pause_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    kept = KeptService("the service", ["dies", "serves"], Flagless(), {"PYTHONPATH": str(tmp_path)})
    kept.ready(30)
    now_s = 0.0
    for served_s in (1, 100, 100, 1):
        kept.process.wait(30)
        kept.restart_if_due(now_s + served_s)  # it has ended
        kept.restart_if_due(now_s + served_s + 2)  # it starts
        kept.process.wait(30)
        now_s += served_s + 3
        kept.restart_if_due(now_s)  # it serves
    pauses = [message.split()[-2] for message in caplog.messages if "starts again" in message]
    assert pauses == ["0.5", "0.5", "0.5", "1"]
