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

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from torch import Tensor

from specwire.config.services import VerifyConfig
from specwire.core import Verdict
from specwire.engine import boot
from specwire.engine.batch import Feed
from specwire.engine.boot import ModelService
from specwire.engine.jobs import TokenSequence
from specwire.engine.layers import files
from specwire.engine.layers.blocks import Blocks, ModelBlocks
from specwire.engine.thread import settle
from specwire.errors import ModelLoadError
from verify_service.grown import Growing, Node
from verify_service.own import Drafting
from verify_service.paged import PagedDrafts
from verify_service.threshold import Threshold

if TYPE_CHECKING:  # it loads transformers
    from specwire.engine.model.runner import ModelRunner


class LayersDrafts(PagedDrafts):
    """See `GrownDrafts`.

    Args:
        runner: of the target.
        left_out: what draft passes leave out.
    """

    sharpness = 1.0

    def __init__(self, runner: ModelRunner, left_out: Blocks) -> None:
        super().__init__(may_be_tree=False)
        self._runner, self._left_out = runner, left_out
        self._thresholds: WeakKeyDictionary[TokenSequence, Threshold] = WeakKeyDictionary()

    @classmethod
    def load(cls, config: VerifyConfig, service: ModelService) -> Self:
        """Without what `--layers` names."""
        given, directory = config.own.argument, boot.model_directory(boot.resolve(config.model, "verify"))
        runner: Any = service.runner
        try:
            skipped = files.chosen(given, directory, service.info)
            made: Future[ModelBlocks] = Future()
            service.engine.run_soon(lambda: settle(made, lambda: ModelBlocks(runner.model)))  # it runs it
            left_out = made.result().without(skipped)
        except ModelLoadError as error:
            raise ModelLoadError(f"--layers {given}: {error}") from None
        return cls(runner, left_out)

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

    def logits_after(self, nodes: Sequence[Node]) -> Tensor:
        """See `GrownDrafts`: one token of each sequence."""
        feeds = [Feed(node.of.sequence.cache, [node.token_id]) for node in nodes]
        return self._runner.forward_without(self._left_out, feeds)

    def open_after(self, growing: Growing) -> list[int]:
        """See `GrownDrafts`: the last token, if the draft was sure enough of it."""
        is_sure = growing.growth.last_share >= self._thresholds[growing.sequence].value
        return super().open_after(growing) if is_sure else []
