"""Which causal families of the installed transformers the engine serves: the table of docs/models.md.

    python -m benchmarks.families [MODEL_TYPE ...]

Of each family a tiny model with random weights is made from its config, saved, and loaded as any target is.
Its greedy text through the engine is compared with that of transformers' `generate`.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specwire.engine.batch import Feed
from specwire.engine.model.loading import check_config, load_model
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ModelLoadError

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
WINDOW = 12
VOCAB_SIZE = 97
CONTEXT_LEN = 512
NUM_NEW = 2 * WINDOW + 4

_WIDTH, _HEADS, _LAYERS = 32, 4, 4
_SIZES: tuple[tuple[int, str], ...] = (
    (VOCAB_SIZE, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (CONTEXT_LEN, "max_position_embeddings n_positions max_seq_len n_ctx"),
    (_WIDTH, "hidden_size d_model n_embd emb_dim word_embed_proj_dim embedding_size attention_hidden_size"),
    (_WIDTH, "input_embedding_size output_embedding_size embedding_dim lru_width dim_model_base"),
    (_WIDTH, "hidden_size_global"),
    (48, "intermediate_size intermediate_size_mlp dense_intermediate_size ffn_dim n_inner encoder_ffn_dim"),
    (48, "decoder_ffn_dim dim_ff dff ffn_hidden_size d_inner feed_forward_size"),
    (_HEADS, "num_attention_heads num_heads n_head n_heads encoder_attention_heads"),
    (_HEADS, "decoder_attention_heads swa_num_attention_heads num_encoder_attention_heads index_n_heads"),
    (_HEADS, "num_decoder_attention_heads"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups linear_num_key_heads"),
    (2, "linear_num_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"),
    (2, "sliding_window_pattern _sliding_window_pattern max_window_layers num_kv_shared_layers"),
    (2, "first_k_dense_replace"),
    (_LAYERS, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers"),
    (_LAYERS, "num_encoder_layers num_decoder_layers"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts rotary_dim state_size"),
    (4, "mamba_d_state"),
    (8, "head_dim kv_channels dim_head swa_head_dim d_head d_kv index_head_dim attention_head_size"),
    (8, "qk_rope_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim"),
    (8, "attention_head_dim query_pre_attn_scalar hidden_size_per_layer_input"),
    (12, "v_head_dim"),
    (WINDOW, "sliding_window window_size local_attention attention_window_size sliding_window_size"),
    (16, "moe_intermediate_size q_lora_rank kv_lora_rank o_lora_rank expert_ffn_hidden_size"),
    (16, "shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size"),
    (16, "moe_shared_expert_intermediate_size"),
    (1, "n_group topk_group num_expert_group bos_token_id"),
    (0, "dropout hidden_dropout_prob attention_probs_dropout_prob attention_dropout resid_pdrop"),
    (0, "embd_pdrop attn_pdrop pad_token_id"),
    (3, "eos_token_id"),
)
"""What config fields of these names are, in all families that have them."""
_SMALL = {name: value for value, names in _SIZES for name in names.split()}
_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8}
_MOE = {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
_DBRX_EXPERTS = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}
_ROPE = {
    kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_ZAMBA = {"attention_hidden_size": 64, "attention_head_dim": 16}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_KIMI = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 8}
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR,
    "bamba": _MAMBA_HEADS | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": _MAMBA_HEADS | {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LINEAR | {"linear_attn_config": {"short_conv_kernel_size": 4} | _KIMI},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": _ROPE,
    },
    "dots1": _MOE,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": _DBRX_EXPERTS,
    },
    "deepseek_v2": _MOE,
    **dict.fromkeys(("gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "laguna"), _BOTH),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "mellum": _BOTH,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 32]},
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA | {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields that are more than smaller, by model type."""


SERVED = "served: greedy text is that of `generate`"


def verdict(family: str) -> str:
    """`SERVED`, or why it is not: what the error at load says, without the model's name and numbers."""
    try:
        model = _build(family)
    except ModelLoadError as error:
        return _shortened(str(error))
    except Exception as error:  # whatever the family's code raises
        return f"transformers makes no model from its own config: {type(error).__name__}"
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        try:
            ours = load_model(directory)
        except ModelLoadError as error:
            return _shortened(str(error).removeprefix(f"{directory}: "))
    prompt = np.random.default_rng(0).integers(4, VOCAB_SIZE, size=WINDOW - 2).tolist()
    return SERVED if _written(ours, prompt) == _generated(model, prompt) else "another text than `generate`'s"


def _shortened(error: str) -> str:
    if re.match(r"\w+Error: ", error):
        return f"its code raises {error}"
    if error.startswith("self-check failed"):
        return "self-check failed; " + error.rpartition("; ")[2]
    return re.sub(r"^(the model cannot be served: |'[\w-]+' )", "", error)


def _build(family: str) -> Any:
    """A random model; the same one in every process.

    Raises:
        ModelLoadError: its config says that it cannot be served.
    """
    config = _shrunken(CONFIG_MAPPING[family])
    check_config(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                weight.add_(torch.randn_like(weight) * 0.1)
            else:  # spread so that texts wander
                is_table = any(part in name for part in ("emb", "wte", "wpe"))
                weight.normal_(0, 0.5 if is_table else 1.5 / max(weight.shape[-2:]) ** 0.5)
    return model


def _shrunken(kind: Any) -> Any:
    """A config of this class with small numbers, and likewise those within it."""
    usual = kind()
    fields: dict[str, Any] = {"tie_word_embeddings": False}
    for name, value in usual.to_dict().items():
        if isinstance(value, dict) and "model_type" in value:
            fields[name] = _shrunken(type(getattr(usual, name)))
        elif name in ("head_dim", "num_key_value_heads"):  # None stands for what others say
            fields[name] = _SMALL[name]
        elif name in _SMALL and isinstance(value, int | float) and not isinstance(value, bool):
            fields[name] = type(value)(_SMALL[name])
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = _HEADS
        fields.pop("head_dim", None)
    for name, wanted in (("is_decoder", True), ("is_encoder_decoder", False)):
        if hasattr(usual, name):
            fields[name] = wanted
    return kind(**(fields | _OWN.get(kind.model_type, {})))


def _generated(model: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            eos_token_id=None,
            pad_token_id=0,
        )
    found: list[int] = output[0].tolist()
    return found


def _written(model: Any, prompt: list[int]) -> list[int]:
    """The prompt and its greedy continuation through the engine."""
    runner, text = ModelRunner(model, num_pages=32, page_size=4), list(prompt)
    with runner.new_sequence() as cache:
        while len(text) < len(prompt) + NUM_NEW:
            logits = runner.forward([Feed(cache, text[cache.length :])])
            text.append(int(logits[0].argmax()))
    return text


def main(families: Sequence[str]) -> None:
    """Print the table, of these families or of all."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    by_verdict: dict[str, list[str]] = {SERVED: []}
    for family in families or FAMILIES:
        by_verdict.setdefault(verdict(family), []).append(f"`{family}`")
    print(f"transformers {transformers.__version__}\n\n| | `model_type` | |\n|---|---|---|")
    print("\n".join(f"| {said} | {', '.join(names)} | {len(names)} |" for said, names in by_verdict.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
