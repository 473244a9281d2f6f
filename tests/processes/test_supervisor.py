"""A service as a child process, when it does not do what it should."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from specwire import AsyncClient, Client, SamplingParams
from specwire.cli import main as cli
from specwire.cli.supervisor import Pauses, Service, Stack
from specwire.config.models import NO_DRAFT
from specwire.config.stack import StackConfig, UpConfig
from specwire.v1 import draft_pb2, draft_pb2_grpc

HANGS = """
import signal, threading
from specwire.telemetry import stacks
stacks.show_on_signal()
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


@pytest.mark.slow
def test_up_starts_its_front_again_and_ends_with_its_coordinator(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = UpConfig(
        target="emulated:step_ms=1", draft="none", address="127.0.0.1:0", http_address="127.0.0.1:0"
    )
    with Stack(config, {"SPECWIRE_MODEL_NAME": "m"}) as stack:
        assert stack.http is not None
        address, pids = stack.http.address, [stack.http.process.pid]
        served = []

        def kill() -> None:
            for _ in range(2):
                os.kill(pids[-1], signal.SIGKILL)
                served.append(answer(address, old_pid=pids[-1], stack=stack))
                assert stack.http is not None
                pids.append(stack.http.process.pid)
            stack.coordinator.process.kill()

        killing = threading.Thread(target=kill)
        killing.start()
        assert cli._supervise(stack) == 1
        killing.join()
    assert [data["data"][0]["id"] for data in served] == ["m", "m"]
    assert len(set(pids)) == 3
    told = capfd.readouterr().err + caplog.text
    assert "the HTTP front ended with status -9; restarting in 0.5 s" in told
    assert "the HTTP front ended with status -9; restarting in 1 s" in told
    assert "error: coordinator ended with status -9" in told


def answer(address: str, old_pid: int, stack: Stack) -> dict[str, list[dict[str, str]]]:
    """Of the next front, when it answers."""
    ends_s = time.monotonic() + 60
    while True:
        assert time.monotonic() < ends_s
        with contextlib.suppress(OSError):
            if stack.http and stack.http.process.pid != old_pid:
                with urllib.request.urlopen(f"http://{address}/v1/models", timeout=20) as response:
                    return dict(json.load(response))
        time.sleep(0.05)


@pytest.mark.slow
def test_up_starts_replicas_and_goes_on_while_one_is_left() -> None:
    config = UpConfig(target="emulated:step_ms=5", draft=NO_DRAFT, replicas=2, address="127.0.0.1:0")
    params = SamplingParams(max_tokens=20, seed=1)
    with Stack(config) as stack:
        assert len(stack.verifies) == 2
        asyncio.run(served(stack, params, num_available=2))
        stack.verifies[0].kill()
        ended = stack.wait()
        assert ended is stack.verifies[0]
        assert not stack.is_required(ended)
        asyncio.run(served(stack, params, num_available=1))
        stack.verifies[1].kill()
        assert stack.is_required(stack.wait())


async def served(stack: Stack, params: SamplingParams, num_available: int) -> None:
    async with AsyncClient(stack.address) as client:
        done = await client.generate(params=params, prompt_token_ids=[1, 2, 3])
        assert done.usage.completion_tokens == params.max_tokens
        replicas = (await client.get_status()).verify_replicas
        assert {one.address for one in replicas} == {one.address for one in stack.verifies}
        assert sum(not one.unavailable for one in replicas) == num_available


def test_pauses_grow_until_a_process_lasts() -> None:
    pauses = Pauses()
    assert [pauses.next(now_s) for now_s in (100, 101, 103, 110)] == [0.5, 1.0, 2.0, 4.0]
    assert [pauses.next(111 + i) for i in range(5)] == [8.0, 16.0, 30.0, 30.0, 30.0]
    assert pauses.next(300.0) == 0.5


def test_drafts_from_the_text_need_the_target_alone() -> None:
    config = StackConfig(target="emulated:step_ms=1", draft="ngram", address="127.0.0.1:0")
    with Stack(config) as stack, Client(stack.address) as client:
        assert [service.module for service in stack.services] == ["verify_service", "coordinator"]
        params = SamplingParams(max_tokens=8, num_draft_tokens=3)
        done = client.generate(params=params, prompt_token_ids=[4, 5, 6, 7, 4, 5])
    assert [counts.source for counts in done.speculation.by_source] == ["ngram"]
    assert done.speculation.draft_unavailable == ""


@pytest.mark.slow
def test_a_draft_with_a_drafter_takes_fewer_passes() -> None:
    """A text that repeats itself, which the draft guesses from it; the draft's passes are counted there."""
    given = "repeat=6,step_ms="  # passes are long beside what other work on the machine does to their times
    config = StackConfig(
        target=f"emulated:{given}30",
        draft=f"ngram>emulated:{given}20",
        address="127.0.0.1:0",
        num_outcomes="0",
    )
    params = SamplingParams(temperature=0, max_tokens=64, num_draft_tokens=7, max_depth=0)
    with Stack(config) as stack, Client(stack.address) as client:
        done = client.generate(params=params, prompt_token_ids=[4, 5, 6])
        plain = client.generate(params=replace(params, num_draft_tokens=0), prompt_token_ids=[4, 5, 6])
        _, draft = client.get_model_info()
        assert stack.draft is not None
        with grpc.insecure_channel(stack.draft.address) as channel:
            asked = draft_pb2.DraftServiceGetModelInfoRequest()
            status = draft_pb2_grpc.DraftServiceStub(channel).GetModelInfo(asked, timeout=10).status
    assert done.token_ids == plain.token_ids
    assert done.speculation.num_draft_tokens > 2 * status.num_steps
    assert draft is not None
    assert draft.inner == "ngram"
