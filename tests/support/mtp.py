"""Tiny targets with layers for multi-token prediction, which guess well, or as badly as they can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from tests.support import tiny_models
from tests.support.pairs import MARKOV_VOCAB_SIZE

_WEIGHTS = "model.safetensors"
_MELLUM = {
    "layers.0.eh_proj.": "mtp.fc.",
    "layers.0.enorm.": "mtp.pre_fc_norm_embedding.",
    "layers.0.hnorm.": "mtp.pre_fc_norm_hidden.",
    "layers.0.post_norm.": "mtp.norm.",
    "layers.0.mtp_block.": "mtp.layers.0.",
}


def save_mtp_target(
    directory: Path,
    family: str = "mellum",
    *,
    spread: float = 0.1,
    is_hostile: bool = False,
    **overrides: Any,
) -> Path:
    """A target whose next token depends on the last one, and a little on those before.

    Args:
        family: one of `MTP_FAMILIES`.
        spread: how much attention and MLPs write, and layers read states; with 0 the last token decides, and
            layers that are not hostile have the target's distribution.
        is_hostile: whether the layers like best what the target likes least.
        overrides: as of `tiny_models.build`.
    """
    model = tiny_models.build(family, **overrides)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        mtp = MtpModel(model, model.config.num_mtp_layers)
        for weight in mtp.layers.parameters():
            weight.normal_(1 if weight.ndim == 1 else 0, 1 / max(weight.shape) ** 0.5)
        for name, weight in [*model.model.layers.named_parameters(), *mtp.layers.named_parameters()]:
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(spread)
        for layer in mtp.layers:
            read = layer.eh_proj.weight
            read.mul_(spread)[:, : len(read)] = torch.eye(len(read))  # [embedding; state]
            layer.enorm.weight.fill_(1)
            layer.post_norm.weight.copy_(-model.model.norm.weight if is_hostile else model.model.norm.weight)
    tiny_models.save(model, directory)
    weights = load_file(directory / _WEIGHTS) | _stored(mtp, family, model.config.num_hidden_layers)
    save_file(weights, directory / _WEIGHTS, {"format": "pt"})
    return directory


def save_markov_target(directory: Path, *, is_hostile: bool = False) -> Path:
    """A target whose distribution depends on the last token alone, as `pairs.markov_model`."""
    sizes: dict[str, Any] = {
        "vocab_size": MARKOV_VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "eos_token_id": None,
    }
    return save_mtp_target(directory, spread=0.0, is_hostile=is_hostile, **sizes)


def _stored(mtp: MtpModel, family: str, num_before: int) -> dict[str, Tensor]:
    """The layers' weights under the names of released checkpoints."""
    if family != "mellum":
        return _of_glm(mtp, num_before)
    found: dict[str, Tensor] = {}
    for name, weight in mtp.layers.state_dict(prefix="layers.").items():
        start = next(start for start in _MELLUM if name.startswith(start))
        found[_MELLUM[start] + name.removeprefix(start)] = weight.clone()
    return found


def _of_glm(mtp: MtpModel, num_before: int) -> dict[str, Tensor]:
    """The layers' weights under the names of released checkpoints, which count layers on.

    Args:
        num_before: layers of the model.
    """
    found: dict[str, Tensor] = {}
    for name, weight in mtp.layers.state_dict().items():
        number, rest = name.split(".", 1)
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        named = f"model.layers.{num_before + int(number)}.{rest}"
        found |= _of_experts(named, weight) if ".experts." in named else {named: weight.clone()}
    return found


def _of_experts(name: str, weight: Tensor) -> dict[str, Tensor]:
    """One weight for each expert, where the module has one for all, [num_experts, ...]."""
    start, kind = name.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return {
        f"{start}.{number}.{part}.weight": chunk.clone()
        for number, one in enumerate(weight)
        for part, chunk in zip(parts, one.chunk(len(parts)), strict=True)
    }
