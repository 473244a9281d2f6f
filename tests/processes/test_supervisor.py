"""A service as a child process, when it does not do what it should."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from specwire import Client, RetryPolicy, SamplingParams
from specwire.cli.kept import KeptService
from specwire.cli.process import Service
from specwire.cli.supervisor import Stack
from specwire.config.stack import StackConfig
from specwire.errors import ServiceUnavailableError
from tests.support.processes import running, wait_until

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


def test_what_hangs_is_ended_by_force_and_says_where_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    service = Service("hangs", [], {"PYTHONPATH": path})
    service.ready(30)
    assert service.stop(0.2) == -9
    service._forwarder.join(10)
    told = capfd.readouterr().err + caplog.text
    assert "hangs has not ended in time: ended by force" in told
    assert "in waits_for_ever" in told


def test_each_service_that_is_killed_is_started_again_under_a_running_generation() -> None:
    params = SamplingParams(temperature=0, max_tokens=400, num_draft_tokens=2)
    argv = ("--target", "emulated:step_ms=8", "--draft", "emulated:step_ms=1")
    with running("up", *argv, "--address", "127.0.0.1:0", "--http-address", "127.0.0.1:0") as command:
        address, page = command.ready_line().split()[1], command.line().split()[1]
        up = psutil.Process(command.process.pid)
        with Client(address, retry=RetryPolicy(patience_s=60.0)) as client:
            first = client.generate(params=replace(params, max_tokens=200), prompt_token_ids=[1, 2])
            doomed, tokens = ["draft_service", "verify_service", "coordinator"], []
            with client.stream(params=params, prompt_token_ids=[1, 2]) as stream:
                for chunk in stream:
                    tokens += [token.token_id for token in chunk.tokens]
                    if doomed and len(tokens) > 90 * (4 - len(doomed)):
                        child(up, doomed.pop(0)).kill()
            assert not doomed
            assert len(tokens) == params.max_tokens
            assert tuple(tokens[:200]) == first.token_ids
            assert stream.completion.num_resumes == 1, "the coordinator's loss is the client's, and no other"
            drafts = partial(client.generate, params=params, prompt_token_ids=[1, 2])
            wait_until(lambda: drafts().speculation.num_draft_tokens > 0, 60)
        front = child(up, "http")
        front.kill()
        wait_until(lambda: not front.is_running() and answers(f"{page}v1/models"), 60)
        command.process.terminate()
        assert command.ended() == 0


def child(parent: psutil.Process, word: str) -> psutil.Process:
    """The service with this word in its command line."""
    return next(each for each in parent.children() if word in each.cmdline())


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=20):
        return True
    return False


DIES = """
import sys
print("ready 127.0.0.1:1", flush=True) if "serves" in sys.argv else None
sys.exit("error: its reason")
"""


@dataclasses.dataclass(frozen=True)
class Flagless:
    """The config of a service without flags."""


@pytest.mark.parametrize("serves", [True, False])
def test_what_dies_at_once_again_and_again_ends_all_with_its_reason(
    serves: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In simulated time, with real processes."""
    (tmp_path / "dies.py").write_text(DIES)
    starts: list[str] = []

    class Dying(KeptService):
        def _start(self) -> Service:
            starts.append(self._address)
            self._command = ["dies", *(["serves"] if serves or not self._address else [])]
            return super()._start()

    kept = Dying("the service", ["dies"], Flagless(), {"PYTHONPATH": str(tmp_path)}, max_failures=4)
    kept.service.ready(30)
    end_at(kept, now_s=0.0)
    for now_s in (0.5, 1.5, 3.5):
        assert not kept.service.address or kept.service.process.poll() is not None
        kept.restart_if_due(now_s - 0.01)
        num_starts = len(starts)
        kept.restart_if_due(now_s)
        assert len(starts) == num_starts + 1, "not before its pause is over"
        if now_s < 3.5:
            end_at(kept, now_s)
    reason = "ended with status 1" if serves else "does not start: its reason"
    with pytest.raises(ServiceUnavailableError, match=f"the service {reason}, 4 times in a row"):
        end_at(kept, 3.5)
    assert starts == ["", *["127.0.0.1:1"] * 3]
    pauses = [message.split()[-2] for message in caplog.messages if "starts again" in message]
    assert pauses == ["0.5", "1", "2"]


def end_at(kept: KeptService, now_s: float) -> None:
    """Its end is seen at this time."""
    kept.service.process.wait(30)
    if not kept.service.address:
        kept.restart_if_due(now_s)  # its line is read, or that there is none
    if kept.service.address:
        kept.restart_if_due(now_s)


def test_what_has_served_for_long_begins_with_a_short_pause_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    kept = KeptService("the service", ["dies", "serves"], Flagless(), {"PYTHONPATH": str(tmp_path)})
    kept.service.ready(30)
    now_s = 0.0
    for served_s in (1, 100, 100, 1):
        kept.service.process.wait(30)
        kept.restart_if_due(now_s + served_s)  # it has ended
        kept.restart_if_due(now_s + served_s + 2)  # it starts
        kept.service.process.wait(30)
        now_s += served_s + 3
        kept.restart_if_due(now_s)  # it serves
    pauses = [message.split()[-2] for message in caplog.messages if "starts again" in message]
    assert pauses == ["0.5", "0.5", "0.5", "1"]


def test_drafts_from_the_text_need_the_target_alone() -> None:
    config = StackConfig(target="emulated:step_ms=1", draft="ngram", address="127.0.0.1:0")
    with Stack(config) as stack, Client(stack.address) as client:
        assert [service.module for service in stack.services] == ["verify_service", "coordinator"]
        params = SamplingParams(max_tokens=8, num_draft_tokens=3)
        done = client.generate(params=params, prompt_token_ids=[4, 5, 6, 7, 4, 5])
    assert [counts.source for counts in done.speculation.by_source] == ["ngram"]
    assert done.speculation.draft_unavailable == ""
