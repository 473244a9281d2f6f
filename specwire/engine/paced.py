"""Paces a model: real logits, and a minimum time for every pass, like that of a larger model on its device.

A pass computes the same as without it. If it is faster than the minimum the rest of the time is slept, and
the processor is free for other work. So a small machine can show the effect of speculation on a large target.
All passes take the same time, as they do where reading the weights dominates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from specwire.engine.batch import Feed
from specwire.engine.device import Decide, DraftQuery


def pace(runner: Any, least_pass_s: float) -> None:
    """Let the passes of a `device.Runner` take at least so long, deciding on their logits included.

    What a target drafts by itself takes the share of it that its drafts read of its weights; what a draft
    model beside it does takes its own time.
    """
    run, run_draft = runner.run, getattr(runner, "run_draft", None)

    def paced_run(feeds: Sequence[Feed], question: Any, decide: Decide) -> Any:
        due_s = time.perf_counter() + least_pass_s
        answer = run(feeds, question, decide)
        _sleep_until(due_s)
        return answer

    def paced_draft(feeds: Sequence[Feed], query: DraftQuery, question: Any, decide: Decide) -> Any:
        assert run_draft is not None
        due_s = time.perf_counter() + least_pass_s * runner.draft_shape.share_read
        answer = run_draft(feeds, query, question, decide)
        _sleep_until(due_s)
        return answer

    runner.run, runner.run_draft = paced_run, paced_draft


def _sleep_until(due_s: float) -> None:
    time.sleep(max(0.0, due_s - time.perf_counter()))
