"""Valid and invalid values of each sampling parameter, and what the warps do by classes of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specwire.core import WARPS, Rule, SamplingParams
from specwire.text.grammar import Grammar

if TYPE_CHECKING:
    import torch

VALUES: dict[str, Any] = {
    "max_tokens": 17,
    "temperature": 0.5,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {3: -1.5, 300: 100.0},
    "stop": ("a", "\n\n"),
    "stop_token_ids": (4, 5),
    "ignore_eos": True,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "seed": 0,
    "rule": Rule.GUMBEL,
    "grammar": Grammar(choice=("yes", "no")),
    "num_draft_tokens": 0,
    "max_depth": 3,
    "logprobs": 0,
    "prompt_logprobs": 3,
    "draft": "ngram",
    "num_beams": 4,
    "length_penalty": 0.5,
    "early_stopping": "never",
    "num_return_sequences": 3,
    "cache_salt": "s",
    "adapter": "mine",
}
"""Not the default; together they are valid too."""
BEAM_SEARCH = ("num_beams", "length_penalty", "early_stopping", "num_return_sequences")
"""Those that do not combine with most others in a generation."""

INVALID: dict[str, tuple[Any, ...]] = {
    "max_tokens": (-1, 0, True, 2**31),
    "temperature": (float("inf"), -0.1, float("nan"), "hot"),
    "top_k": (-1, 2.5, 2**31),
    "top_p": (2.0, 0.0, 1.01, float("nan")),
    "min_p": (2.0, -0.1),
    "repetition_penalty": (0.0, 1e-39),
    "presence_penalty": (3.0,),
    "frequency_penalty": (-3.0, float("-inf")),
    "logit_bias": ({-1: 1.0}, {7: 101.0}, {2**31: 1.0}, 5),
    "grammar": ("x",),
    "stop": ([""], ["x" * 1025], ["x"] * 17, None, 5),
    "stop_token_ids": ([-1], [2**31], None),
    "ignore_eos": (3,),
    "min_tokens": (-1, 257),
    "seed": (-1, 2**63),
    "rule": (77, "tree"),
    "num_draft_tokens": (65, -1),
    "max_depth": (65,),
    "draft": ("d" * 257, "", 3),
    "logprobs": (21,),
    "prompt_logprobs": (21, -1),
    "num_beams": (17, 0),
    "length_penalty": (float("nan"), 2.0),
    "early_stopping": ("always", True),
    "num_return_sequences": (17, 2),
    "cache_salt": ("s" * 257, 3),
    "adapter": ("a" * 257, 3),
}
"""Each by itself; the first one fits into a message."""

EACH_WARP = [{name: VALUES[name]} for name in WARPS]
"""Parameters that change the distribution by one of them."""


def warped(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Scores [num_rows, vocab_size] after the classes that `generate` would build, in its order."""
    from transformers.generation import logits_process as hf

    warps = {
        hf.TemperatureLogitsWarper: params.temperature not in (0, 1) and params.temperature,
        hf.TopKLogitsWarper: params.top_k,
        hf.TopPLogitsWarper: params.top_p < 1 and params.top_p,
        hf.MinPLogitsWarper: params.min_p,
    }
    for warp, value in warps.items():
        scores = warp(value)(None, scores) if value else scores
    return scores
