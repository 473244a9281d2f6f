"""`specwire train-eagle3`: an EAGLE-3 for a target, with a progress bar."""

from __future__ import annotations

from tools.eagle3.config import TrainEagle3Config
from tools.heads.command import bar


def run(config: TrainEagle3Config) -> int:
    """Train, and say how it is used; returns the exit status."""
    from tools.eagle3.training import train  # loads torch

    made = train(config, bar)
    print(f"specwire up --target {config.target} --draft eagle3:{made}")
    return 0
