"""What a target proposes after its own verdicts with its heads (`specwire.engine.heads`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from specwire.config.services import VerifyConfig
from specwire.engine.boot import ModelService
from specwire.engine.heads import model
from specwire.engine.heads.model import Heads
from specwire.errors import ModelLoadError
from specwire.rule.transfer import to_device
from verify_service.grown import Growing, GrownDrafts, Node
from verify_service.own import Judged


class HeadsDrafts(GrownDrafts):
    """See `GrownDrafts`. Heads lead from the state before a token to the one after it.

    Args:
        heads: of the target.
        may_be_tree: whether the target verifies trees.
    """

    def __init__(self, heads: Heads, *, may_be_tree: bool) -> None:
        super().__init__(may_be_tree=may_be_tree)
        self._heads = heads
        self._states: Tensor  # so far, [num_rows, state_size]
        self._rows: dict[tuple[Growing, int], int] = {}  # of the state after a node

    @classmethod
    def load(cls, config: VerifyConfig, service: ModelService) -> Self:
        """Of the directory that `--heads` names."""
        try:
            loaded = model.load(
                Path(config.own.argument), getattr(service.runner, "model", None), service.info
            )
        except ModelLoadError as error:
            raise ModelLoadError(f"--heads {error}") from None
        return cls(loaded, may_be_tree=service.info.trees)

    def split(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `GrownDrafts`; they lie side by side."""
        return logits[:, : self._heads.vocab_size], logits[:, self._heads.vocab_size :]

    def propose(self, judged: Sequence[Judged], states: Tensor | None) -> None:
        """See `GrownDrafts`."""
        assert states is not None
        self._states = states
        super().propose(judged, states)

    def grow(self, growing: list[Growing]) -> None:
        """See `GrownDrafts`."""
        rows = np.array([each.row for each in growing], np.int64)
        self._states = self._states[to_device(rows, self._states.device)]
        self._rows = {(each, -2): place for place, each in enumerate(growing)}
        super().grow(growing)

    def logits_after(self, nodes: Sequence[Node]) -> Tensor:
        """See `GrownDrafts`. Heads differ by depth."""
        states, depths = self._states, np.array([node.depth for node in nodes])
        rows = np.array([self._rows[node.of, node.parent] for node in nodes], np.int64)
        token_ids = np.array([node.token_id for node in nodes], np.int64)
        advanced = states.new_empty(len(nodes), states.shape[1])
        for depth in np.unique(depths):
            at = np.flatnonzero(depths == depth)
            before, after, here = (to_device(each, states.device) for each in (rows[at], token_ids[at], at))
            advanced[here] = self._heads.advance(states[before], after, int(depth)).to(states.dtype)
        self._rows |= {(of, node): row for row, (of, node) in enumerate(nodes, len(states))}
        self._states = torch.cat([states, advanced])
        return self._heads.logits(advanced)
