"""Paces a model: real logits, and a minimum time for every pass, like that of a larger model on its device.

A pass computes the same as without it. If it is faster than the minimum the rest of the time is slept, and
the processor is free for other work. So a small machine can show the effect of speculation on a large target.
All passes take the same time, as they do where reading the weights dominates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def pace(runner: Any, least_pass_s: float) -> None:
    """Let the passes of a `device.Runner` take at least so long, deciding on their logits included.

    What a target drafts by itself takes the share of it that its drafts read of its weights; what a draft
    model beside it does takes its own time.
    """

    def paced(run: Callable[..., Any], share: Callable[[], float]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            due_s = time.perf_counter() + least_pass_s * share()
            answer = run(*args)
            time.sleep(max(0.0, due_s - time.perf_counter()))
            return answer

        return call

    runner.run = paced(runner.run, lambda: 1.0)
    if hasattr(runner, "run_draft"):
        runner.run_draft = paced(runner.run_draft, lambda: runner.draft_shape.share_read)
