"""The choices of a beam search: its texts, best first. No I/O."""

from __future__ import annotations

from dataclasses import replace

from specwire.completion import Completion, Hypothesis, Speculation


def choices_of(done: Completion) -> list[Completion]:
    """One completion for each text of a beam search; any other completion alone.

    The first one has the counts of the search, so that they are counted once.
    """
    if not done.hypotheses:
        return [done]
    return [_choice(done, found, is_first=i == 0) for i, found in enumerate(done.hypotheses)]


def _choice(done: Completion, found: Hypothesis, *, is_first: bool) -> Completion:
    return replace(
        done,
        text=found.text,
        token_ids=found.token_ids,
        finish_reason=found.finish_reason,
        stop_reason=found.stop_reason,
        usage=replace(done.usage, completion_tokens=len(found.token_ids)),
        speculation=done.speculation if is_first else Speculation(),
        tokens=(),
        hypotheses=(found,),
    )
