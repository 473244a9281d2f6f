"""A model service stands still for some seconds (SIGSTOP): a gap of about its length, and the same text."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.processes import Devices
from specwire import Client, Rule, SamplingParams
from specwire.cli.supervisor import Service, Stack
from tests.support import report
from tests.support.effort import sized
from tests.support.harness import LocalStack
from tests.support.rigs import HEAL_S, is_serving, read

STOP_S = sized(2.5, 5.0)
PARAMS = SamplingParams(max_tokens=400, rule=Rule.GUMBEL, seed=5)
"""Over a second of work."""
NUM_REQUESTS = 3
TIMEOUT_S = 60.0
DETECT_S = sized(15.0, 5.0)
"""Longest wait for a proposal, and for a verify service to be back."""
pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Devices(target_ms=10.0, draft_ms=1.0).stack(num_kv_tokens=16384) as running:
        yield running


def stand_still(service: Service, seconds: float) -> None:
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(service.process.pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["draft", "verify"])
def test_a_process_stands_still(stack: Stack, role: str) -> None:
    assert stack.draft is not None
    stopped = {"draft": stack.draft, "verify": stack.verify}[role]
    with Client(stack.address) as client, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        expected = read(client, PARAMS, TIMEOUT_S)
        assert expected.status == "OK"
        started = threading.Event()
        requests = [pool.submit(read, client, PARAMS, TIMEOUT_S, started) for _ in range(NUM_REQUESTS)]
        assert started.wait(TIMEOUT_S)
        stand_still(stopped, STOP_S)
        endings = [request.result() for request in requests]
        for ending in endings:
            wanted = expected.token_ids
            assert ending.token_ids == (wanted if ending.status == "OK" else wanted[: len(ending.token_ids)])
            assert ending.status == "OK" or (role, ending.status) == ("verify", "UNAVAILABLE")
            assert ending.gap_s < STOP_S + DETECT_S
        healed_s = time.monotonic()
        while (
            again := read(client, PARAMS, TIMEOUT_S)
        ).status != "OK" or client.get_status().draft_unavailable:
            assert time.monotonic() < healed_s + HEAL_S
        assert again.token_ids == expected.token_ids
        heal_s = time.monotonic() - healed_s - again.elapsed_s
        services = LocalStack(client, stack.verify.address, stack.draft.address, stack.address)
        services.assert_idle_within(20.0)
    for address in (stack.address, stack.verify.address, stack.draft.address):
        assert is_serving(address)
    gap_s = max(ending.gap_s for ending in endings)
    statuses = ", ".join(sorted({ending.status for ending in endings}))
    report.note(
        f"SIGSTOP for {STOP_S:g} s, {role}",
        statuses,
        f"longest gap {gap_s:.1f} s, draft and target in use again {heal_s:.1f} s after",
    )
