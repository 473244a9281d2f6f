"""A valid value of each sampling parameter that is not its default; together they are valid too."""

from __future__ import annotations

from typing import Any

from specwire.core import Rule
from specwire.text.grammar import Grammar

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
}
BEAM_SEARCH = ("num_beams", "length_penalty", "early_stopping", "num_return_sequences")
"""Those that do not combine with most others in a generation."""
