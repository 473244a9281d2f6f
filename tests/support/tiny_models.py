"""Tiny random models of every supported family, and some that must be refused.

The weights are spread widely, so that greedy text wanders instead of repeating one token.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

CONTEXT_LEN = 512
WINDOW, CHUNK = 12, 16
"""Tokens that a sliding window shows, and that Mamba 2 computes together: fewer are padded to as many."""
VOCAB_SIZE = 97

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT_LEN,
    "tie_word_embeddings": False,
}
_WITHOUT_GROUPS = {
    name: size for name, size in _SIZES.items() if name not in ("num_key_value_heads", "head_dim")
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT_LEN, "tie_word_embeddings": False}
_OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_OPT |= {"max_position_embeddings": CONTEXT_LEN, "word_embed_proj_dim": 32, "tie_word_embeddings": False}
_GEMMA3 = {"num_hidden_layers": 3, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}
_GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_GPT_OSS_LAYERS = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MELLUM: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense"] * 2,
}
_MELLUM |= {"sliding_window": WINDOW, "num_mtp_layers": 1, "mtp_mlp_layer_types": ["dense"]}
_MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "tie_word_embeddings": False}
_MAMBA_HEADS = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_chunk_size": CHUNK}
_LINEAR: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
_LINEAR |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
_CONVOLUTIONS: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
_NEMOTRON_H = _SIZES | {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"]}
_NEMOTRON_H |= {"num_hidden_layers": 4, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 16}
_NEMOTRON_H |= {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
_NEMOTRON_H["chunk_size"] = CHUNK
_KIMI: dict[str, Any] = _WITHOUT_GROUPS | {"num_key_value_heads": 4, "num_experts": 4, "v_head_dim": 8}
_KIMI |= {"layer_types": ["linear_attention", "full_attention"], "kv_lora_rank": 16}
_KIMI |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
_KIMI["linear_attn_config"] = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 8}
_KIMI["linear_attn_config"] |= {"short_conv_kernel_size": 4}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_VISION |= {"head_dim": 8, "image_size": 16, "patch_size": 8, "model_type": "pixtral"}
_GLM = {"n_routed_experts": 4, "first_k_dense_replace": 2, "num_mtp_layers": 2}
_DEEPSEEK = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
_DEEPSEEK |= {"qk_nope_head_dim": 8, "v_head_dim": 12, "n_group": 1, "topk_group": 1, "num_mtp_layers": 1}

#: Family name → (class prefix in transformers, config fields).
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "qwen2": ("Qwen2", {k: v for k, v in _SIZES.items() if k != "head_dim"}),
    "qwen3": ("Qwen3", _SIZES),
    "mistral": ("Mistral", _SIZES | {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3", _SIZES | _GEMMA3 | {"layer_types": _GEMMA3_LAYERS}),
    "gpt2": ("GPT2", _GPT2),
    "opt": ("OPT", _OPT),
    "gpt_neox": ("GPTNeoX", _WITHOUT_GROUPS),
    # Beyond the eight: soft-capped scores, and attention sinks with experts.
    "gemma2": ("Gemma2", _SIZES | {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gpt_oss": (
        "GptOss",
        _SIZES
        | {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": _GPT_OSS_LAYERS},
    ),
    # With layers for multi-token prediction, whose weights `tests.support.mtp` adds.
    "mellum": ("Mellum", _SIZES | _EXPERTS | _MELLUM),
    "glm4_moe": ("Glm4Moe", _SIZES | _EXPERTS | _GLM),
    "deepseek_v3": (
        "DeepseekV3",
        _WITHOUT_GROUPS | _EXPERTS | _DEEPSEEK | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    ),
    "phi3": ("Phi3", _SIZES),
    # With recurrent layers.
    "lfm2": ("Lfm2", _SIZES | _CONVOLUTIONS),
    "lfm2_moe": ("Lfm2Moe", _SIZES | _EXPERTS | _CONVOLUTIONS | {"num_dense_layers": 1, "num_experts": 4}),
    "lfm3": ("Lfm3", _SIZES | _CONVOLUTIONS),
    "qwen3_next": (
        "Qwen3Next",
        _SIZES | _EXPERTS | _LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": ("Qwen3_5", _SIZES | _LINEAR),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        _SIZES | _EXPERTS | _LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "mamba2": ("Mamba2", {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": CHUNK}),
    "mamba": ("Mamba", _MAMBA),
    "falcon_mamba": ("FalconMamba", _MAMBA),
    "jamba": ("Jamba", _SIZES | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "bamba": ("Bamba", _SIZES | _MAMBA_HEADS | {"attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", _SIZES | _MAMBA_HEADS | {"mamba_d_ssm": 64, "mamba_n_groups": 1}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        _SIZES | _MAMBA_HEADS | {"layer_types": ["mamba", "attention"], "num_local_experts": 4},
    ),
    "nemotron_h": ("NemotronH", _NEMOTRON_H | _EXPERTS),
    "olmo_hybrid": ("OlmoHybrid", _SIZES | _LINEAR),
    "kimi_linear": ("KimiLinear", _KIMI | _EXPERTS),
    # Refused.
    "rwkv": ("Rwkv", {"hidden_size": 32, "num_hidden_layers": 2}),
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mistral3": (
        "Mistral3",
        {
            "text_config": _SIZES | {"model_type": "mistral", "vocab_size": VOCAB_SIZE},
            "vision_config": _VISION,
        },
    ),
}
_TEXT_CONFIGS = ("gemma3", "qwen3_5", "qwen3_5_moe")
_HEADS = {"gpt2": "LMHeadModel", "mistral3": "ForConditionalGeneration"}

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt2", "opt", "gpt_neox")
EXTRA_FAMILIES = ("gemma2", "gpt_oss")
RECURRENT_FAMILIES = (
    *("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "mamba", "mamba2", "falcon_mamba"),
    *("jamba", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "olmo_hybrid", "kimi_linear"),
    "lfm3",
)
MTP_FAMILIES = ("mellum", "glm4_moe", "deepseek_v3")
REFUSED_FAMILIES = ("rwkv", "bloom")


def build(family: str, seed: int = 0, *, vocab_size: int = VOCAB_SIZE, **overrides: Any) -> PreTrainedModel:
    """A float32 model on the CPU in eval mode, the same for the same arguments.

    Args:
        family: one of `FAMILIES`, `EXTRA_FAMILIES`, `MTP_FAMILIES`, `REFUSED_FAMILIES`, phi3 or mistral3.
        seed: of the weights.
        vocab_size: rows of the embedding.
        overrides: config fields that differ from the tiny defaults.
    """
    prefix, fields = _FAMILIES[family]
    suffix = "TextConfig" if family in _TEXT_CONFIGS else "Config"
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, prefix + suffix)(
        **{**special, **fields, "vocab_size": vocab_size, **overrides}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = _HEADS.get(family, "ForCausalLM")
        model: PreTrainedModel = getattr(transformers, prefix + head)(config)
        _spread(model)
    return model.float().eval()


def _spread(model: PreTrainedModel) -> None:
    """Weights of a size that keeps activations near one, biases and norms a little off their defaults."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                is_table = "emb" in name or "wte" in name or "wpe" in name
                fan_in = max(weight.shape[-2:])
                weight.normal_(0, 0.5 if is_table else 1.5 / fan_in**0.5)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)


def add_noise(model: PreTrainedModel, noise: float, seed: int) -> None:
    """To each weight, as a share of what its tensor's weights spread."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            scale = noise * weight.std() if weight.numel() > 1 else noise
            weight.add_(torch.randn(weight.shape, generator=generator) * scale)


def save(model: PreTrainedModel, directory: Path | str) -> Path:
    """Write the model as `from_pretrained` reads it; returns the directory."""
    model.save_pretrained(directory)
    return Path(directory)


@functools.cache
def model_of(family: str) -> Any:
    """The family's model; a runner gives it an attention of its own."""
    return build(family)


@functools.cache
def reference_model(family: str) -> Any:
    """The same with transformers' own eager attention."""
    model = build(family)
    model.set_attn_implementation("eager")
    return model


def written_by_transformers(model: Any, prompt: list[int], num_tokens: int, **options: Any) -> list[int]:
    """The output of its own `generate`, greedily, past any end."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            **options,
        )
    return output[0, len(prompt) :].tolist()
