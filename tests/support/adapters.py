"""LoRA adapters of tiny models, as peft writes them, and what peft computes with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from specwire.config.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.support import tiny_models
from tests.support.tiny_models import written_by_transformers


def linear_layers(model: Any) -> list[str]:
    """Paths of all that can be adapted."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]


def save_adapter(directory: Path, family: str = "llama", seed: int = 0, **config: Any) -> Path:
    """An adapter that changes the model's text a lot; on all linear layers, unless `config` says else."""
    model = tiny_models.build(family)
    given: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": linear_layers(model)} | config
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **given))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.2, generator=generator)
    adapted.save_pretrained(str(directory))
    return directory


def save_several(directory: Path, family: str = "llama") -> dict[str, Path]:
    """Four by their names, of different ranks, scalings and layers."""
    layers = linear_layers(tiny_models.build(family))
    kinds: dict[str, dict[str, Any]] = {
        "all": {},
        "some": {"r": 2, "lora_alpha": 3, "target_modules": layers[::2]},
        "rooted": {"r": 3, "lora_alpha": 2, "use_rslora": True},
        "uneven": {"rank_pattern": {layers[0]: 6}, "alpha_pattern": {layers[1]: 5, layers[0]: 3}},
    }
    return {
        name: save_adapter(directory / name, family, seed, **config)
        for seed, (name, config) in enumerate(kinds.items())
    }


def as_flag(adapters: dict[str, Path]) -> str:
    """The value of `lora_modules`."""
    return ",".join(f"{name}={directory}" for name, directory in adapters.items())


def adapted_by_peft(family: str, directory: Path | None) -> Any:
    """The model as peft adapts it; as it is without a directory."""
    model = tiny_models.build(family)
    return peft.PeftModel.from_pretrained(model, directory).eval() if directory else model


def logits_of_peft(family: str, directory: Path | None, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [num_tokens, vocab_size]."""
    with torch.inference_mode():
        logits: torch.Tensor = adapted_by_peft(family, directory)(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def written_by_peft(family: str, directory: Path | None, prompt: list[int], num_tokens: int) -> list[int]:
    """The output of peft's own `generate`, greedily, past any end."""
    return written_by_transformers(adapted_by_peft(family, directory), prompt, num_tokens)


def rewrite(directory: Path, **fields: Any) -> Path:
    """Change fields of an adapter's config."""
    path = directory / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return directory


def rename_tensors(directory: Path, old: str, new: str) -> Path:
    """Replace a part of the names of an adapter's tensors."""
    path = directory / ADAPTER_WEIGHTS
    save_file({name.replace(old, new): tensor for name, tensor in load_file(path).items()}, path)
    return directory
