"""The embedded target with a layer for multi-token prediction, trained here: a GLM-4 checkpoint.

A Llama is a GLM-4 whose layers all have one MLP and rotate whole heads, so the target's weights are taken
over as they are. The layer has a mixture of experts, as all such layers of GLM-4. It learns the target's
distributions, on the text that the target was trained on, used up to `DEPTHS` times in a row.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaForCausalLM
from transformers.modeling_layers import MtpModel

from benchmarks.embedded import train as training
from specwire import embedded

DEPTHS = 3
_WINDOW = 256
_LEARNING_RATE = 2e-3
_WEIGHTS = "model.safetensors"
_TAKEN_OVER: tuple[str, ...] = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_TAKEN_OVER += ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act")
_TAKEN_OVER += ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def make(directory: Path, seconds: float) -> None:
    """Write the target with its layer.

    Args:
        seconds: of training.
    """
    model = as_glm(LlamaForCausalLM.from_pretrained(embedded.TARGET_DIR, dtype=torch.float32))
    mtp = train(model.requires_grad_(False), seconds)
    model.save_pretrained(directory)
    weights = load_file(directory / _WEIGHTS) | stored(mtp, model.config.num_hidden_layers)
    save_file(weights, directory / _WEIGHTS, {"format": "pt"})
    for path in Path(embedded.TARGET_DIR).glob("tokenizer*"):
        shutil.copy(path, directory)


def as_glm(llama: Any) -> Any:
    """The same function as a model that may have layers for multi-token prediction."""
    of = llama.config
    config = Glm4MoeConfig(
        **{name: getattr(of, name) for name in _TAKEN_OVER},
        rope_parameters={**of.rope_parameters, "partial_rotary_factor": 1.0},
        first_k_dense_replace=of.num_hidden_layers,
        n_routed_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=of.intermediate_size // 2,
        num_mtp_layers=1,
    )
    model = Glm4MoeForCausalLM(config)
    model.load_state_dict(llama.state_dict())
    return model.eval()


def train(model: Any, seconds: float) -> MtpModel:
    """A layer that predicts what the model will say."""
    torch.manual_seed(0)
    mtp = MtpModel(model, 1)
    with torch.no_grad():
        for name, weight in mtp.layers.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.02)
            else:
                weight.fill_(0 if "bias" in name else 1)
    rng = random.Random(0)
    rows = training.library_rows(rng)
    optimizer = training.Optimizer(mtp.layers, _LEARNING_RATE, inner="")

    def next_loss(progress: float) -> Tensor:
        return _loss(
            model, mtp, training.random_windows(rows, _WINDOW, rng), training.distillation_share(progress)
        )

    training.fit("mtp", optimizer, training.Budget(seconds), next_loss)
    return mtp.eval()


def _loss(model: Any, mtp: MtpModel, tokens: Tensor, share: Tensor) -> Tensor:
    """Mean of `distillation_loss` over the depths."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            states = model.model(input_ids=tokens, use_cache=False).last_hidden_state
            wanted = model.lm_head(states)
        positions = torch.arange(tokens.shape[1])[None]
        losses = []
        for depth in range(1, DEPTHS + 1):
            inputs = tokens[:, depth:]
            states = mtp.forward_layer(0, states[:, :-1], positions[:, depth:], None, input_ids=inputs)
            losses.append(training.distillation_loss(wanted[:, depth:], model.lm_head(states), share))
    return torch.stack(losses).mean()


def stored(mtp: MtpModel, num_before: int) -> dict[str, Tensor]:
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
