"""Configuration of `specwire train-eagle3`."""

from __future__ import annotations

from dataclasses import dataclass

from specwire.config.fields import at_least, between, check
from specwire.config.flags import CheckedConfig, option
from specwire.config.models import EMBEDDED, check_model

MAX_DEPTH = 8


@dataclass(frozen=True, kw_only=True)
class TrainEagle3Config(CheckedConfig):
    """What an EAGLE-3 is made for, from and how."""

    target: str = option(EMBEDDED, "directory or hub id of the target model", check=check_model)
    text: str = option("", "UTF-8 file of text like that the target will write")
    out: str = option("", "directory for the EAGLE-3; one that an interrupted training left there goes on")
    tokens: int = option(1 << 20, "most tokens of the text", check=at_least(1))
    steps: int = option(3000, "gradient steps, of 2048 tokens each", check=at_least(1))
    depth: int = option(
        4,
        "draft tokens after each place that it is trained on its own states for",
        check=between(1, MAX_DEPTH),
    )
    draft_vocab_size: int = option(
        0,
        "tokens that it may draft, the most frequent of the text; 0 for all of the target's",
        check=at_least(0),
    )
    num_threads: int = option(0, "CPU threads; 0 leaves it to torch", check=at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("text", "out"):
            check(getattr(self, name) != "", name, getattr(self, name), "must be given")
