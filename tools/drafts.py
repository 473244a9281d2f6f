"""What makes the drafts that a target has of its own: the configs of these commands, and what they print.

`heads/`, `eagle3/` and `layers/` do the work; they load torch, and so are imported when it begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from specwire.config import extras
from specwire.config.fields import at_least, between, check, one_of
from specwire.config.flags import CheckedConfig, option, same
from specwire.config.models import DTYPES, EMBEDDED, EMULATED, check_model
from specwire.core import MAX_NUM_DRAFT_TOKENS
from tools.files import check_place, write

Advance = Callable[[int], object]
"""Told of so many more units of work that are done."""
Bar = Callable[[str, int], AbstractContextManager[Advance]]
"""Shows progress: given a title and how much there is to do, a context manager with an `Advance`."""

MAX_HEADS = 16
MAX_DEPTH = 8


@dataclass(frozen=True, kw_only=True)
class TargetTextConfig(CheckedConfig):
    """A target, and a text for it."""

    target: str = option(EMBEDDED, "directory or hub id of the target model", check=check_model)
    text: str = option("", "UTF-8 file of text like that the target will write")
    num_threads: int = option(0, "CPU threads; 0 leaves it to torch", check=at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.text != "", "text", self.text, "must be given")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TargetTextConfig):
    """A training, which takes the beginning of the text."""

    out: str = option("", "directory for what is made; a training that was interrupted there goes on")
    tokens: int = option(131072, "most tokens of the text", check=at_least(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.out != "", "out", self.out, "must be given")


@dataclass(frozen=True, kw_only=True)
class TrainHeadsConfig(TrainingConfig):
    """`specwire train-heads`."""

    num_heads: int = option(4, "heads, one for each further token", check=between(1, MAX_HEADS))
    num_features: int = option(
        0, "nonlinear features of each head; 0 for the target's hidden size", check=at_least(0)
    )
    steps: int = option(0, "gradient steps after the closed form", check=at_least(0))


@dataclass(frozen=True, kw_only=True)
class TrainEagle3Config(TrainingConfig):
    """`specwire train-eagle3`."""

    tokens: int = same(TrainingConfig, "tokens", 1 << 20)
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


@dataclass(frozen=True, kw_only=True)
class SearchLayersConfig(TargetTextConfig):
    """`specwire search-layers`."""

    text: str = option("", "UTF-8 file of text like the prompts that the target will be given")
    out: str = option("", "file for what is found; empty for the one beside the model that layers:auto reads")
    picture: str = option("", "PNG of the search; empty for none")
    trials: int = option(150, "sets of blocks to try", check=between(2, 100_000))
    prompts: int = option(16, "prompts that are taken from the text, evenly", check=between(1, 256))
    num_draft_tokens: int = option(8, "most draft tokens a round", check=between(1, MAX_NUM_DRAFT_TOKENS))
    dtype: str = option("auto", "number format of the weights", check=one_of(*DTYPES))
    device: str = option("cpu", "device of the target")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(not self.target.startswith(EMULATED), "target", self.target, "has no layers")


def train_heads(config: TrainHeadsConfig) -> None:
    from tools.heads.training import train

    made = write("--out", Path(config.out), lambda _: train(config, bar))
    use = f"specwire up --target {config.target} --draft heads:{config.out}"
    print(f"{made.num_heads} heads for {made.target}: {use}")


def train_eagle3(config: TrainEagle3Config) -> None:
    from tools.eagle3.training import train

    made = write("--out", Path(config.out), lambda _: train(config, bar))
    print(f"specwire up --target {config.target} --draft eagle3:{made}")


def search_layers(config: SearchLayersConfig) -> None:
    if config.picture:
        check_place("--picture", Path(config.picture))
        extras.require("--picture", "bench")
    from tools.layers import picture
    from tools.layers.search import run

    found, tried = run(config, bar)
    if config.picture:
        write("--picture", Path(config.picture), lambda path: picture.draw(path, tried))
    print(
        f"{found.num_tried} sets tried; best without {found.skip}: {found.num_draft_tokens} draft tokens a "
        f"round, each for {found.cost:.2f} of a pass; {found.tokens_a_pass:.2f} tokens a pass; predicted "
        f"{found.speedup:.2f} times plain"
    )
    if found.speedup <= 1:
        print("no set of blocks is predicted to be faster than plain decoding")
    print(f"specwire up --target {config.target} --draft layers:{config.out or 'auto'}")


@contextlib.contextmanager
def bar(title: str, total: int) -> Iterator[Advance]:
    """On standard error; without tqdm a line when it is done."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        yield lambda num: None
        print(f"{title}: done")
        return
    with tqdm(desc=title, total=total, unit_scale=True) as shown:
        yield shown.update
