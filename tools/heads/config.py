"""Configuration of `specwire train-heads`."""

from __future__ import annotations

from dataclasses import dataclass

from specwire.config.fields import at_least, between, check
from specwire.config.flags import CheckedConfig, option
from specwire.config.models import EMBEDDED, check_model

MAX_HEADS = 16


@dataclass(frozen=True, kw_only=True)
class TrainHeadsConfig(CheckedConfig):
    """What heads are made for, from and how."""

    target: str = option(EMBEDDED, "directory or hub id of the target model", check=check_model)
    text: str = option("", "UTF-8 file of text like that the target will write")
    out: str = option("", "directory for the heads; a training that was interrupted there goes on")
    num_heads: int = option(4, "heads, one for each further token", check=between(1, MAX_HEADS))
    num_features: int = option(
        0, "nonlinear features of each head; 0 for the target's hidden size", check=at_least(0)
    )
    tokens: int = option(131072, "most tokens of the text", check=at_least(1))
    steps: int = option(0, "gradient steps after the closed form", check=at_least(0))
    num_threads: int = option(0, "CPU threads; 0 leaves it to torch", check=at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("text", "out"):
            check(getattr(self, name) != "", name, getattr(self, name), "must be given")
