"""What a target proposes by itself with layers for multi-token prediction (`specwire.engine.model.mtp`).

As `heads`, but that a layer attends: its keys are in the pages of the sequence, which the target's pass has
filled up to the last accepted token. What is drafted is appended there, and dropped again:

    cache   ├── accepted ──┤ rejected ┤                     after the pass
    cache   ├── accepted ──┤ next token, draft tokens ┤
    cache   ├── accepted ──┤                                the next round begins here

Chains only: a tree of one layer would take attention to the nodes of a path.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from specwire.core import Verdict
from specwire.engine.batch import Feed
from specwire.engine.jobs import TokenSequence
from specwire.errors import ResourceExhaustedError
from specwire.rule.transfer import to_device
from verify_service.heads import Drafting, Growing, Node, OwnDrafts, Scorer

log = logging.getLogger(__name__)


class PagedScorer(Scorer, Protocol):
    """A target that keeps in its pages what proposals are made of."""

    @property
    def state_size(self) -> int:
        """Width of a state."""


class Predictor(PagedScorer, Protocol):
    """A target with layers for multi-token prediction: a `MtpRunner`."""

    def advance(self, feeds: Sequence[Feed], depth: int, states: Tensor | None) -> Tensor:
        """See `MtpRunner.advance`."""


class PagedDrafts(OwnDrafts):
    """With something that has keys in the pages of the target.

    Args:
        runner: of the target.
        may_be_tree: whether proposals may be trees.
    """

    def __init__(self, runner: PagedScorer, *, may_be_tree: bool) -> None:
        super().__init__(runner, may_be_tree=may_be_tree)
        self._state_size = runner.state_size

    def split(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `OwnDrafts`; the states are in the pages, and these are never read."""
        return logits, logits.new_empty(len(logits), self._state_size)

    def begin(self, sequence: TokenSequence, drafting: Drafting, verdict: Verdict) -> Growing | None:
        """See `OwnDrafts`. The sequence goes on as the coordinator's next request will have it do."""
        found = super().begin(sequence, drafting, verdict)
        if found is None:
            return None
        base_len = drafting.judged.base_len
        sequence.rebase(base_len, found.committed[base_len:])
        # Pages that others read may have kept a path of a tree from moving together.
        return found if sequence.cache.length == len(found.committed) - 1 else None

    def grow(self, growing: list[Growing], states: Tensor) -> None:
        """See `OwnDrafts`; where the cache is full, with the tokens that there was room for."""
        try:
            super().grow(self.fill(growing), states)
        except ResourceExhaustedError as error:
            log.debug("no room to draft in: %s", error)
        finally:
            for each in growing:
                each.sequence.cache.truncate(len(each.committed) - 1)

    def fill(self, growing: Sequence[Growing]) -> list[Growing]:
        """What precedes the growth of proposals; returns those for which there is room."""
        return [*growing]


class MtpDrafts(PagedDrafts):
    """With layers for multi-token prediction.

    Args:
        runner: of the target.
    """

    def __init__(self, runner: Predictor) -> None:
        super().__init__(runner, may_be_tree=False)
        self._runner = runner

    def advanced(self, nodes: Sequence[Node], states: Tensor) -> Tensor:
        """See `OwnDrafts`. Chains that began together: all nodes have one depth."""
        depth = nodes[0].depth
        feeds = [Feed(node.of.sequence.cache, [node.token_id]) for node in nodes]
        parents = np.array([node.parent_row for node in nodes], np.int64)
        before = states[to_device(parents, states.device)] if depth else None
        return self._runner.advance(feeds, depth, before).to(states.dtype)
