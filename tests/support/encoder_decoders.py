"""Tiny random encoder-decoders, and pairs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.support.tiny_models import VOCAB_SIZE, _spread, add_noise

START, EOS = 0, 2
LENGTH = 96
"""Positions of encoders and decoders that have learnt ones."""
MAX_DISTANCE = 12
"""From here on T5's bias is the same: shorter than the tests' texts."""

_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": MAX_DISTANCE}
_GATED = {"feed_forward_proj": "gated-gelu"}
_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "max_position_embeddings": LENGTH,
}
_BART |= {f"{half}_attention_heads": 4 for half in ("encoder", "decoder")}
_BART |= {f"{half}_ffn_dim": 48 for half in ("encoder", "decoder")}
_BART |= {"forced_eos_token_id": None}

#: Family name → (class prefix in transformers, config fields).
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", _T5),  # relu, one bias for all layers, tied and scaled output layer
    "t5_gated": ("T5", _T5 | _GATED | {"tie_word_embeddings": False}),
    "umt5": ("UMT5", _T5 | _GATED),  # a bias for each layer
    "longt5": ("LongT5", _T5 | {"local_radius": 3}),  # an encoder that sees neighbours alone
    "bart": ("Bart", _BART),  # learnt positions
    "marian": ("Marian", _BART),  # fixed ones
}
FAMILIES = tuple(_FAMILIES)


def build(family: str, seed: int = 0, *, vocab_size: int = VOCAB_SIZE, **overrides: Any) -> PreTrainedModel:
    """A float32 model on the CPU in eval mode, the same for the same arguments."""
    prefix, fields = _FAMILIES[family]
    special = {"decoder_start_token_id": START, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
    names = special | fields | {"vocab_size": vocab_size} | overrides
    config = getattr(transformers, f"{prefix}Config")(**names)
    head = "MTModel" if prefix == "Marian" else "ForConditionalGeneration"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = getattr(transformers, prefix + head)(config)
        _spread(model)
    return model.float().eval()


def save(directory: Path, family: str, seed: int = 0, *, noise: float = 0.0, **overrides: Any) -> Path:
    """A saved model; with noise on its weights it is a draft that is mostly right."""
    model = build(family, seed, **overrides)
    add_noise(model, noise, seed + 1)
    model.save_pretrained(directory)
    return directory


@torch.inference_mode()
def own_logits(model: Any, encoder_input: list[int], tokens: list[int]) -> torch.Tensor:
    """transformers' own, [num_tokens, vocab_size], of decoder tokens after an input."""
    ids, decoded = torch.tensor([encoder_input]), torch.tensor([tokens])
    return model(input_ids=ids, decoder_input_ids=decoded, use_cache=False).logits[0]
