"""Ctrl-C, wherever it is pressed: status 130 within 3 s, one line, no traceback, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from specwire import Client, SamplingParams, SpecwireError
from specwire.rpc.interrupts import SAID
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


class Streaming:
    """A generation in mid-stream, which another thread reads to its end."""

    def __init__(self) -> None:
        self.going = threading.Event()
        self.error: SpecwireError | None = None
        self.text = ""
        self._thread: threading.Thread

    def grpc(self, address: str) -> Streaming:
        """By the SDK."""
        return self._start(self._read_grpc, address)

    def sse(self, address: str) -> Streaming:
        """By OpenAI's API."""
        return self._start(self._read_sse, address)

    def ended(self) -> Streaming:
        """When its reader has read all."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self

    def _start(self, read: object, address: str) -> Streaming:
        self._thread = threading.Thread(target=read, args=(address,), daemon=True)  # type: ignore[arg-type]
        self._thread.start()
        assert self.going.wait(START_S)
        return self

    def _read_grpc(self, address: str) -> None:
        try:
            with Client(address) as client, client.stream(params=ENDLESS, prompt_token_ids=PROMPT) as stream:
                for _ in stream:
                    self.going.set()
        except SpecwireError as error:
            self.error = error

    def _read_sse(self, address: str) -> None:
        body = {"model": MODELS[1], "prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"http://{address}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=START_S) as response:
            for line in response:  # raises where the transfer is cut
                self.going.set()
                self.text += line.decode()


class TestUp:
    """One after the other on the same processes; the last one ends them."""

    @pytest.fixture(scope="class")
    @classmethod
    def up(cls) -> Iterator[Command]:
        argv = ["--address", "127.0.0.1:0", *MODELS, "--http-address", "127.0.0.1:0"]
        with running("up", *argv, "--log-level", "warning") as command:
            yield command

    @pytest.fixture(scope="class")
    @classmethod
    def address(cls, up: Command) -> str:
        return up.ready_line().split()[1]

    def test_generate(self, address: str) -> None:
        ids = ",".join(map(str, PROMPT))
        argv = ["--token-ids", ids, "--max-tokens", "4000", "--ignore-eos", "--server", address]
        with running("generate", *argv) as generate, Client(address) as client:
            wait_until(lambda: client.get_status().num_running == 1, START_S)
            assert interrupt(generate) == ""
            wait_until(lambda: client.get_status().num_running == 0, 5.0)

    def test_bench(self, address: str) -> None:
        with (
            running("bench", "serve", "--server", address, "--rate", "4") as bench,
            Client(address) as client,
        ):
            wait_until(lambda: client.get_status().num_running > 0, START_S)
            assert re.fullmatch(r"[^\n]*interrupted after \d+ of \d+ requests[^\n]*\n?", interrupt(bench))

    def test_a_front_alone(self, address: str) -> None:
        with running("http", "--address", "127.0.0.1:0", "--server", address) as front:
            streaming = Streaming().sse(front.ready_line().split()[1])
            assert SAID in interrupt(front)
            check_last_event(streaming.ended().text)

    def test_proxy(self, address: str) -> None:
        with running("proxy", "--to", address) as proxy:
            proxy.ready_line()
            assert interrupt(proxy) == f"{SAID}\n"

    @pytest.mark.slow
    def test_up_in_mid_stream(self, up: Command, address: str) -> None:
        assert up.process.stdout is not None
        page = up.process.stdout.readline().decode().split("/")[2]
        grpc, sse = Streaming().grpc(address), Streaming().sse(page)
        said = interrupt(up)
        assert said.count("\n") == said.count(SAID) == 1
        up.assert_all_gone(1.0)
        check_last_event(sse.ended().text)
        assert isinstance(grpc.ended().error, SpecwireError)


def check_last_event(text: str) -> None:
    """The stream ends with an error that says why."""
    *_, last = text.strip().split("\n\n")
    told = json.loads(last.removeprefix("data: "))
    assert told["error"]["message"] == "the server is shutting down"
    assert told["error"]["type"] == "service_unavailable_error"


def test_a_coordinator_that_waits() -> None:
    argv = ["--address", "127.0.0.1:0", "--verify-address", "127.0.0.1:1", "--draft-address", "127.0.0.1:1"]
    with running("coordinator", *argv) as coordinator:
        line = "waiting for verify at 127.0.0.1:1, draft at 127.0.0.1:1, for 60 s"
        wait_until(lambda: line in coordinator.errors(), START_S)
        interrupt(coordinator)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_up_idle_and_twice(times: int) -> None:
    with running("up", "--address", "127.0.0.1:0", *MODELS) as command:
        command.ready_line()
        assert SAID in interrupt(command, times=times)
        command.assert_all_gone(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["demo"], ["timeline", "--live", "--out", "/dev/null"]])
def test_what_starts_a_stack_of_its_own(argv: list[str]) -> None:
    with running(*argv, *MODELS) as command:
        wait_until(lambda: len(command.services) == 2, START_S)
        assert interrupt(command) == ""
        command.assert_all_gone(1.0)
