"""Adapters in a packed pass: what each token gets is what peft computes for it, whatever is beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specwire.engine.attention.paged import PackedBatch, register
from specwire.engine.batch import Feed
from specwire.engine.model import loading, lora
from specwire.engine.model.fingerprint import adapter_fingerprint
from specwire.engine.model.lora import Factors
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ModelLoadError, UnsupportedError
from specwire.proposals.tree import TokenTree
from specwire.rule.captured import EagerReplay
from tests.support import adapters, tiny_models

register()  # as `load_model` does

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12, 3, 4, 5]
FAMILIES = ("llama", "gpt2", "qwen3_5", "gpt_oss")
"""Plain linear layers, transposed ones, recurrent layers, and experts that take no adapter."""


def served(directory: Path, family: str, **options: Any) -> tuple[ModelRunner, list[Path | None]]:
    """A runner with four adapters, and where they are by their numbers; number 0 is none."""
    found = adapters.save_several(directory, family)
    model = tiny_models.build(family)
    loading.load_adapters(model, found)
    return ModelRunner(model, **{"num_pages": 128, "page_size": 4} | options), [None, *found.values()]


def sequences(runner: ModelRunner, num: int) -> list[Any]:
    caches = [runner.new_sequence() for _ in range(num)]
    for number, cache in enumerate(caches):
        cache.adapter = number
    return caches


def together(runner: ModelRunner, num: int, splits: tuple[int, ...] = (len(TOKENS),)) -> list[Tensor]:
    """Logits of the tokens with each adapter, in one pass, or in several."""
    caches, parts, start = sequences(runner, num), [], 0
    for end in splits:
        some = TOKENS[start:end]
        parts.append(runner.forward([Feed(cache, some, len(some)) for cache in caches]).chunk(num))
        start = end
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def assert_as_peft(
    logits: Tensor, directory: Path | None, tokens: list[int], family: str = "llama", start: int = 0
) -> None:
    """Logits of the tokens from `start` on."""
    expected = adapters.logits_of_peft(family, directory, tokens)[start:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_four_adapters_and_none_in_one_pass(tmp_path: Path, family: str) -> None:
    runner, directories = served(tmp_path, family)
    found = together(runner, len(directories), splits=(6, 7, 11))
    for directory, logits in zip(directories, found, strict=True):
        assert_as_peft(logits, directory, TOKENS, family)
    texts = {tuple(logits.argmax(-1).tolist()) for logits in found}
    assert len(texts) == len(directories), "they were meant to differ"


def test_a_padded_pass_is_one_that_is_not(tmp_path: Path) -> None:
    runner, directories = served(tmp_path, "llama", replay=EagerReplay())
    for _ in range(3):  # the second one is captured
        for directory, logits in zip(directories, together(runner, len(directories)), strict=True):
            assert_as_peft(logits, directory, TOKENS)


def test_batch_invariant(tmp_path: Path) -> None:
    """Bitwise the same alone, in pieces, and beside other adapters."""
    runner, directories = served(tmp_path, "llama", batch_invariant=True)
    runner.warm()
    all_of_them = together(runner, len(directories))
    in_pieces = together(runner, len(directories), splits=(3, 4, 11))
    for number, (logits, pieces) in enumerate(zip(all_of_them, in_pieces, strict=True)):
        with runner.new_sequence() as alone:
            alone.adapter = number
            expected = runner.forward([Feed(alone, TOKENS, len(TOKENS))])
        assert torch.equal(logits, expected)
        assert torch.equal(pieces, expected)


def test_nodes_of_a_tree(tmp_path: Path) -> None:
    runner, directories = served(tmp_path, "llama")
    tree = TokenTree(start=4, parents=(-1, -1, 0))
    caches = sequences(runner, len(directories))
    feeds = [Feed(cache, [*TOKENS[:4], 20, 30, 40], 3, tree) for cache in caches]
    for directory, logits in zip(directories, runner.forward(feeds).split(3), strict=True):
        for row, path in zip(logits.split(1), ([20], [30], [20, 40]), strict=True):
            assert_as_peft(row, directory, TOKENS[:4] + path, start=-1)


def test_a_fork_has_the_adapter_of_its_parent(tmp_path: Path) -> None:
    runner, directories = served(tmp_path, "llama")
    with runner.new_sequence() as parent:
        parent.adapter = 2
        runner.forward([Feed(parent, TOKENS[:6])])
        with parent.fork() as fork:
            assert_as_peft(runner.forward([Feed(fork, TOKENS[6:], 5)]), directories[2], TOKENS, start=6)


def test_a_pass_without_adapters_runs_the_layers_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = served(tmp_path, "llama")
    seen = []
    attend = PackedBatch.attend

    def noted(self: PackedBatch, *args: Any) -> Tensor:
        seen.append(self.adapters)
        return attend(self, *args)

    monkeypatch.setattr(PackedBatch, "attend", noted)
    plain = ModelRunner(tiny_models.build("llama"), num_pages=8, page_size=4)
    with runner.new_sequence() as one, plain.new_sequence() as other:
        ours, theirs = (
            each.forward([Feed(cache, TOKENS, len(TOKENS))])
            for each, cache in ((runner, one), (plain, other))
        )
    assert torch.equal(ours, theirs)
    assert set(seen) == {None}


def test_a_layer_that_runs_other_rows_than_the_tokens_is_refused(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    lora.attach(model, [lora.read("a", adapters.save_adapter(tmp_path))])
    layer = model.model.layers[0].mlp.up_proj
    with (
        lora.running(torch.ones(3, dtype=torch.int64)),
        pytest.raises(UnsupportedError, match=r"model\.layers\.0\.mlp\.up_proj.*runs 2 rows in a pass of 3"),
    ):
        layer(torch.zeros(1, 2, 32))


def test_the_self_check_finds_tokens_that_are_given_to_another_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a family would whose code reorders tokens."""
    own = lora._Adapted.__call__

    def reordered(self: Any, inputs: Tensor) -> Tensor:
        return own(self, inputs.flip(-2)).flip(-2)

    monkeypatch.setattr(lora._Adapted, "__call__", reordered)
    with pytest.raises(ModelLoadError, match=r"--lora-modules all=.*self-check failed"):
        served(tmp_path, "llama")


