"""The benchmarks' own foundations: a widened model is the same function, and ratios are what they claim."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import choice, curve, names, report, single, widen
from benchmarks.__main__ import Target, compare, measure_curve
from benchmarks.echo import EchoPair
from benchmarks.names import CONTINUOUS
from benchmarks.peers import Generator, Order
from benchmarks.report import Bar
from benchmarks.single import Plan
from benchmarks.systems import Burst, Sample, Work
from specwire import embedded
from tests.support import tiny_models

SHAPE = widen.Shape(hidden_size=96, num_layers=5, num_heads=12, num_kv_heads=4, intermediate_size=112)


def _greedy(model: PreTrainedModel, prompt: torch.Tensor) -> list[int]:
    return model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)[0].tolist()


# --- widening -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="its own output layer"),
        pytest.param({"tie_word_embeddings": True}, id="a tied one"),
        pytest.param({"rms_norm_eps": 0.1}, id="an epsilon that is scaled with the mean square"),
    ],
)
@torch.inference_mode()
def test_a_widened_model_is_the_same_function(fields: dict[str, Any]) -> None:
    small = tiny_models.build("llama", **fields)
    large = widen.widen(small, SHAPE, torch.float32)
    prompt = torch.randint(0, tiny_models.VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(1))
    wanted, got = (model(prompt).logits for model in (small, large))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    wanted, got = wanted.softmax(-1), got.softmax(-1)
    assert (wanted - got).abs().max() < 1e-5
    assert wanted.max() > 10 / tiny_models.VOCAB_SIZE  # a flat distribution would agree with anything
    assert _greedy(large, prompt) == _greedy(small, prompt)
    assert widen.small_shape(large.config) == SHAPE
    assert large.config.head_dim == small.config.head_dim


@torch.inference_mode()
def test_padding_is_costed_but_never_seen() -> None:
    """Weights that do not matter are random, so that no kernel can profit from zeros; others are zero."""
    small = tiny_models.build("llama")
    one, other = (widen.widen(small, SHAPE, torch.float32, seed=seed) for seed in (0, 1))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    prompt = torch.arange(20)[None]
    torch.testing.assert_close(one(prompt).logits, other(prompt).logits)
    assert one.model.layers[-1].mlp.up_proj.weight.ne(0).all()
    assert one.model.layers[-1].mlp.down_proj.weight.eq(0).all()


@pytest.mark.parametrize(
    "change", [{"hidden_size": 16}, {"num_layers": 1}, {"num_kv_heads": 12}, {"num_heads": 10}]
)
def test_a_shape_that_does_not_fit_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        widen.widen(tiny_models.build("llama"), dataclasses.replace(SHAPE, **change), torch.float32)


def test_only_plain_llamas_are_widened() -> None:
    for model in (tiny_models.build("qwen2"), tiny_models.build("llama", attention_bias=True)):
        with pytest.raises(ValueError, match="only a Llama"):
            widen.widen(model, SHAPE, torch.float32)


# --- statistics -----------------------------------------------------------------------------------


def test_ratios_are_taken_within_a_repetition() -> None:
    """The machine halves its speed in the second repetition: the ratio does not notice."""
    assert report.ratios([30.0, 15.0, 33.0], [20.0, 10.0, 20.0]) == [1.5, 1.5, 1.65]
    summary = report.summarise([1.65, 1.5, 1.5])
    assert (summary.median, summary.low, summary.high) == (1.5, 1.5, 1.65)
    assert summary.text(2) == "1.50 (1.50 to 1.65)"


def test_a_choice_is_judged_by_its_medians_and_by_its_worst_turn(tmp_path: Path) -> None:
    rates = {name: [8.0, 9.0, 12.0] for name in choice.SETTINGS}
    rates[choice.PLAIN] = [10.0, 6.0, 6.0]
    found = choice.Measured(choice.Point("embedded", 1, "greedy"), [0.9, 0.7, 1.0, 1.2], rates)
    assert (found.over(choice.PLAIN), found.worst) == (1.5, 0.7)
    assert "| 0.80, 1.10 | 1.50 | 0.70 | 1.00 (" in found.row
    choice.write(tmp_path / "x.md", [found])
    header, _, row = (tmp_path / "x.md").read_text().splitlines()
    assert header.count("|") == row.count("|")
    assert json.loads((tmp_path / "x.json").read_text())[0]["learning"] == found.learning


def test_a_pair_that_is_not_trained_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choice, "TRAINED_DIR", tmp_path)
    with pytest.raises(SystemExit):
        choice.main(["--pairs", "embedded", "trained"])
    assert f"{tmp_path} has no trained pair; make it with `{choice.TRAINING}`" in capsys.readouterr().err


# --- measuring ------------------------------------------------------------------------------------


class _Scripted:
    """A system that takes a set time and notes the work it gets."""

    def __init__(self, name: str, log: list[tuple[str, int, int]], elapsed_s: float) -> None:
        self.name, self._log, self._elapsed_s = name, log, elapsed_s

    def generate(self, work: Work) -> Sample:
        self._log.append((self.name, work.seed, work.prompt_token_ids[0]))
        token_ids = [0] * work.num_tokens
        return Sample(elapsed_s=self._elapsed_s, token_ids=token_ids, num_passes=4, own_ms=2.0)


class _NoEcho(EchoPair):
    def __init__(self) -> None:
        """Starts no processes."""

    def round_trips_s(self, count: int) -> list[float]:
        return [0.001] * count


def test_repetitions_are_interleaved() -> None:
    log: list[tuple[str, int, int]] = []
    plan = Plan(num_repetitions=2, num_tokens=8, prompts=[[10], [20]])
    both = [_Scripted("a", log, 0.5), _Scripted("b", log, 0.25)]
    done = single.compare("x", 1.0, both, plan, _NoEcho(), lambda text: None)
    assert log == [(name, seed, prompt) for seed, prompt, name in itertools.product((0, 1), (10, 20), "ab")]
    assert done.series["a"].tokens_per_s == [16, 16]
    assert done.series["b"].tokens_per_s == [32, 32]
    assert done.series["b"].tokens_per_pass == [2, 2]
    assert done.series["b"].own_ms_per_round == [0.5, 0.5]
    assert done.two_echoes_ms == [2.0, 2.0]


def test_a_system_that_stops_early_is_not_counted_as_fast() -> None:
    class Short(_Scripted):
        def generate(self, work: Work) -> Sample:
            return dataclasses.replace(super().generate(work), token_ids=[1])

    plan = Plan(num_repetitions=1, num_tokens=8, prompts=[[10]])
    with pytest.raises(RuntimeError, match="made 1 tokens, not 8"):
        single.compare("x", 0.0, [Short("a", [], 1.0)], plan, _NoEcho(), lambda text: None)


def test_peers_generate_what_was_ordered(tmp_path: Path) -> None:
    target = tiny_models.save(tiny_models.build("llama"), tmp_path / "target")
    draft = tiny_models.save(tiny_models.build("llama", seed=1), tmp_path / "draft")
    generator = Generator(str(target), str(draft), "float32", "float32")
    texts = []
    for assisted, constant in ((False, None), (True, None), (True, 3)):
        order = Order(
            prompt_token_ids=[5, 6, 7],
            max_new_tokens=12,
            temperature=0.0,
            seed=0,
            assisted=assisted,
            num_assistant_tokens=constant,
        )
        answer = generator.run(order)
        assert len(answer.token_ids) == 12
        assert 0 < answer.first_s < answer.elapsed_s
        assert answer.num_passes <= 12
        texts.append(answer.token_ids)
    assert texts[0] == texts[1] == texts[2]


STREAMS_PLAN = curve.Plan(num_streams=(1, 4), num_repetitions=2, num_tokens=8, least_requests=2)
TARGET = Target(
    name="embedded",
    source=embedded.TARGET_DIR,
    dtype="float32",
    num_threads=1,
    plan=Plan(num_repetitions=1, num_tokens=6, prompts=[[40, 41, 42]], num_echoes=5),
    streams_plan=dataclasses.replace(STREAMS_PLAN, num_repetitions=1, num_tokens=6),
)


@pytest.mark.slow
def test_all_systems_run_side_by_side() -> None:
    """Real processes, the embedded pair, next to nothing to do."""
    with EchoPair() as echo:
        comparisons = compare(TARGET, echo)
    for comparison in comparisons:
        assert len(comparison.series) == 5
        assert all(series.tokens_per_s[0] > 0 for series in comparison.series.values())
        assert 0 < comparison.series[names.SPECWIRE].own_ms_per_round[0] < 100
    greedy = [series.token_ids for series in comparisons[0].series.values()]
    assert greedy.count(greedy[0]) == 5


# --- many streams ---------------------------------------------------------------------------------


class _ScriptedStreams:
    """Answers a burst at once and notes its prompts."""

    def __init__(self, name: str, log: list[tuple[str, list[list[int]]]], own_prompts: bool = False) -> None:
        self.name, self.own_prompts, self.learns, self._log = name, own_prompts, False, log

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Burst:
        self._log.append((self.name, [list(prompt) for prompt in prompts]))
        n = len(prompts)
        return Burst(elapsed_s=0.5, token_ids=[[7] * num_tokens] * n, tpots_ms=list(range(1, n + 1)))


def test_bursts_are_interleaved_and_no_cache_meets_a_prompt_again() -> None:
    log: list[tuple[str, list[list[int]]]] = []
    both = [_ScriptedStreams("a", log), _ScriptedStreams("b", log, own_prompts=True)]
    prompts = [[i] for i in range(4)]
    series = curve.measure(both, STREAMS_PLAN, prompts, lambda text: None)
    assert [(name, len(burst)) for name, burst in log] == [
        ("a", 1), ("b", 1), ("a", 1), ("b", 1), ("a", 4), ("b", 4)
    ] * 2  # fmt: skip
    sent = [tuple(prompt) for _, burst in log for prompt in burst]
    assert len(set(sent)) == len(sent)
    assert {prompt[1:] for prompt in sent} == {(0,), (1,), (2,), (3,)}
    assert series[1]["a"].tokens_per_s == [16.0, 16.0]  # two bursts of one request
    assert series[4]["b"].tokens_per_s == [64.0, 64.0]
    assert series[4]["b"].p99_tpot_ms == pytest.approx([3.97, 3.97])


def test_a_system_that_learns_has_the_load_for_a_while_first() -> None:
    log: list[tuple[str, list[list[int]]]] = []
    learner, other = _ScriptedStreams("a", log), _ScriptedStreams("b", log)
    learner.learns = True
    plan = dataclasses.replace(STREAMS_PLAN, num_repetitions=1)
    curve.measure([learner, other], plan, [[i] for i in range(4)], lambda text: None)
    settling = [("a", 1)] * 6 + [("a", 4)] * 3
    assert [(name, len(burst)) for name, burst in log[: len(settling)]] == settling
    assert len(log) == len(settling) + 6
    sent = [tuple(prompt) for name, burst in log if name == "a" for prompt in burst]
    assert len(set(sent)) == len(sent)


def test_speculation_must_not_change_a_text_in_float32() -> None:
    class Other(_ScriptedStreams):
        def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Burst:
            burst = super().run(prompts, num_tokens)
            return dataclasses.replace(burst, token_ids=[[8] * num_tokens, *burst.token_ids[1:]])

    prompts = [[i] for i in range(4)]
    all_three = [_ScriptedStreams("a", []), Other("b", [], own_prompts=True), _ScriptedStreams("c", [])]
    identical = curve.compare_texts(all_three, STREAMS_PLAN, prompts, exact=False)
    assert identical == {"b": 3, "c": 4}
    with pytest.raises(RuntimeError, match="1 of 4 texts change with speculation"):
        curve.compare_texts(all_three, STREAMS_PLAN, prompts, exact=True)


def test_a_short_stream_is_not_counted_as_fast() -> None:
    class Short(_ScriptedStreams):
        def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Burst:
            return super().run(prompts, num_tokens - 1)

    with pytest.raises(RuntimeError, match="a made 7 tokens, not 8"):
        curve.exactly(Short("a", []), [[1]], 8)


@pytest.mark.slow
def test_the_curve_runs_side_by_side() -> None:
    done = measure_curve(TARGET)
    assert done.identical == {names.NO_SPECULATION: 4, CONTINUOUS: 4}
    assert list(done.series) == [1, 4]
    for of_all in done.series.values():
        assert list(of_all) == [names.SPECWIRE, names.NO_SPECULATION, names.ASSISTED, CONTINUOUS]
        assert all(series.tokens_per_s[0] > 0 < series.p99_tpot_ms[0] for series in of_all.values())


# --- the report -----------------------------------------------------------------------------------


def test_a_limit_is_kept_missed_or_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bars = [
        Bar(what="memory", measured=3.0, limit=4.0, unit="MiB"),
        Bar(what="speed", measured=0.5, limit=0.9, at_least=True),
        Bar(what="heat", measured=None, limit=1.0),
    ]
    found = report.Report(name="x", title="X", machine={"CPU": "2"}, bars=bars, details="", data={"a": 1})
    assert found.finish(tmp_path) == 1
    text = (tmp_path / "x.md").read_text()
    assert text in capsys.readouterr().out
    assert "| memory | 3 MiB | at most 4 MiB | pass |" in text
    assert "| speed | 0.5 | at least 0.9 | MISS |" in text
    assert "| heat | – | at most 1 | not measured |" in text
    assert json.loads((tmp_path / "x.json").read_text())["a"] == 1
