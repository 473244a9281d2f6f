"""docs/models.md says which families are served, and what the errors of the others say."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from specwire.config.services import VerifyConfig
from specwire.engine import boot
from specwire.engine.batch import Feed
from specwire.engine.model.loading import load_model
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ModelLoadError
from tests.support.imports import ROOT
from tests.support.tiny_models import (
    NAMES,
    VOCAB_SIZE,
    WINDOW,
    build,
    reference_model,
    save,
    written_by_transformers,
)
from verify_service.verifier import VerifyDecider

DOCUMENT = (ROOT / "docs/models.md").read_text()
NUM_NEW = 3 * WINDOW + 6

pytestmark = pytest.mark.usefixtures("one_thread")


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without the family's name."""
    section = DOCUMENT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| .* \|$", section, re.MULTILINE)[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]


SERVED = [family.strip("`") for family, _ in rows("Served")]
REFUSED = [(family.strip("`"), said.strip("`")) for family, said, _ in rows("Refused")]


def test_the_tables_have_every_family() -> None:
    assert {*SERVED, *(family for family, _ in REFUSED)} == NAMES


@pytest.mark.parametrize("family", SERVED)
def test_greedy_text_equals_generate(family: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(WINDOW - 2)]
    reference = reference_model(family)
    assert reference.config.model_type.removesuffix("_text") == family
    expected = written_by_transformers(reference, prompt, NUM_NEW, min_new_tokens=NUM_NEW, pad_token_id=0)
    model = load_model(save(build(family), tmp_path))
    runner, text = ModelRunner(model, num_pages=32, page_size=4), list(prompt)
    with runner.new_sequence() as cache:
        while len(text) < len(prompt) + NUM_NEW:
            logits = runner.forward([Feed(cache, text[cache.length :])])
            text.append(int(logits[0].argmax()))
    assert text[len(prompt) :] == expected
    assert len(set(expected)) > 3, "a degenerate text proves little"


@pytest.mark.parametrize(("family", "said"), REFUSED)
def test_what_is_refused_says_why(family: str, said: str, tmp_path: Path) -> None:
    model = build(family)
    assert model.config.model_type.removesuffix("_text") == family
    config = VerifyConfig(model=str(save(model, tmp_path)), num_kv_tokens=1024)
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
