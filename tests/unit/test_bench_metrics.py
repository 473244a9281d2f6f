"""Known records, known figures: the arithmetic of `specwire bench serve`, its prompts, its arrival times."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specwire import ConfigError, ModelInfo, SamplingParams, SourceCounts, Speculation
from tests.support.imports import GRPC, ROOT, imports, packages
from tests.support.statistics import FALSE_ALARM_RATE
from tools.bench import prompts, report
from tools.bench.metrics import (
    METRICS,
    RequestRecord,
    latency_figures,
    output_rate,
    running_requests,
    summarize,
    total_speculation,
)
from tools.bench.prompts import Prompt
from tools.bench.serve import Measurement, OfferedLoad, arrival_times


def record(
    start_s: float = 0.0, *, chunks: Any = ((0.1, 1), (0.2, 3), (0.4, 2)), **values: Any
) -> RequestRecord:
    """A completed request whose chunks arrive so many seconds after its start."""
    times, tokens = zip(*chunks, strict=True) if chunks else ((), ())
    defaults: dict[str, Any] = {
        "start_s": start_s,
        "end_s": start_s + 0.5,
        "chunk_times_s": tuple(start_s + t for t in times),
        "chunk_tokens": tokens,
        "num_input_tokens": 10,
        "num_output_tokens": sum(tokens),
    }
    return RequestRecord(**defaults | values)


def failed(start_s: float, status: str, **values: Any) -> RequestRecord:
    return record(start_s, status=status, error=f"it was {status}", num_output_tokens=0, **values)


class TestOneRequest:
    def test_its_latencies(self) -> None:
        one = record(2.0)
        assert one.ttft_ms == pytest.approx(100)
        assert one.e2el_ms == pytest.approx(500)
        assert one.tpot_ms == pytest.approx((500 - 100) / 5)  # six tokens, the first excluded
        assert one.itls_ms == pytest.approx([100, 200])  # between chunks, however much they bring
        short = record(chunks=[(0.1, 1)])
        assert (short.tpot_ms, short.itls_ms, short.meets({"tpot": 0.001})) == (None, [], True)
        assert record(chunks=[]).ttft_ms == pytest.approx(500), "as late as its end"

    @pytest.mark.parametrize(
        ("objectives", "met"),
        [
            ({"ttft": 99}, False),
            ({"tpot": 79}, False),
            ({"ttft": 101, "tpot": 81, "e2el": 501}, True),
            ({"ttft": 101, "tpot": 81, "e2el": 499}, False),
        ],
    )
    def test_objectives_must_all_be_met(self, objectives: dict[str, float], met: bool) -> None:
        assert record().meets(objectives) is met


class TestDistribution:
    def test_percentiles_interpolate(self) -> None:
        of = latency_figures([float(value) for value in range(1, 101)])
        assert of["mean"] == of["median"] == of["p50"] == 50.5
        assert of["p90"] == pytest.approx(90.1)  # 1 + 0.9 * 99
        assert of["p99"] == pytest.approx(99.01)
        assert of["std"] == pytest.approx(math.sqrt((100**2 - 1) / 12))

    def test_of_one_value_and_of_none(self) -> None:
        assert latency_figures([7.0]) == {"std": 0} | dict.fromkeys(
            ("mean", "median", "p50", "p90", "p99"), 7
        )
        assert latency_figures([]) == {}


class TestSummary:
    def test_of_known_records(self) -> None:
        late = record(1.0, chunks=[(0.3, 2), (0.4, 2)])
        lost = failed(1.0, "UNAVAILABLE", num_input_tokens=0, num_refusals=3)
        records = [record(0.0, num_refusals=2), late, lost]
        fields = summarize(records, 4.0, {"ttft": 200.0}).to_dict()
        assert (fields["completed"], fields["failed"]) == (2, 1)
        assert (fields["total_input_tokens"], fields["total_output_tokens"]) == (20, 10)
        assert fields["duration"] == 4
        assert fields["request_throughput"] == 0.5
        assert fields["request_goodput"] == 0.25
        assert fields["output_throughput"] == 2.5
        assert fields["total_token_throughput"] == 7.5
        assert fields["mean_ttft_ms"] == pytest.approx(200)
        assert fields["p99_ttft_ms"] == pytest.approx(100 + 0.99 * 200)
        assert fields["mean_tpot_ms"] == pytest.approx((80 + 200 / 3) / 2)
        assert fields["median_itl_ms"] == pytest.approx(100)  # of 100, 200, 100: pooled, not per request
        assert fields["mean_itl_ms"] == pytest.approx(400 / 3)
        assert fields["std_e2el_ms"] == pytest.approx(0, abs=1e-9)
        assert fields["errors_by_status"] == {"UNAVAILABLE": 1}
        assert fields["refused"] == 5, "whether retried or not"
        assert summarize(records, 4.0).to_dict()["request_goodput"] is None

    def test_outputs_of_one_token_stay_out_of_the_time_per_token(self) -> None:
        fields = summarize([record(), record(chunks=[(0.1, 1)])], 1.0).to_dict()
        assert fields["mean_tpot_ms"] == pytest.approx(80)
        only = summarize([record(chunks=[(0.1, 1)])], 1.0).to_dict()
        assert only["mean_tpot_ms"] is only["p99_itl_ms"] is None
        assert only["mean_ttft_ms"] == pytest.approx(100)

    @pytest.mark.parametrize("records", [[], [failed(0.0, "CANCELLED")]], ids=["none", "all failed"])
    def test_nothing_measured_is_none_and_not_zero(self, records: list[RequestRecord]) -> None:
        summary = summarize(records, 0.0, {"ttft": 1.0})
        fields = json.loads(json.dumps(summary.to_dict()))
        assert all(fields[f"{of}_{name}_ms"] is None for of in ("mean", "p50", "p99") for name in METRICS)
        assert fields["request_throughput"] == fields["request_goodput"] == 0
        assert fields["max_output_tokens_per_s"] == fields["max_concurrent_requests"] == 0
        assert "spec_decode_acceptance_rate" not in fields
        assert report.table(summary, records).count(" -") == 4 * 4

    def test_how_late_the_sender_was(self) -> None:
        records = [record(1.0, scheduled_s=1.0), record(2.03, scheduled_s=2.0)]
        assert summarize(records, 3.0).max_send_delay_ms == pytest.approx(30)
        assert summarize([record()], 3.0).max_send_delay_ms is None


class TestOverTime:
    def test_tokens_fall_into_the_bin_they_arrived_in(self) -> None:
        rate = output_rate([record(0.01), record(0.26)], 0.2)
        np.testing.assert_allclose(rate, [1 / 0.2, 4 / 0.2, 5 / 0.2, 2 / 0.2])
        assert output_rate([], 1.0).size == 0

    def test_running_requests(self) -> None:
        records = [record(0.0), record(0.25), record(0.5)]  # the third starts when the first ends
        assert [count for _, count in running_requests(records)] == [1, 2, 1, 2, 1, 0]
        assert summarize(records, 1.0).max_concurrent_requests == 2


def test_speculation_adds_up() -> None:
    short = Speculation(
        num_rounds=2,
        num_draft_tokens=2,
        num_accepted_tokens=1,
        acceptance_histogram=(1, 1),
        drafted_per_position=(2,),
        accepted_per_position=(1,),
        by_source=(SourceCounts(source="small", num_drafts=2, num_draft_tokens=2, num_accepted_tokens=1),),
    )
    long = Speculation(
        num_rounds=3,
        num_draft_tokens=4,
        num_accepted_tokens=4,
        acceptance_histogram=(0, 0, 2),
        drafted_per_position=(2, 2),
        accepted_per_position=(2, 2),
        by_source=(
            SourceCounts(source="ngram", num_drafts=1, num_draft_tokens=2, num_accepted_tokens=2),
            SourceCounts(source="small", num_drafts=1, num_draft_tokens=2, num_accepted_tokens=2),
        ),
    )
    total = total_speculation([short, long, Speculation()])
    assert total.acceptance_histogram == (1, 1, 2)
    assert total.drafted_per_position == (4, 2)
    assert total.by_source == (
        SourceCounts(source="small", num_drafts=3, num_draft_tokens=4, num_accepted_tokens=3),
        SourceCounts(source="ngram", num_drafts=1, num_draft_tokens=2, num_accepted_tokens=2),
    )
    fields = summarize([record(speculation=short), record(speculation=long)], 1.0).to_dict()
    assert fields["spec_decode_acceptance_rate"] == pytest.approx(100 * 5 / 6)
    assert fields["spec_decode_acceptance_length"] == pytest.approx(1 + 5 / 4)
    assert fields["spec_decode_per_position_acceptance_rates"] == [3 / 4, 2 / 4]
    assert fields["spec_decode_num_drafts"] == 4


class TestArrivalTimes:
    @pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
    def test_gaps_follow_the_gamma_distribution(self, burstiness: float) -> None:
        n, rate = 4_000, 20.0
        times = arrival_times(OfferedLoad(num_requests=n, rate=rate, burstiness=burstiness, seed=3))
        assert times[-1] == pytest.approx(n / rate)
        gamma = stats.gamma(burstiness, scale=1 / (rate * burstiness))
        assert stats.kstest(np.diff(times, prepend=0.0), gamma.cdf).pvalue > FALSE_ALARM_RATE
        assert stats.kstest(np.diff(times), stats.expon(scale=2 / rate).cdf).pvalue < FALSE_ALARM_RATE

    def test_the_seed_fixes_them(self) -> None:
        one, same, other = (arrival_times(OfferedLoad(num_requests=9, rate=2.0, seed=s)) for s in (1, 1, 2))
        np.testing.assert_array_equal(one, same)
        assert not np.array_equal(one, other)

    def test_the_limits(self) -> None:
        at_once = arrival_times(OfferedLoad(num_requests=3, rate=math.inf))
        np.testing.assert_array_equal(at_once, 0)
        even = arrival_times(OfferedLoad(num_requests=4, rate=2.0, burstiness=math.inf))
        np.testing.assert_allclose(even, [0.5, 1, 1.5, 2])


class TestPrompts:
    def test_text(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.txt"
        path.write_text('def f():\r\n\n{not json\n"quoted"\n')
        assert [p.text for p in prompts.read(path)] == ["def f():", "{not json", '"quoted"']

    def test_json_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"prompt": "a\\nb", "max_tokens": 7}\n\n{"prompt_token_ids": [1, 2]}\n')
        assert prompts.read(path) == [Prompt(text="a\nb", max_tokens=7), Prompt(token_ids=(1, 2))]

    @pytest.mark.parametrize(
        "line",
        [
            "plain text",
            '{"prompt": "a", "maxtokens": 3}',
            '{"max_tokens": 3}',
            '{"prompt": "a", "prompt_token_ids": [1]}',
            '{"prompt": 3}',
            '{"prompt_token_ids": [1, -2]}',
            '{"prompt_token_ids": "12"}',
            '{"prompt": "a", "max_tokens": 0}',
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(self, line: str, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"prompt": "fine"}\n' + line)
        with pytest.raises(ConfigError, match="line 2"):
            prompts.read(path)

    def test_no_prompt_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            prompts.read(tmp_path / "missing")
        (tmp_path / "empty").write_text("\n \n")
        with pytest.raises(ConfigError, match="no prompt"):
            prompts.read(tmp_path / "empty")

    def test_built_in_ones_fit_a_target_without_a_tokenizer(self) -> None:
        bare = prompts.built_in(ModelInfo(name="x", vocab_size=64, context_len=1024))
        assert all(p.text is None and p.token_ids and max(p.token_ids) < 64 for p in bare)
        spoken = prompts.built_in(
            ModelInfo(name="x", vocab_size=64, context_len=9, tokenizer_fingerprint="f")
        )
        assert all(p.text for p in spoken)


class Asking:
    """A server that answers nothing."""

    async def send(self, prompt: Prompt, params: SamplingParams, record: Any, now_s: Any) -> None:
        record.num_output_tokens = params.max_tokens


def test_a_prompt_that_cannot_be_asked_is_one_request() -> None:
    """Its own `max_tokens` does not go with the parameters of all: the others are measured."""
    asked = [Prompt(text="a", max_tokens=40), Prompt(text="b", max_tokens=4)]
    load = OfferedLoad(num_requests=4, concurrency=1)
    measured = Measurement(Asking(), asked, SamplingParams(min_tokens=16), load)  # type: ignore[arg-type]
    asyncio.run(measured.run())
    assert [record.status for record in measured.records] == ["OK", "INVALID_ARGUMENT"] * 2
    assert "min_tokens=16" in measured.records[1].error


@pytest.mark.parametrize("name", ["metrics", "prompts", "report"])
def test_the_arithmetic_knows_no_network(name: str) -> None:
    assert not packages(imports(ROOT / f"tools/bench/{name}.py")) & (GRPC | {"asyncio"})
