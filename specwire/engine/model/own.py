"""Runners of targets that draft for themselves, in one process or on each rank of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specwire.config.own_methods import DFLASH, EAGLE3, HEADS, LAYERS, MTP
from specwire.config.services import ModelServiceConfig
from specwire.engine.attention.paged import Attend
from specwire.engine.batch import Batch
from specwire.engine.device import DraftQuery, DraftShape
from specwire.engine.heads import model as heads
from specwire.engine.heads.model import Heads, States
from specwire.engine.layers import files
from specwire.engine.layers.blocks import Blocks, ModelBlocks
from specwire.engine.model import block, eagle3, mtp
from specwire.engine.model.block import BlockRunner
from specwire.engine.model.drafter import NodeStates
from specwire.engine.model.eagle3 import Eagle3Runner
from specwire.engine.model.fingerprint import weights_fingerprint
from specwire.engine.model.mtp import MtpRunner
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ModelLoadError
from specwire.rule.transfer import to_device

_PAGED: Mapping[str, Callable[..., ModelRunner]] = {
    MTP: lambda model, _, replay, **pages: MtpRunner(model, mtp.load(model), **pages),  # not padded
    DFLASH: lambda model, directory, **pages: BlockRunner(model, block.load(directory, model), **pages),
    EAGLE3: lambda model, directory, **pages: Eagle3Runner(model, eagle3.load(directory, model), **pages),
}
"""Of drafts that fill pages of their own, by their source; given the model and their argument."""


def make_runner(
    config: ModelServiceConfig, directory: Path, model: Any, *, num_pages: Any, **steps: Any
) -> ModelRunner:
    """The runner of a model, with what it drafts with by itself; to be warmed.

    Args:
        directory: of the model.
        steps: how passes are run, see `ModelRunner`.

    Raises:
        ModelLoadError: what it drafts with cannot be loaded, or is not this model's.
    """
    (source, argument), pages = config.own, {"num_pages": num_pages, "page_size": config.page_len}
    if make := _PAGED.get(source):
        return make(model, argument, replay=steps["replay"], **pages)
    if source not in (HEADS, LAYERS):
        return ModelRunner(model, **pages, **steps)
    name = Path(config.model).name if Path(config.model).exists() else config.model
    target = name, weights_fingerprint(directory)
    try:
        if source == HEADS:
            return HeadsRunner(model, heads.load(Path(argument), model, *target), **pages, **steps)
        left_out = ModelBlocks(model).without(files.chosen(argument, directory, *target))
        return LayersRunner(model, left_out, **pages, **steps)
    except ModelLoadError as error:
        given = f"--{source} " + ("" if source == HEADS else f"{argument}: ")
        raise ModelLoadError(f"{given}{error}") from None


class HeadsRunner(ModelRunner):
    """As `ModelRunner`; runs heads on the states of the latest pass."""

    _states: States | None = None  # not before the width of the logits is known

    def __init__(self, model: Any, heads: Heads, **options: Any) -> None:
        self._heads, self._nodes = heads, NodeStates()
        self._shown: Tensor  # by the latest pass, [num_rows, state_size]
        super().__init__(model, **options)
        self._states = States(model)
        self.draft_shape = DraftShape(self.vocab_size)

    def _logits(self, packed: Attend, token_ids: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        """With the states that they are computed from beside them, so that both are recorded."""
        logits = super()._logits(packed, token_ids, positions, rows)
        if self._states is None:
            return logits
        return self._states.beside(logits, None if self._keeps_rows else rows)

    @torch.inference_mode()
    def compute(self, batch: Batch) -> Tensor:
        both = super().compute(batch)
        self._shown = both[:, self.vocab_size :]
        return both[:, : self.vocab_size]

    def draft(self, batch: Batch | None, query: DraftQuery) -> Tensor:
        """See `ModelRunner`. Heads differ by depth."""
        states = self._nodes.before(query)
        if states is None:
            states = self._shown[to_device(query.rows, self.device)]
        found = torch.empty_like(states)
        for depth in np.unique(query.depths):
            at = np.flatnonzero(query.depths == depth)
            here, token_ids = self._on_device(at, query.token_ids[at])
            found[here] = self._heads.advance(states[here], token_ids, int(depth)).to(states.dtype)
        return self._heads.logits(self._nodes.add(query, found))


class LayersRunner(ModelRunner):
    """As `ModelRunner`; drafts with the model less some of its blocks."""

    def __init__(self, model: Any, left_out: Blocks, **options: Any) -> None:
        super().__init__(model, **options)
        self._left_out = left_out
        self.draft_shape = DraftShape(self.vocab_size, share_read=left_out.share_read)

    def draft(self, batch: Batch | None, query: DraftQuery) -> Tensor:
        assert batch is not None
        return self._compute_without(self._left_out, batch)
