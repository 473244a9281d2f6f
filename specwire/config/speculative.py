"""What `--speculative-config` says: drafts that need no model, under vLLM's names."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from specwire.config.fields import check
from specwire.core import MAX_NUM_DRAFT_TOKENS

NGRAM = "ngram"
METHODS = (NGRAM,)
"""Sources of drafts that need no model."""
MAX_PROMPT_LOOKUP = 32
_FLAG = "speculative_config"


@dataclass(frozen=True, kw_only=True)
class NgramConfig:
    """Prompt lookup.

    Attributes:
        method: `ngram`.
        num_speculative_tokens: most draft tokens a round.
        prompt_lookup_min, prompt_lookup_max: length of the last tokens that are looked for, in tokens.
    """

    method: str = NGRAM
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 16

    def __post_init__(self) -> None:
        """Raises:
        ConfigError: naming the key and its value.
        """
        check(self.method in METHODS, _FLAG, f"method={self.method!r}", f"is not one of {', '.join(METHODS)}")
        least = {"prompt_lookup_max": self.prompt_lookup_min}
        most = {"num_speculative_tokens": MAX_NUM_DRAFT_TOKENS}
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value, low, high = getattr(self, name), least.get(name, 1), most.get(name, MAX_PROMPT_LOOKUP)
            ok = type(value) is int and low <= value <= high
            check(ok, _FLAG, f"{name}={value!r}", f"must be a whole number in [{low}, {high}]")


def parse_speculative_config(text: str) -> NgramConfig | None:
    """A JSON object; None for an empty text.

    Raises:
        ConfigError: no JSON object, an unknown key, method or value; naming it.
    """
    if not text:
        return None
    try:
        given: Any = json.loads(text)
    except ValueError:
        given = None
    check(isinstance(given, dict), _FLAG, text, "is not a JSON object")
    known = [field.name for field in fields(NgramConfig)]
    for key in given:
        check(key in known, _FLAG, f"{key}={given[key]!r}", f"is not a key; known are {', '.join(known)}")
    return NgramConfig(**given)


def check_speculative_config(_: str, value: str) -> None:
    """Check of the config fields `speculative_config`."""
    parse_speculative_config(value)
