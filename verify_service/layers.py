"""What a target proposes after its own verdicts, drafted by itself with some of its blocks left out.

    cache   ├── committed, computed by the whole model ──┤├─ next token, draft tokens ─┤
                                                          written by draft passes, then dropped

Draft passes attend to the keys that the whole model has computed. What they write behind these is dropped
before the next pass, which computes it anew with all blocks; it is never known to other sequences. A proposal
is a chain. It ends after a token of which the draft was not sure (`threshold.py`), which the next pass runs
at next to no cost.

Where tokens are matched the draft draws with the target's noise. Under rejection sampling it takes its
likeliest tokens: a function of committed tokens alone, hence a draft that is certain of them, whose length
and delay may depend on them.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from specwire.core import Verdict
from specwire.engine.jobs import TokenSequence
from verify_service.grown import Growing
from verify_service.own import Drafting
from verify_service.paged import PagedDrafts
from verify_service.threshold import Threshold


class LayersDrafts(PagedDrafts):
    """See `GrownDrafts`."""

    sharpness = 1.0

    def __init__(self, runner: Any, *, may_be_tree: bool) -> None:
        super().__init__(runner, may_be_tree=may_be_tree)
        self._thresholds: WeakKeyDictionary[TokenSequence, Threshold] = WeakKeyDictionary()

    def begin(
        self, sequence: TokenSequence, drafting: Drafting, row: int, verdict: Verdict
    ) -> Growing | None:
        """See `GrownDrafts`; how the last proposal fared says where the next one ends."""
        before, judged = self._grown.get(sequence), drafting.judged
        found = super().begin(sequence, drafting, row, verdict)
        threshold = self._thresholds.setdefault(sequence, Threshold())
        num_drafted = len(judged.token_ids)
        if before is not None and num_drafted and judged.base_len == len(before.committed):
            assert drafting.outcome is not None
            was_longest = num_drafted == before.growth.max_depth
            threshold.learn(drafting.outcome.num_accepted, num_drafted, was_longest=was_longest)
        return found

    def open_after(self, growing: Growing) -> list[int]:
        """See `GrownDrafts`: the last token, if the draft was sure enough of it."""
        is_sure = growing.growth.last_share >= self._thresholds[growing.sequence].value
        return super().open_after(growing) if is_sure else []
