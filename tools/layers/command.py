"""`specwire search-layers`: blocks that a target can spare, and a picture of the search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specwire.config import extras
from tools.heads.command import bar
from tools.layers.config import SearchLayersConfig

if TYPE_CHECKING:
    from tools.layers.objective import Promise


def run(config: SearchLayersConfig) -> int:
    """Search, draw, and say how the result is used; returns the exit status."""
    if config.picture:
        extras.require("--picture", "bench")
    from tools.layers.search import run as search  # loads torch

    found, tried = search(config, bar)
    if config.picture:
        draw(Path(config.picture), tried)
    print(
        f"{found.num_tried} sets tried; best without {found.skip}: {found.num_draft_tokens} draft tokens a "
        f"round, each for {found.cost:.2f} of a pass; {found.tokens_a_pass:.2f} tokens a pass; predicted "
        f"{found.speedup:.2f} times plain"
    )
    if found.speedup <= 1:
        print("no set of blocks is predicted to be faster than plain decoding")
    print(f"specwire up --target {config.target} --draft layers:{config.out or 'auto'}")
    return 0


def front(tried: Sequence[Promise]) -> list[Promise]:
    """Those that no other beats in both cost and tokens a pass, by cost."""
    found: list[Promise] = []
    for each in sorted(tried, key=lambda each: (each.cost, -each.tokens_a_pass)):
        if not found or each.tokens_a_pass > found[-1].tokens_a_pass:
            found.append(each)
    return found


def draw(path: Path, tried: Sequence[Promise]) -> None:
    """Write a PNG: cost and tokens a pass of each set, and how the best speed-up grew with the trials.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # not pyplot: no window system, no state

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    sets, course = figure.subplots(1, 2)
    best = max(tried, key=lambda each: each.speedup)
    shown = sets.scatter(
        [each.cost for each in tried],
        [each.tokens_a_pass for each in tried],
        c=[each.speedup for each in tried],
        s=18,
    )
    figure.colorbar(shown, ax=sets, label="predicted speed-up")
    edge = front(tried)
    sets.step([each.cost for each in edge], [each.tokens_a_pass for each in edge], where="post", lw=0.8)
    sets.scatter([best.cost], [best.tokens_a_pass], marker="*", s=160, color="crimson", label="chosen")
    sets.set(xlabel="cost of a draft pass, in passes of the target", ylabel="tokens a pass")
    sets.legend(loc="lower right")
    speedups = [each.speedup for each in tried]
    course.plot(speedups, ".", ms=4, label="tried")
    course.plot([max(speedups[: i + 1]) for i in range(len(speedups))], label="best so far")
    course.axhline(1.0, lw=0.8, color="grey")
    course.set(xlabel="trial", ylabel="predicted speed-up over plain decoding")
    course.legend(loc="lower right")
    figure.savefig(path, dpi=120, format="png", facecolor="white")