class TestRefusals:
    """What peft's files may say and is not served: named, with its value."""

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"use_dora": True}, "use_dora=True"),
            ({"bias": "all"}, "bias='all'"),
            ({"peft_type": "IA3"}, "peft_type='IA3'"),
            ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
            ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
            ({"target_parameters": ["experts.up"]}, "target_parameters="),
            ({"layer_replication": [[0, 2]]}, "layer_replication="),
            ({"lora_bias": True}, "lora_bias=True"),
            ({"trainable_token_indices": [1]}, "trainable_token_indices="),
            ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens="),
            ({"use_of_the_future": 1}, "use_of_the_future=1"),
            ({"target_modules": None}, "target_modules=None"),
            ({"target_modules": ["q_proj"]}, "is not among target_modules"),
            ({"r": 5}, r"ranks \(4, 4\) in its tensors, and 5"),
        ],
    )
    def test_of_the_config(self, tmp_path: Path, fields: dict[str, Any], named: str) -> None:
        directory = adapters.rewrite(adapters.save_adapter(tmp_path / "a"), **fields)
        with pytest.raises(ModelLoadError, match=f"--lora-modules mine={directory}: .*({named})"):
            loading.load_adapters(tiny_models.build("llama"), {"mine": directory})

    @pytest.mark.parametrize(
        ("old", "new", "named"),
        [
            ("lora_A.weight", "lora_magnitude_vector", "is no lora_A or lora_B of a linear layer"),
            ("layers.1.", "layers.7.", r"model\.layers\.7\..*is not in this model"),
            (".0.mlp.up_proj.lora_A", ".0.mlp.down_proj.lora_C", "is no lora_A or lora_B"),
        ],
    )
    def test_of_the_tensors(self, tmp_path: Path, old: str, new: str, named: str) -> None:
        directory = adapters.rewrite(adapters.save_adapter(tmp_path / "a"), target_modules=".*_proj")
        adapters.rename_tensors(directory, old, new)
        with pytest.raises(ModelLoadError, match=f"--lora-modules.*{named}"):
            loading.load_adapters(tiny_models.build("llama"), {"mine": directory})

    @pytest.mark.parametrize(
        ("path", "named"),
        [
            ("lm_head", "is the output embedding"),
            ("model.embed_tokens", "is of type Embedding, and no linear layer"),
            ("model.layers.0.mlp.up_proj", r"is of size \(48, 32\), and what the adapter adds of \(48, 31\)"),
        ],
    )
    def test_of_layers(self, path: str, named: str) -> None:
        adapter = lora.Adapter("mine", {path: Factors(torch.zeros(1, 31), torch.zeros(48, 1), 1.0)})
        with pytest.raises(ModelLoadError, match=f"adapter mine: {path}: {named}"):
            lora.attach(tiny_models.build("llama"), [adapter])

    def test_weights_that_are_not_finite(self, tmp_path: Path) -> None:
        directory = adapters.save_adapter(tmp_path / "a", lora_alpha=float("inf"))
        with pytest.raises(ModelLoadError, match="self-check failed"):
            loading.load_adapters(tiny_models.build("llama"), {"mine": directory})


def test_a_fingerprint_is_of_what_is_computed(tmp_path: Path) -> None:
    one, same, scaled, other = (tmp_path / name for name in ("one", "same", "scaled", "other"))
    adapters.save_adapter(one)
    adapters.rewrite(adapters.save_adapter(same), base_model_name_or_path="elsewhere")
    adapters.rewrite(adapters.save_adapter(scaled), lora_alpha=9)
    adapters.save_adapter(other, seed=1)
    found = [adapter_fingerprint(each) for each in (one, same, scaled, other)]
    assert found[0] == found[1]
    assert len({*found}) == 3
