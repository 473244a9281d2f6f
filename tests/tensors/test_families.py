"""docs/models.md says which families are served, and why the others are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from benchmarks import families
from specwire.config.services import VerifyConfig
from specwire.engine import boot
from specwire.engine.model.loading import load_model
from specwire.errors import ModelLoadError
from tests.support.imports import ROOT
from tests.support.tiny_models import build, save
from verify_service.verifier import VerifyDecider

DOCUMENT = (ROOT / "docs/models.md").read_text()


def table() -> dict[str, str]:
    """By family, what the document says of it."""
    section = DOCUMENT.partition("\n## Families\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (`.*`) \| (\d+) \|$", section, re.MULTILINE)
    assert all(len(re.findall(r"`[^`]+`", names)) == int(count) for _, names, count in rows)
    return {family: said for said, names, _ in rows for family in re.findall(r"`([^`]+)`", names)}


def test_the_table_has_every_family() -> None:
    assert sorted(table()) == [*families.FAMILIES]


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_the_table_says(family: str) -> None:
    """Greedy text through the engine equals that of `generate`, or the error at load says why not."""
    assert families.verdict(family) == table()[family]


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("rwkv", "keeps a recurrent state"),
        ("bloom", "interface"),
        ("mistral3", "language model of type 'mistral'"),
    ],
)
def test_what_is_refused_says_why(family: str, said: str, tmp_path: Path) -> None:
    config = VerifyConfig(model=str(save(build(family), tmp_path)), num_kv_tokens=1024)
    with pytest.raises(ModelLoadError) as raised:
        boot.start(config, "verify", VerifyDecider())
    assert str(raised.value).startswith(f"--model {tmp_path}: ")
    assert said in str(raised.value)
    assert not re.search(r"\b[A-Z]\w+Error: ", str(raised.value)), "an error of other code, as it was raised"


def test_the_language_model_of_a_model_with_images(tmp_path: Path) -> None:
    """The lines of the document make what the engine serves."""
    whole, ids = build("mistral3"), torch.arange(10, 30)[None]
    save(whole, tmp_path / "whole")
    code = DOCUMENT.partition("```python\n")[2].partition("```")[0]
    without_tokenizer = "\n".join(line for line in code.splitlines() if "AutoTokenizer" not in line)
    exec(without_tokenizer, {"source": tmp_path / "whole", "directory": tmp_path / "text"})
    text = load_model(tmp_path / "text")
    assert text.config.model_type == "mistral"
    text.set_attn_implementation("sdpa")
    with torch.inference_mode():
        torch.testing.assert_close(text(input_ids=ids).logits, whole(input_ids=ids).logits)


def test_text_of_a_checkpoint_with_images(tmp_path: Path) -> None:
    """transformers loads it as a causal language model."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=build("gemma3").config.to_dict(),
        vision_config=vision | {"image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert load_model(tmp_path).config.model_type == "gemma3"
