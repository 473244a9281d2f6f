"""`specwire bench serve` against a running stack with emulated devices, whose costs are known."""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specwire import AsyncClient, SamplingParams
from specwire.cli import main as cli
from tests.support.command_line import one_line_error, usage_error
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, local_stack
from tests.support.processes import running
from tools.bench import report
from tools.bench.backends import Coordinator
from tools.bench.metrics import METRICS, RequestRecord, summarize
from tools.bench.prompts import Prompt
from tools.bench.serve import Measurement, OfferedLoad

TARGET_MS, DRAFT_MS, ALPHA = 10.0, 1.0, 0.8
PARAMS = SamplingParams(max_tokens=16, num_draft_tokens=3)
PROMPT = Prompt(token_ids=(1, 2, 3))
TARGET, DRAFT = f"emulated:step_ms={TARGET_MS}", f"emulated:step_ms={DRAFT_MS},alpha={ALPHA}"
stack = entered(lambda: local_stack(TARGET, DRAFT))
# One generation at a time, and none that waits.
narrow = entered(lambda: local_stack(TARGET, coordinator_options={"max_running": 1, "max_waiting": 0}))


def measured(address: str, load: OfferedLoad, prompts: list[Prompt] | None = None) -> Measurement:
    async def measure() -> Measurement:
        async with AsyncClient(address, timeout_s=20) as client:
            measurement = Measurement(Coordinator(client), prompts or [PROMPT], PARAMS, load)
            await measurement.run()
            return measurement

    return asyncio.run(measure())


def bench(stack: LocalStack, *flags: object) -> int:
    return cli.main(["bench", "serve", "--server", stack.address, "--max-tokens", "16", *map(str, flags)])


class TestLoops:
    def test_closed_loop_keeps_so_many_running(self, stack: LocalStack) -> None:
        done = measured(stack.address, OfferedLoad(num_requests=12, concurrency=3))
        summary = summarize(done.records, done.duration_s)
        assert summary.completed == 12
        assert summary.max_concurrent_requests == 3
        assert summary.total_input_tokens == 12 * 3
        assert summary.total_output_tokens == 12 * 16
        assert summary.max_send_delay_ms is None

    def test_open_loop_sends_on_schedule_whether_answered_or_not(self, stack: LocalStack) -> None:
        done = measured(stack.address, OfferedLoad(num_requests=20, rate=50.0, seed=4))
        starts = sorted(record.start_s for record in done.records)
        scheduled = sorted(record.scheduled_s or 0.0 for record in done.records)
        assert scheduled[-1] == pytest.approx(20 / 50)
        assert all(start >= due for start, due in zip(starts, scheduled, strict=True))
        summary = summarize(done.records, done.duration_s)
        assert summary.max_send_delay_ms is not None
        assert 0 <= summary.max_send_delay_ms < 2_000
        assert summary.max_concurrent_requests > 1

    @pytest.mark.serial
    def test_latencies_are_those_of_the_devices(self, stack: LocalStack) -> None:
        """One stream: a first token takes the prompt's draft, then one draft and one target pass.

        What a slow machine adds is the same in each of them.
        """
        done = measured(stack.address, OfferedLoad(num_requests=6, concurrency=1))
        summary = summarize(done.records, done.duration_s)
        names = ("ttft", "itl", "e2el")
        first_ms, pause_ms, whole_ms = (summary.latencies[name]["median"] for name in names)
        round_ms = TARGET_MS + 3 * DRAFT_MS
        assert TARGET_MS < first_ms < whole_ms / 2
        assert round_ms * 0.9 < pause_ms < whole_ms / 2
        length = summary.speculation.mean_acceptance_length
        assert 1.5 < length < 4
        assert sum(len(record.chunk_tokens) for record in done.records) < 6 * 16 / 1.5

    def test_each_request_has_its_own_seed_and_prompts_take_turns(self, stack: LocalStack) -> None:
        prompts = [PROMPT, Prompt(token_ids=(5, 6), max_tokens=4)]
        done = measured(stack.address, OfferedLoad(num_requests=4, concurrency=1), prompts)
        assert [record.num_output_tokens for record in done.records] == [16, 4, 16, 4]
        again = measured(stack.address, OfferedLoad(num_requests=4, concurrency=1), prompts)
        assert [r.chunk_tokens for r in again.records] == [r.chunk_tokens for r in done.records]
        stack.assert_idle_within(1.0)

    def test_an_open_loop_with_a_limit_keeps_to_it(self, stack: LocalStack) -> None:
        done = measured(stack.address, OfferedLoad(num_requests=8, rate=math.inf, concurrency=2))
        summary = summarize(done.records, done.duration_s)
        assert (summary.completed, summary.max_concurrent_requests) == (8, 2)
        assert summary.max_send_delay_ms is not None
        assert summary.max_send_delay_ms > TARGET_MS


class TestFailures:
    def test_refused_requests_are_counted(self, narrow: LocalStack) -> None:
        done = measured(narrow.address, OfferedLoad(num_requests=5, rate=math.inf))
        summary = summarize(done.records, done.duration_s)
        assert summary.completed >= 1
        assert summary.errors == {"RESOURCE_EXHAUSTED": 5 - summary.completed}
        assert summary.num_refusals == 5 - summary.completed

    def test_and_sent_again_when_the_server_says(self, narrow: LocalStack) -> None:
        done = measured(narrow.address, OfferedLoad(num_requests=3, rate=math.inf, retries=8))
        summary = summarize(done.records, done.duration_s)
        assert summary.completed == 3
        assert summary.num_refusals >= 2
        waited = [record for record in done.records if record.num_refusals]
        assert all(record.e2el_ms > 50 for record in waited), "waiting is part of the latency"


