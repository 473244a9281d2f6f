"""A picture of the search for blocks that a target can spare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.layers.objective import Promise


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
