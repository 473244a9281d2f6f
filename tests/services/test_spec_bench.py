"""`specwire bench spec-bench` through real services, with the formulas of Spec-Bench's `speed.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specwire import ModelInfo, SamplingParams
from specwire.cli import main as cli
from specwire.config.own_methods import DRAFT_MODEL
from specwire.embedded import DRAFT_DIR, TARGET_DIR
from specwire.errors import ConfigError
from specwire.text.tokenizer import load
from tests.support.harness import local_stack
from tests.support.imports import ROOT
from tools import compare
from tools.bench import spec_bench

QUESTIONS = ROOT / "benchmarks/spec_bench.jsonl"
FIRST = "qa", "writing", "translation"
METHODS = "plain", "auto", "model", "tree", "ngram"


def mean_speed(answers: list[Any]) -> float:
    """Of a method, as the script has it."""
    choices = [answer["choices"][0] for answer in answers]
    return float(np.mean([sum(each["new_tokens"]) / sum(each["wall_time"]) for each in choices]))


def test_files_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some questions, one of two turns; every method writes plain decoding's texts, and the page has the
    figures that the script computes from the files."""
    lines = QUESTIONS.read_text().splitlines()
    chosen = [next(line for line in lines if json.loads(line)["category"] == each) for each in FIRST]
    (tmp_path / "questions.jsonl").write_text("\n".join(chosen) + "\n")
    flags = ["--questions", str(tmp_path / "questions.jsonl"), "--output", str(tmp_path / "out")]
    with local_stack(TARGET_DIR, DRAFT_DIR) as stack:
        command = ["bench", "spec-bench", "--server", stack.address, *flags, "--max-tokens", "8"]
        assert cli.main([*command, "--methods", *METHODS[1:]]) == 0
        page = capsys.readouterr().out
        assert cli.main([*command, "--methods", "heads"]) == 2
        assert "--methods heads: is not one of this server's: plain, auto, model" in capsys.readouterr().err
    assert (tmp_path / "out/spec-bench.md").read_text() == page
    answers = {
        name: [json.loads(line) for line in (tmp_path / f"out/{name}.jsonl").read_text().splitlines()]
        for name in METHODS
    }
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in page.splitlines()[4:]}
    assert [*rows] == [*METHODS]
    plain = answers["plain"]
    for name, mine in answers.items():
        assert [each["category"] for each in mine] == [*FIRST]
        lengths: list[int] = []
        for answer, unaided in zip(mine, plain, strict=True):
            found = answer["choices"][0]
            assert found["turns"] == unaided["choices"][0]["turns"]
            assert sum(found["accept_lengths"]) == sum(found["new_tokens"])
            assert len(found["accept_lengths"]) == sum(found["decoding_steps"])
            lengths += found["accept_lengths"]
        assert len(mine[1]["choices"][0]["turns"]) == 2
        overall = f"{mean_speed(mine) / mean_speed(plain):.2f} ({np.mean(lengths):.2f})"
        assert rows[name][-3:] == [overall, f"{mean_speed(mine):.1f}", "3 of 3"]
        assert np.mean(lengths) == 1 if name == "plain" else name == "ngram" or np.mean(lengths) > 1.5
    # Of plain decoding the script counts what the text is encoded to, less a token that begins it.
    tokenizer = load(TARGET_DIR)
    assert tokenizer is not None
    choices = [answer["choices"][0] for answer in plain]
    recounted = sum(len(tokenizer.encode(turn)) for each in choices for turn in each["turns"])
    assert recounted == pytest.approx(sum(sum(each["new_tokens"]) for each in choices), rel=0.1)


def test_the_questions_have_every_category() -> None:
    asked = {each.category for each in spec_bench.read(QUESTIONS)}
    assert asked == {category for task in spec_bench.TASKS.values() for category in task}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "holds no question"),
        ("turns", "line 1: is not a JSON object"),
        ('{"category": "qa", "turns": ["x"]}', "line 1: question_id=None is neither"),
        ('{"question_id": 1, "category": "poems", "turns": ["x"]}', "category='poems' is not one of writing"),
        ('{"question_id": 1, "category": "qa", "turns": ["x", ""]}', "is not a list of texts"),
    ],
)
def test_files_that_are_none(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=said) as raised:
        spec_bench.read(path)
    assert str(raised.value).startswith(f"--questions {path}")


def test_a_draft_in_the_targets_process_is_one() -> None:
    """It has chains and trees, here as in `specwire demo --compare`."""
    target = ModelInfo(name="t", vocab_size=8, context_len=8, trees=True, drafts=True, own_source=DRAFT_MODEL)
    assert {"model", "tree"} <= spec_bench.methods(target, None).keys()
    params = SamplingParams()
    assert [kind.unavailable(params, target, None) for kind in compare.KINDS] == [""] * len(compare.KINDS)
    none = ModelInfo(name="t", vocab_size=8, context_len=8, trees=True)
    lacking = [kind.name for kind in compare.KINDS if kind.unavailable(params, none, None)]
    assert lacking == ["chain", "block", "tree"]
