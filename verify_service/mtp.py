"""What a target proposes by itself with layers for multi-token prediction (`specwire.engine.model.mtp`).

As `heads`, but that a layer attends: its keys are in the pages of the sequence, which the target's pass has
filled up to the last accepted token. The next token and draft tokens are appended there, and dropped again.
Chains only: a tree of one layer would take attention to the nodes of a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch import Tensor

from specwire.config.services import VerifyConfig
from specwire.engine.batch import Feed
from specwire.engine.boot import ModelService
from specwire.rule.transfer import to_device
from verify_service.grown import Growing, Node
from verify_service.paged import PagedDrafts

if TYPE_CHECKING:  # it loads transformers
    from specwire.engine.model.mtp import MtpRunner


class MtpDrafts(PagedDrafts):
    """With layers for multi-token prediction.

    Args:
        runner: of the target.
    """

    def __init__(self, runner: MtpRunner) -> None:
        super().__init__(may_be_tree=False)
        self._runner = runner
        self._states: Tensor  # after the nodes of the last pass
        self._rows: dict[Growing, int] = {}  # of each sequence's among them

    @classmethod
    def load(cls, config: VerifyConfig, service: ModelService) -> Self:
        """With those of the target."""
        runner: Any = service.runner
        return cls(runner.drafting)

    def logits_after(self, nodes: Sequence[Node]) -> Tensor:
        """See `GrownDrafts`. Chains that began together: all nodes have one depth."""
        depth, before = nodes[0].depth, None
        if depth:
            rows = np.array([self._rows[node.of] for node in nodes], np.int64)
            before = self._states[to_device(rows, self._states.device)]
        feeds = [Feed(node.of.sequence.cache, [node.token_id]) for node in nodes]
        self._states = self._runner.advance(feeds, depth, before)
        self._rows = {of: row for row, (of, _) in enumerate(nodes)}
        return self._runner.logits(self._states)