class TestCommand:
    def test_table_json_and_plot(
        self, stack: LocalStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        json_file, plot_file = tmp_path / "out.json", tmp_path / "out.png"
        flags = ["--rate", "60", "--num-requests", "12", "--goodput", "ttft_ms:5000", "e2el:10000"]
        assert bench(stack, *flags, "--json", json_file, "--plot", plot_file, "--save-detailed") == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert "12 completed, 0 failed" in out
        assert all(f"\n{name.upper()}" in out for name in METRICS)
        found = json.loads(json_file.read_text())
        self.check_figures(found)
        assert plot_file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    @staticmethod
    def check_figures(found: dict[str, Any]) -> None:
        assert (found["completed"], found["failed"], found["num_prompts"]) == (12, 0, 12)
        assert (found["request_rate"], found["max_concurrency"], found["interrupted"]) == (60, None, False)
        assert found["total_output_tokens"] == 12 * 16 == sum(found["output_lens"])
        assert found["request_goodput"] == pytest.approx(found["request_throughput"])
        assert found["output_throughput"] == pytest.approx(12 * 16 / found["duration"])
        assert 0 < found["median_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
        assert 0 < found["mean_tpot_ms"] < found["mean_itl_ms"]
        assert 50 < found["spec_decode_acceptance_rate"] < 100
        assert found["model_id"]
        assert found["sampling"]["max_tokens"] == 16
        assert len(found["ttfts"]) == len(found["itls"]) == len(found["latencies"]) == 12

    def test_status_1_when_a_request_failed(
        self, stack: LocalStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt_token_ids": [1]}\n{"prompt_token_ids": [99999]}\n')
        assert bench(stack, "--concurrency", 2, "--num-requests", 4, "--prompts", prompts) == 1
        out = capsys.readouterr().out
        assert "2 completed, 2 failed (2 INVALID_ARGUMENT)" in out
        assert out.count("error: ") == 1

    def test_nothing_serves(self, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["bench", "serve", "--server", "127.0.0.1:1", "--concurrency", "1"]
        assert "nothing serves at" in one_line_error(1, argv, capsys)

    @pytest.mark.parametrize(
        "flags",
        [
            ["--rate", "0"],
            ["--rate", "nan"],
            ["--backend", "vllm"],
            ["--concurrency", "0"],
            ["--rate", "1", "--goodput", "itl_ms:3"],
            ["--rate", "1", "--goodput", "ttft_ms"],
            ["--rate", "1", "--burstiness", "-1"],
        ],
    )
    def test_flags_it_cannot_use(self, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert "see specwire bench serve --help" in usage_error(["bench", "serve", *flags], capsys)

    @pytest.mark.parametrize(
        "flags",
        [
            ["--plot", "out.txt"],
            ["--json", "/no/such/directory/out.json"],
            ["--save-detailed"],
            ["--prompts", "/no/such/file"],
            ["--temperature", "-1"],
            ["--base-url", "http://127.0.0.1:1"],
            ["--backend", "openai"],
            ["--dataset-name", "sharegpt"],
            ["--dataset-path", __file__, "--dataset-name", "sharegpt"],
            ["--num-beams", "2", "--backend", "openai", "--base-url", "http://127.0.0.1:1"],
            ["--dataset-name", "random", "--backend", "openai", "--base-url", "http://127.0.0.1:1"],
        ],
    )
    def test_refused_before_anything_is_sent(
        self, flags: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = ["bench", "serve", "--server", "127.0.0.1:1", "--rate", "1", *flags]
        assert flags[0].strip("-") in one_line_error(2, argv, capsys)


def test_ctrl_c_prints_what_was_measured(stack: LocalStack, tmp_path: Path) -> None:
    json_file = tmp_path / "out.json"
    argv = ("bench", "serve", "--server", stack.address, "--rate", "20", "--num-requests", "2000")
    with running(*argv, "--max-tokens", "8", "--json", str(json_file)) as command:
        finished_before = stack.client.get_status().num_finished
        while stack.client.get_status().num_finished < finished_before + 5:
            assert command.process.poll() is None
            time.sleep(0.05)
        command.process.send_signal(signal.SIGINT)
        out, _ = command.process.communicate(timeout=3)
        said = command.errors()
        assert command.process.returncode == 130
    assert re.fullmatch(r"[^\n]*interrupted after \d+ of \d+ requests[^\n]*\n?", said)
    assert b"0 failed" in out
    found = json.loads(json_file.read_text())
    assert found["interrupted"] is True
    assert 1 <= found["completed"] < 2000
    assert found["median_ttft_ms"] > 0
    stack.assert_idle_within(2.0)


def test_the_bar_moves_on_a_terminal_and_is_silent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for out, disabled in (
        (terminal := Terminal(), False),
        (pipe := io.StringIO(), False),
        (quiet := Terminal(), True),
    ):
        monkeypatch.setattr(sys, "stderr", out)
        with report.progress(4, disabled=disabled) as on_record:
            for status in ("OK", "UNAVAILABLE", "OK", "OK"):
                on_record(RequestRecord(start_s=0, end_s=1, status=status))
    assert "0/4" in terminal.getvalue()
    assert (pipe.getvalue(), quiet.getvalue()) == ("", "")
