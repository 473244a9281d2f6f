"""`specwire search-layers`: which blocks a target can spare, by Bayesian optimisation over all sets of them.

A Gaussian process over 0 and 1 for each block is fitted to the predicted speed-ups of the sets tried so far,
and of many sets at random the one with the highest upper confidence bound is tried next. The reference code
of Zhang et al. 2023 (arXiv 2309.08168) uses the same library.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specwire import tokenizer
from specwire.config.blocks import Block, skip_text
from specwire.config.layers import SearchLayersConfig
from specwire.config.services import EMBEDDED
from specwire.engine import boot
from specwire.engine.layers import files
from specwire.engine.layers.blocks import ModelBlocks
from specwire.engine.layers.files import BESIDE, Found
from specwire.engine.layers.objective import Promise, Trials, num_pages, promise
from specwire.engine.model.fingerprint import weights_fingerprint
from specwire.engine.model.loading import load_model
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ConfigError

PROMPT_LEN, _LEAST_PROMPT_LEN = 64, 8
"""Tokens of each prompt."""
_PAGE_SIZE = 16
_FIRST_SHARE = 0.25
"""Of all trials, which are made at random: a process is fitted to them."""

Evaluate = Callable[[tuple[Block, ...]], Promise]
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], Any]]]
"""Shows progress: given a title and how much there is to do, a context manager with what is told of it."""


def run(config: SearchLayersConfig, bar: Bar) -> tuple[Found, list[Promise]]:
    """Search, and write what was found; also returns all that was tried, in order.

    Raises:
        ConfigError: the text is too short or no UTF-8, or the optimiser is not installed.
        ModelLoadError: the target cannot be loaded, or its blocks cannot be left out.
    """
    check_installed()
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    source = boot.resolve(config.target, "verify")
    prompts = _prompts(config, source)
    dtype = "float32" if config.target == EMBEDDED and config.device == "cpu" else config.dtype
    room = num_pages(len(prompts), PROMPT_LEN, config.num_draft_tokens, _PAGE_SIZE)
    model = load_model(source, dtype=dtype, device=config.device)
    runner = ModelRunner(model, num_pages=room, page_size=_PAGE_SIZE)
    blocks = ModelBlocks(model)
    with bar("sets of blocks", config.trials) as advance:
        trials = Trials(runner, prompts, config.num_draft_tokens)
        costs = trials.costs(blocks)

        def evaluate(skipped: tuple[Block, ...]) -> Promise:
            found = promise(skipped, trials.reached(blocks.without(skipped)), costs)
            advance(1)
            return found

        tried = search(blocks.all(), evaluate, config.trials)
        trials.close()
    directory = boot.model_directory(source)
    found = _found(config.target, weights_fingerprint(directory), tried)
    files.save(Path(config.out) if config.out else directory / BESIDE, found)
    return found, tried


def search(blocks: Sequence[Block], evaluate: Evaluate, num_trials: int, seed: int = 0) -> list[Promise]:
    """All that was tried, in order; every set at most once.

    Args:
        blocks: of the model.
    """
    from bayes_opt import BayesianOptimization
    from bayes_opt.acquisition import UpperConfidenceBound

    rng = random.Random(seed)
    names = {str(block): block for block in blocks}
    acquisition: Any = UpperConfidenceBound(kappa=2.576)
    # To climb from the best ones on takes seconds, and sets at random are corners already.
    acquisition.suggest = partial(acquisition.suggest, n_smart=0)
    bounds = dict.fromkeys(names, (0, 1, int))
    optimizer = BayesianOptimization(None, bounds, acquisition, random_state=seed, verbose=0)
    tried: dict[tuple[Block, ...], Promise] = {}
    for number in range(min(num_trials, 2 ** len(blocks) - 1)):
        if number < _FIRST_SHARE * num_trials:
            share = rng.random()
            wanted = [block for block in blocks if rng.random() < share]
        else:
            wanted = [names[name] for name, value in optimizer.suggest().items() if value > 0.5]
        skipped = _untried(wanted, blocks, tried, rng)
        tried[skipped] = found = evaluate(skipped)
        optimizer.register({name: int(block in skipped) for name, block in names.items()}, found.speedup)
    return [*tried.values()]


def _untried(
    wanted: Sequence[Block],
    blocks: Sequence[Block],
    tried: Mapping[tuple[Block, ...], Promise],
    rng: random.Random,
) -> tuple[Block, ...]:
    """The set itself, or one near it that was not tried; never the empty one."""
    chosen = set(wanted)
    while not chosen or tuple(sorted(chosen)) in tried:
        chosen ^= {rng.choice(blocks)}
    return tuple(sorted(chosen))


def check_installed() -> None:
    """Raises:
    ConfigError: the optimiser is missing.
    """
    try:
        import bayes_opt  # noqa: F401
    except ModuleNotFoundError as error:
        problem = f"specwire search-layers needs pip install 'specwire[search]' ({error.name} is missing)"
        raise ConfigError(problem) from None


def _prompts(config: SearchLayersConfig, source: str) -> list[list[int]]:
    """Pieces of the text, at even distances."""
    loaded = tokenizer.load(source)
    if loaded is None:
        raise ConfigError(f"--target {config.target}: has no tokenizer")
    try:
        text = Path(config.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {config.text}: {error}") from None
    size = len(text) // config.prompts
    pieces = [loaded.encode(text[i * size : (i + 1) * size])[:PROMPT_LEN] for i in range(config.prompts)]
    pieces = [piece for piece in pieces if len(piece) >= _LEAST_PROMPT_LEN]
    if not pieces:
        raise ConfigError(f"--text {config.text}: is too short for {config.prompts} prompts")
    return pieces


def _found(target: str, fingerprint: str, tried: Sequence[Promise]) -> Found:
    best = max(tried, key=lambda each: each.speedup)
    return Found(
        target=Path(target).name,
        target_fingerprint=fingerprint,
        skip=skip_text(best.blocks),
        num_draft_tokens=best.num_draft_tokens,
        tokens_a_pass=best.tokens_a_pass,
        cost=best.cost,
        speedup=best.speedup,
        num_tried=len(tried),
    )
