"""A front as a process of its own: its memory."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from specwire.config.fields import split_address
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, local_stack
from tests.support.processes import Command, running

pytestmark = pytest.mark.serial

MB = 1 << 20
BOMBS = {
    "objects": b'{"model":"m","prompt":[' + b"{}," * (7 * MB // 3) + b"{}]}",
    "nesting": b'{"model":"m","prompt":' + b"[" * 4 * MB + b"]" * 3 * MB,
    "tokens": b'{"model":"m","prompt":[' + b"1," * (7 * MB // 2) + b"1]}",
    "keys": b'{"model":"m"' + b"".join(b',"k%d":1' % i for i in range(600_000)) + b"}",
    "a string": b'{"model":"m","prompt":"' + b"a" * 7 * MB + b'"}',
}


class Front:
    """`specwire http`."""

    def __init__(self, command: Command) -> None:
        self._pid = command.process.pid
        self.address = command.ready_line().removeprefix("ready ").strip()

    @property
    def peak_mb(self) -> float:
        """The most memory that it had since it was last asked."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) / 1024

    def connect(self) -> socket.socket:
        return socket.create_connection(split_address("address", self.address), timeout=20)


stack = entered(lambda: local_stack("emulated:step_ms=1,vocab_size=4096"))


@pytest.fixture(scope="module")
def front(stack: LocalStack) -> Iterator[Front]:
    options = ("--server", stack.address, "--model-name", "m", "--grace-s", "0")
    with running("http", "--address", "127.0.0.1:0", *options) as command:
        found = Front(command)
        complete(found)
        yield found


def complete(front: Front) -> None:
    """A request that is served."""
    wanted = {"model": "m", "prompt": [1, 2], "max_tokens": 2}
    answer = httpx2.post(f"http://{front.address}/v1/completions", json=wanted, timeout=20)
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_little_memory_and_time(front: Front, name: str) -> None:
    """8 MB of `[{},...]` took 7 GB, and no answer came for minutes."""
    assert front.peak_mb > 0
    before_mb = front.peak_mb
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with front.connect() as connection:
        connection.sendall(f"{head}Content-Length: {len(BOMBS[name])}\r\n\r\n".encode() + BOMBS[name])
        sent_s = time.monotonic()
        answer = connection.recv(1 << 16)
        assert time.monotonic() - sent_s < 2, "on a quiet machine it is 0.1 s"
    assert re.match(rb"HTTP/1\.1 4(00|13) ", answer), answer[:200]
    assert front.peak_mb - before_mb < 50
    complete(front)


def test_many_choices_with_many_biases_do_not_keep_others_waiting(front: Front) -> None:
    biases = {str(token_id): 1.0 for token_id in range(2048)}
    wanted = {"model": "m", "prompt": [1], "max_tokens": 1, "n": 128, "logit_bias": biases}
    assert min(longest_wait_s(front, wanted) for _ in range(2)) < 0.5, "it was 0.8 to 2 s"


def longest_wait_s(front: Front, wanted: dict[str, Any]) -> float:
    """For `/health`, while a request is served."""
    longest_s = 0.0
    with (
        ThreadPoolExecutor(1) as thread,
        httpx2.Client(base_url=f"http://{front.address}", timeout=60) as http,
    ):
        answer = thread.submit(httpx2.post, f"http://{front.address}/v1/completions", json=wanted, timeout=60)
        while not answer.done():
            started_s = time.monotonic()
            assert http.get("/health").status_code == 200
            longest_s = max(longest_s, time.monotonic() - started_s)
    assert len(answer.result().json()["choices"]) == wanted["n"]
    return longest_s
