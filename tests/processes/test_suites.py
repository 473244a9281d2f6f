"""What others use to talk to OpenAI-compatible servers, against ours: lm-eval, LiteLLM and schemathesis.

They are installed apart (`make suites`), and run as programs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specwire import embedded
from tests.support.fixtures import entered
from tests.support.fronts import Fronted, fronted

ROOT = Path(__file__).parents[2]
BIN = ROOT / "build/suites/bin"
PROGRAMS = ROOT / "tests/support/suites"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BIN.exists(), reason="needs `make suites`"),
]
here = entered(lambda: fronted(embedded.TARGET_DIR, embedded.DRAFT_DIR))


def run(*command: object, timeout_s: float = 400) -> str:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environ = os.environ | offline | {"NO_PROXY": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [str(word) for word in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environ,
        cwd=BIN.parent,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


# --- lm-eval ----------------------------------------------------------------------------------------

DOCS: list[dict[str, Any]] = [
    {"text": "import", "choices": [" os\n", " zq\n", " (((\n"]},
    {"text": "def __init__(", "choices": ["self", "import", "][", "0.5"]},
    {
        "text": "class Queue(object):\n    def get(self):\n        return",
        "choices": [" self", " def", " ==="],
    },
    {"text": "for i in range(", "choices": ["len(", "class ", "\n\n\n"]},
    {"text": "try:\n    pass\nexcept", "choices": [" ValueError:", " while:", " 12:"]},
    {"text": "if x is not", "choices": [" None:", " def:", " import:"]},
    {"text": "    raise", "choices": [" x = 3", " TypeError('bad')", " else:"]},
    {"text": "with open(path", "choices": [") as f:", "] as f:", "} as f:"]},
]
"""Texts with continuations, of which the first is not always the likeliest."""


def make_task(directory: Path) -> None:
    """A task of lm-eval's: which continuation is likeliest."""
    data = directory / "docs.jsonl"
    data.write_text("".join(json.dumps(doc | {"label": 0}) + "\n" for doc in DOCS))
    task = {
        "task": "continuations",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    (directory / "continuations.yaml").write_text(json.dumps(task))  # which is YAML too


@torch.inference_mode()
def likelihoods(doc: dict[str, Any], model: Any, tokenizer: Any) -> list[float]:
    """Of each continuation, by transformers: the sum of its tokens' log probabilities."""
    num_before = len(tokenizer(doc["text"]).input_ids)
    found = []
    for choice in doc["choices"]:
        ids = torch.tensor(tokenizer(doc["text"] + choice).input_ids)
        rows = torch.log_softmax(model(ids[None]).logits[0].double(), dim=-1)[:-1]
        each = rows.gather(1, ids[1:, None])[:, 0]
        found.append(float(each[num_before - 1 :].sum()))
    return found


def test_lm_eval_scores_what_transformers_does(here: Fronted, tmp_path: Path) -> None:
    make_task(tmp_path)
    served = {
        "model": here.model,
        "base_url": f"{here.url}/v1/completions",
        "tokenizer": embedded.TARGET_DIR,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "num_concurrent": 2,
    }
    arguments = ",".join(f"{name}={value}" for name, value in served.items())
    run(
        *(BIN / "lm_eval", "run", "--model", "local-completions", "--model_args", arguments),
        *("--tasks", "continuations", "--include_path", tmp_path, "--batch_size", 5),
        *("--output_path", tmp_path / "out", "--log_samples"),
    )
    [results] = (tmp_path / "out").rglob("results_*.json")
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    model = AutoModelForCausalLM.from_pretrained(embedded.TARGET_DIR, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(embedded.TARGET_DIR)
    num_right = 0
    for sample in map(json.loads, samples.read_text().splitlines()):
        expected = likelihoods(sample["doc"], model, tokenizer)
        found = [float(response[0][0]) for response in sample["resps"]]
        assert found == pytest.approx(expected, abs=1e-3), sample["doc"]
        num_right += max(expected) == expected[0]
    accuracy = json.loads(results.read_text())["results"]["continuations"]["acc,none"]
    assert accuracy == pytest.approx(num_right / len(DOCS))


# --- LiteLLM ----------------------------------------------------------------------------------------


def test_litellm(here: Fronted) -> None:
    """Its program checks the answers that it prints."""
    told = json.loads(run(BIN / "python", PROGRAMS / "with_litellm.py", f"{here.url}/v1", here.model))
    for streamed, whole in told.values():
        assert streamed == whole != ""


# --- schemathesis -----------------------------------------------------------------------------------


def test_schemathesis() -> None:
    """No body, however strange, has a 5xx for an answer, or an answer that is not as described."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    short = {"max_model_len": 48}  # many of its bodies set no limit
    with fronted(embedded.TARGET_DIR, verify_options=short) as here:
        told = run(
            *(BIN / "schemathesis", "run", f"{here.url}/openapi.json", "--checks", checks),
            *("--phases", "examples,fuzzing", "--max-examples", 10, "--seed", 1),
            *("--request-timeout", 60, "--no-color"),
        )
    assert re.search(r"(\d+) generated, \1 passed", told), told[-2000:]
