"""Configuration of `specwire search-layers`."""

from __future__ import annotations

from dataclasses import dataclass

from specwire.config.fields import at_least, between, check, one_of
from specwire.config.flags import CheckedConfig, option
from specwire.config.models import DTYPES, EMBEDDED, EMULATED, check_model
from specwire.core import MAX_NUM_DRAFT_TOKENS


@dataclass(frozen=True, kw_only=True)
class SearchLayersConfig(CheckedConfig):
    """Which target, on what text, and how long."""

    target: str = option(EMBEDDED, "directory or hub id of the target model", check=check_model)
    text: str = option("", "UTF-8 file of text like the prompts that the target will be given")
    out: str = option("", "file for what is found; empty for the one beside the model that layers:auto reads")
    picture: str = option("", "PNG of the search; empty for none")
    trials: int = option(150, "sets of blocks to try", check=between(2, 100_000))
    prompts: int = option(16, "prompts that are taken from the text, evenly", check=between(1, 256))
    num_draft_tokens: int = option(8, "most draft tokens a round", check=between(1, MAX_NUM_DRAFT_TOKENS))
    dtype: str = option("auto", "number format of the weights", check=one_of(*DTYPES))
    device: str = option("cpu", "device of the target")
    num_threads: int = option(0, "CPU threads; 0 leaves it to torch", check=at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.text != "", "text", self.text, "must be given")
        check(not self.target.startswith(EMULATED), "target", self.target, "has no layers")
