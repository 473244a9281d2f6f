"""Loading refuses what the engine cannot compute exactly, and says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaAttention

from specwire.config import cpu
from specwire.engine import boot
from specwire.engine.attention import paged as attention
from specwire.engine.attention import views
from specwire.engine.cache.layer_cache import Scoring
from specwire.engine.model.loading import describe, load_model, self_check
from specwire.errors import ModelLoadError
from specwire.telemetry.logs import NOTICE
from tests.support import encoder_decoders
from tests.support.tiny_models import EXTRA_FAMILIES, FAMILIES, build, save


@pytest.fixture
def llama_dir(tmp_path: Path) -> Path:
    return save(build("llama"), tmp_path / "llama")


@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA_FAMILIES])
def test_supported_families_load(family: str, tmp_path: Path) -> None:
    directory = save(build(family), tmp_path)
    model = load_model(directory)
    assert not model.training
    assert model.config._attn_implementation == attention.ATTENTION_NAME
    description = describe(model, directory)
    assert description["context_len"] == 512
    assert description["vocab_size"] == 97
    assert description["dtype"] == "float32"
    assert description["num_parameters"] == sum(p.numel() for p in model.parameters())
    assert description["eos_token_ids"] == (2,)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_is_as_asked(dtype: str, llama_dir: Path) -> None:
    assert describe(load_model(str(llama_dir), dtype=dtype), llama_dir)["dtype"] == dtype


@pytest.mark.parametrize(("is_native", "wanted"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_is_that_of_the_checkpoint_where_the_processor_has_it(
    is_native: bool, wanted: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "is_native", lambda dtype: is_native)
    save(build("qwen3").to(torch.bfloat16), tmp_path)
    assert load_model(tmp_path).dtype == wanted


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    model = load_model(save(build("llama", tie_word_embeddings=True), tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_eos_of_the_generation_config_goes_first(llama_dir: Path) -> None:
    (llama_dir / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert describe(load_model(llama_dir))["eos_token_ids"] == (2, 7)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"eos_token_id": "2"}', "eos_token_id '2' is neither a token id nor a list of them"),
        ('{"eos_token_id": [true]}', r"eos_token_id \[True\] is neither"),
        ("{nope", "generation_config.json: Expecting property name"),
        ("[]1", "generation_config.json: Extra data"),
    ],
)
def test_a_generation_config_that_cannot_be(text: str, problem: str, llama_dir: Path) -> None:
    (llama_dir / "generation_config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=problem):
        describe(load_model(llama_dir), llama_dir)


def test_minus_one_stands_for_no_end_token(llama_dir: Path) -> None:
    (llama_dir / "generation_config.json").write_text('{"eos_token_id": -1}')
    assert describe(load_model(llama_dir))["eos_token_ids"] == ()


def test_tensors_that_the_config_does_not_tell_of(llama_dir: Path) -> None:
    """The self-check has the same wrong model to compare with."""
    path = llama_dir / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.0.self_attn.q_proj"
    scale = {f"{name}.weight": weights[f"{name}.weight"].to(torch.float8_e4m3fn)}
    for more in (scale | {f"{name}.weight_scale": torch.ones(())}, {f"{name}.bias": torch.ones(64)}):
        save_file(weights | more, path, metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=rf"has 1 tensors .*: {name}\.(weight_scale|bias)"):
            load_model(llama_dir)


def _refused(source: Path | str, match: str, **keywords: Any) -> None:
    with pytest.raises(ModelLoadError, match=match) as caught:
        load_model(source, **keywords)
    assert str(source) in str(caught.value)


def test_missing_directory(tmp_path: Path) -> None:
    _refused(tmp_path / "nowhere", "no such model directory")
    _refused(tmp_path, r"no config\.json")


def test_unknown_dtype(llama_dir: Path) -> None:
    _refused(llama_dir, "dtype 'float12'", dtype="float12")


def test_files_that_are_missing_or_corrupt(llama_dir: Path) -> None:
    config_file, weights_file = llama_dir / "config.json", llama_dir / "model.safetensors"
    config, weights = config_file.read_text(), load_file(weights_file)
    config_file.write_text(json.dumps(json.loads(config) | {"intermediate_size": 40}))
    _refused(llama_dir, r"mismatched_keys: .*mlp")
    config_file.write_text(config)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, weights_file, metadata={"format": "pt"})
    _refused(llama_dir, r"missing_keys: model\.layers\.1\.mlp\.up_proj\.weight")
    weights_file.write_bytes(weights_file.read_bytes()[:-1000])
    _refused(llama_dir, "Safetensor")
    weights_file.unlink()
    _refused(llama_dir, "safetensors")
    for text in ("{", "[]", '{"model_type": "no-such-model"}', "{}"):
        config_file.write_text(text)
        _refused(llama_dir, "Error")


def test_encoder_decoder(tmp_path: Path) -> None:
    _refused(encoder_decoders.save(tmp_path, "t5"), "encoder-decoder")


def test_self_check_notices_wrong_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: attention that ignores the scale is caught."""
    model = build("llama")
    self_check(model)
    original = views.view_attention

    def wrong(plan: Any, layer: Any, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        return original(plan, layer, query, scoring._replace(scale=1.0))

    monkeypatch.setattr(views, "view_attention", wrong)
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(model)


def test_self_check_notices_state_that_crosses_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: a layer that mixes neighbours in the row is caught."""
    original = LlamaAttention.forward

    def mixing(self: Any, hidden_states: torch.Tensor, **keywords: Any) -> Any:
        shifted = torch.roll(hidden_states, 1, dims=1)
        shifted[:, :1] = 0
        return original(self, hidden_states=hidden_states + 0.5 * shifted, **keywords)

    monkeypatch.setattr(LlamaAttention, "forward", mixing)
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(build("llama"))


def test_self_check_notices_a_lost_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: forgetting the sliding window is caught, since the check exceeds it."""
    original = views.plan_reads
    monkeypatch.setattr(
        views, "plan_reads", lambda segments, _window, *others: original(segments, None, *others)
    )
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(build("mistral"))


def test_a_window_that_does_not_reach_the_layers_is_refused() -> None:
    model = build("llama")
    model.config.sliding_window = 4
    with pytest.raises(ModelLoadError, match="sliding window of 4"):
        self_check(model)


def test_not_a_number_fails_the_self_check() -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ModelLoadError, match="self-check failed"):
        self_check(model)


def test_what_a_generation_config_asks_for(llama_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = '{"eos_token_id": 2, "repetition_penalty": 1.1, "top_k": 20, "temperature": 1.0, "min_length": 3}'
    (llama_dir / "generation_config.json").write_text(given)
    with caplog.at_level(NOTICE):
        assert boot._sampling_of(str(llama_dir)) == {"top_k": 20, "repetition_penalty": 1.1}
    assert caplog.messages[0].endswith("default over HTTP: top_k=20, repetition_penalty=1.1")
    assert caplog.messages[1].endswith("not applied: min_length=3")
    (llama_dir / "generation_config.json").write_text('{"top_p": 1.5}')
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: top_p=1\.5"):
        boot._sampling_of(str(llama_dir))
