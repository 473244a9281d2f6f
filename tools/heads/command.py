"""`specwire train-heads`: heads for a target, with a progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tools.heads.config import TrainHeadsConfig


def run(config: TrainHeadsConfig) -> int:
    """Train, and say how the heads are used; returns the exit status."""
    from tools.heads.training import train  # loads torch

    made = train(config, bar)
    use = f"specwire up --target {config.target} --draft heads:{config.out}"
    print(f"{made.num_heads} heads for {made.target}: {use}")
    return 0


@contextlib.contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """On standard error; without tqdm a line when it is done."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        yield lambda num: None
        print(f"{title}: done")
        return
    with tqdm(desc=title, total=total, unit_scale=True) as shown:
        yield shown.update
