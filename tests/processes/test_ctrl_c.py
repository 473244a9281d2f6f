"""Ctrl-C, wherever it is pressed: status 130 within 3 s, one line, no traceback, nothing left behind.

Of `generate` and `proxy`: `test_cli`; of a benchmark: `test_bench_serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from specwire import Client, SamplingParams, SpecwireError
from specwire.rpc.interrupts import SAID
from tests.support.harness import local_stack
from tests.support.processes import START_S, Command, running, wait_until

END_S = 3.0
MODELS = ("--target", "emulated:step_ms=20", "--draft", "emulated:step_ms=5")
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)
PROMPT = [4, 5, 6]


def interrupt(command: Command, *, times: int = 1) -> str:
    """Press Ctrl-C; returns what the command said."""
    _ = command.services
    began_s = time.monotonic()
    for _ in range(times):
        os.killpg(command.process.pid, signal.SIGINT)
        time.sleep(0.2 if times > 1 else 0.0)  # signals of one number that are pending together are one
    assert command.ended() == 130, command.errors()
    assert time.monotonic() - began_s < END_S
    said = command.errors()
    assert "Traceback" not in said
    assert "chttp2" not in said
    return said


@contextlib.contextmanager
def events(address: str) -> Iterator[Any]:
    """Lines of a generation by OpenAI's API, of which the first has come."""
    body = {"model": MODELS[1], "prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"http://{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=START_S) as response:
        assert response.readline()
        yield response


def check_end(events: Any) -> None:
    """The last one is an error that says why; a transfer that is cut raises here."""
    *_, last = events.read().decode().strip().split("\n\n")
    told = json.loads(last.removeprefix("data: "))
    assert told["error"]["message"] == "the server is shutting down"
    assert told["error"]["type"] == "service_unavailable_error"


def test_a_front_alone() -> None:
    with (
        local_stack(MODELS[1]) as stack,
        running("http", "--address", "127.0.0.1:0", "--server", stack.address) as front,
        events(front.ready_line().split()[1]) as streaming,
    ):
        assert SAID in interrupt(front)
        check_end(streaming)


@pytest.mark.slow
def test_up_in_mid_stream() -> None:
    argv = ("--address", "127.0.0.1:0", *MODELS, "--http-address", "127.0.0.1:0", "--log-level", "warning")
    with running("up", *argv) as up:
        address = up.ready_line().split()[1]
        page = up.line().split("/")[2]
        with (
            Client(address) as client,
            client.stream(params=ENDLESS, prompt_token_ids=PROMPT) as stream,
            events(page) as streaming,
        ):
            next(iter(stream))
            said = interrupt(up)
            assert said.count("\n") == said.count(SAID) == 1
            up.assert_all_gone(1.0)
            check_end(streaming)
            with pytest.raises(SpecwireError):
                list(stream)


def test_a_coordinator_that_waits() -> None:
    argv = ["--address", "127.0.0.1:0", "--verify-address", "127.0.0.1:1", "--draft-address", "127.0.0.1:1"]
    with running("coordinator", *argv) as coordinator:
        line = "waiting for verify at 127.0.0.1:1, draft at 127.0.0.1:1, for 60 s"
        wait_until(lambda: line in coordinator.errors(), START_S)
        interrupt(coordinator)


@pytest.mark.slow
def test_up_twice() -> None:
    with running("up", "--address", "127.0.0.1:0", *MODELS) as command:
        command.ready_line()
        assert SAID in interrupt(command, times=2)
        command.assert_all_gone(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["demo"], ["timeline", "--live", "--out", "/dev/null"]])
def test_what_starts_a_stack_of_its_own(argv: list[str]) -> None:
    with running(*argv, *MODELS) as command:
        wait_until(lambda: len(command.services) == 2, START_S)
        assert interrupt(command) == ""
        command.assert_all_gone(1.0)
