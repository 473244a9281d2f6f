"""`specwire search-layers`: which blocks a target can spare, by Bayesian optimisation over all sets of them.

A Gaussian process over 0 and 1 for each block is fitted to the predicted speed-ups of the sets tried so far,
and of many candidates the one with the highest upper confidence bound is tried next. The reference code
of Zhang et al. 2023 (arXiv 2309.08168) uses the same library.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specwire.config import extras
from specwire.config.blocks import Block, skip_text
from specwire.config.models import EMBEDDED
from specwire.engine import boot
from specwire.engine.layers import files
from specwire.engine.layers.blocks import ModelBlocks
from specwire.engine.layers.files import BESIDE, Found
from specwire.engine.model.fingerprint import weights_fingerprint
from specwire.engine.model.loading import load_model
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ConfigError
from tools.drafts import Bar, SearchLayersConfig
from tools.files import check_place, make_directory, write
from tools.layers.objective import Promise, Trials, num_pages, promise
from tools.training import tokenizer_and_text

PROMPT_LEN, _LEAST_PROMPT_LEN = 64, 8
"""Tokens of each prompt."""
_PAGE_SIZE = 16
_FIRST_SHARE = 0.25
"""Of all trials, which are made at random: a process is fitted to them."""
_KAPPA = 2.576
"""Of the upper confidence bound, in standard deviations; the library's own."""
_NUM_CANDIDATES, _NUM_BEST, _NUM_FLIPS = 2000, 8, 2
"""Of each kind, in each trial; of the best, and how many blocks a neighbour has otherwise, on average."""

Floats = npt.NDArray[np.float64]
Evaluate = Callable[[tuple[Block, ...]], Promise]


def run(config: SearchLayersConfig, bar: Bar) -> tuple[Found, list[Promise]]:
    """Search, and write what was found; also returns all that was tried, in order.

    Raises:
        ConfigError: the text is too short or no UTF-8, or the optimiser is not installed.
        ModelLoadError: the target cannot be loaded, or its blocks cannot be left out.
    """
    extras.require("specwire search-layers", "search")
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    prompts = _prompts(config)
    source = boot.resolve(config.target, "verify")
    out = Path(config.out or boot.model_directory(source) / BESIDE)
    make_directory("--out", out.parent)
    check_place("--out", out)
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
    best = max(tried, key=lambda each: each.speedup)
    found = Found(
        target=Path(config.target).name,
        target_fingerprint=weights_fingerprint(directory),
        skip=skip_text(best.blocks),
        num_draft_tokens=best.num_draft_tokens,
        tokens_a_pass=best.tokens_a_pass,
        cost=best.cost,
        speedup=best.speedup,
        num_tried=len(tried),
    )
    write("--out", out, lambda path: files.save(path, found))
    return found, tried


def search(blocks: Sequence[Block], evaluate: Evaluate, num_trials: int, seed: int = 0) -> list[Promise]:
    """All that was tried, in order; every set at most once."""
    from bayes_opt import BayesianOptimization

    rng = np.random.default_rng(seed)
    acquisition = _acquisition(rng)
    bounds = {str(block): (0.0, 1.0) for block in blocks}
    optimizer = BayesianOptimization(None, bounds, acquisition, random_state=seed, verbose=0)
    tried: dict[tuple[Block, ...], Promise] = {}
    for number in range(min(num_trials, 2 ** len(blocks) - 1)):
        if number < _FIRST_SHARE * num_trials:
            wanted = rng.random(len(blocks)) < rng.random()
        else:
            suggested = optimizer.suggest()
            wanted = np.array([suggested[str(block)] > 0.5 for block in blocks])
        skipped = _untried(wanted, blocks, tried, rng)
        tried[skipped] = found = evaluate(skipped)
        optimizer.register({str(block): float(block in skipped) for block in blocks}, found.speedup)
    return [*tried.values()]


def _acquisition(rng: np.random.Generator) -> Any:
    """The highest upper confidence bound of many sets: of random ones of all sizes, and of neighbours of the
    best that were tried. The library's own candidates are sets of about half of the blocks, and where it
    climbs from them it leaves the corners 0 and 1."""
    from bayes_opt.acquisition import UpperConfidenceBound

    acquisition: Any = UpperConfidenceBound(kappa=_KAPPA)

    def suggest(gp: Any, target_space: Any, **_: Any) -> Floats:
        acquisition._fit_gp(gp, target_space)
        candidates = _candidates(target_space.params, target_space.target, rng)
        best: Floats = candidates[acquisition._get_acq(gp)(candidates).argmin()]
        return best

    acquisition.suggest = suggest
    return acquisition


def _candidates(tried: Floats, speedups: Floats, rng: np.random.Generator) -> Floats:
    """[num_candidates, num_blocks] of 0.0 and 1.0, none of which was tried.

    Args:
        tried: [num_tried, num_blocks].
        speedups: [num_tried].
    """
    num_blocks = tried.shape[1]
    shape = (_NUM_CANDIDATES, num_blocks)
    spread = rng.random(shape) < rng.random((_NUM_CANDIDATES, 1))
    best = tried[np.argsort(-speedups)[:_NUM_BEST]] > 0.5
    near = best[rng.integers(len(best), size=_NUM_CANDIDATES)] ^ (rng.random(shape) < _NUM_FLIPS / num_blocks)
    found = np.unique(np.concatenate([spread, near]), axis=0)
    known = {row.tobytes() for row in [*(tried > 0.5), np.zeros(num_blocks, bool)]}
    fresh = [row for row in found if row.tobytes() not in known]
    return np.array(fresh or [tried[0] > 0.5], float)


def _untried(
    wanted: npt.NDArray[np.bool_],
    blocks: Sequence[Block],
    tried: Container[tuple[Block, ...]],
    rng: np.random.Generator,
) -> tuple[Block, ...]:
    """The set itself, or one near it that was not tried; never the empty one."""
    while True:
        chosen = tuple(block for block, is_in in zip(blocks, wanted, strict=True) if is_in)
        if chosen and chosen not in tried:
            return chosen
        wanted[rng.integers(len(blocks))] ^= True


def _prompts(config: SearchLayersConfig) -> list[list[int]]:
    """Pieces of the text, at even distances."""
    loaded, text = tokenizer_and_text(config)
    size = len(text) // config.prompts
    pieces = [loaded.encode(text[i * size : (i + 1) * size])[:PROMPT_LEN] for i in range(config.prompts)]
    pieces = [piece for piece in pieces if len(piece) >= _LEAST_PROMPT_LEN]
    if not pieces:
        raise ConfigError(f"--text {config.text}: is too short for {config.prompts} prompts")
    return pieces
