"""Multi-token prediction: layers of a checkpoint that draft for it (DeepSeek-AI 2024, arXiv 2412.19437).

    state^0_p      of token p, as the target computed it
    state^k+1_p    layer_k(state^k_p-1, embedding of token p), which attends to its own keys at k+1..p
    logits of p+1  the target's output layer of state^1_p; of p+2 by state^2, and so on

All of these at p follow from tokens 0..p, as the target's own keys do. So they lie in slot p of the same
pages: the keys of each layer, and the states that it reads next. Prefixes, forks, rollback and preemption
need nothing of their own. Layers run over all tokens of a pass, after the target; drafting runs them alone.

The modules are transformers' own (`MtpModel`). Beyond the last layer it is used again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.modeling_layers import MtpModel

from specwire.engine.attention import paged as attention
from specwire.engine.attention.paged import PackedBatch
from specwire.engine.attention.probe import LayerShape, Probe
from specwire.engine.batch import Batch, Segments
from specwire.engine.cache.layer_cache import LayerCache, Scoring
from specwire.engine.device import DraftQuery, DraftShape
from specwire.engine.model import loading
from specwire.engine.model.drafter import NodeStates, NotingRunner, check_drafts
from specwire.engine.model.packing import pack_linears
from specwire.errors import ModelLoadError
from specwire.rule.transfer import to_device

_CHECK_TOKENS = 10


def load(model: Any) -> MtpModel:
    """The layers that a loaded model's checkpoint has for multi-token prediction.

    Raises:
        ModelLoadError: it has none, or the engine does not compute what they do.
    """
    with loading.errors_naming(model.config.name_or_path):
        text = model.config.get_text_config(decoder=True)
        num_layers = getattr(text, "num_mtp_layers", None)
        if not num_layers:
            raise ModelLoadError(f"{model.config.model_type!r} has no layers for multi-token prediction")
        _name_layers(model, text.num_hidden_layers, num_layers)
        found = MtpModel.from_pretrained(model, device_map={"": model.device}).eval()
        pack_linears(found.layers)
        self_check(model, found)
    return found


def _name_layers(model: Any, first: int, num_layers: int) -> None:
    """Tell transformers which weights of the checkpoint are meant: it knows those of released depths only."""
    known = set(model._keys_to_ignore_on_load_unexpected or ())
    after = {rf"(^|\.)layers\.{number}\." for number in range(first, first + num_layers)}
    model._keys_to_ignore_on_load_unexpected = {key for key in known if not re.search(r"\d", key)} | after


def self_check(model: Any, mtp: MtpModel) -> None:
    """See `drafter.check_drafts`: against the layers' own logits."""
    tokens = loading.check_ids(model, _CHECK_TOKENS)
    runner = MtpRunner(model, mtp, num_pages=2 * len(tokens), page_size=4)
    before, chain = tokens[: -len(mtp.layers)], tokens[-len(mtp.layers) :]
    check_drafts(model, runner, before, chain, functools.partial(_reference, model, mtp, tokens))


@torch.inference_mode()
def _reference(model: Any, mtp: MtpModel, tokens: Sequence[int]) -> Tensor:
    """Logits [num_layers, vocab_size] after all but the last tokens, given each layer the token after them:
    by eager passes of the model and of each layer over the whole text, without any cache."""
    num_layers = len(mtp.layers)
    with loading.eager(model, mtp):
        token_ids = torch.tensor([tokens], device=model.device)
        num_tokens = len(tokens) - num_layers
        states = model.get_decoder()(input_ids=token_ids[:, :num_tokens], use_cache=False)[0]
        found = []
        for layer in range(num_layers):
            positions = torch.arange(layer + 1, layer + 1 + num_tokens, device=model.device)
            inputs = token_ids[:, layer + 1 : layer + 1 + num_tokens]
            states = mtp.forward_layer(layer, states, positions[None], None, input_ids=inputs)
            found.append(mtp._project_to_logits(states[0, -1:]).float())
        return torch.cat(found)


class MtpRunner(NotingRunner):
    """As `ModelRunner`; fills the pages for layers that draft, and runs them."""

    def __init__(self, model: Any, mtp: MtpModel, **pages: Any) -> None:
        self._mtp, self._num_layers, self._nodes = mtp, len(mtp.layers), NodeStates()
        last_norm = len(model.get_decoder().layers)
        super().__init__(model, [last_norm], **pages)
        self.draft_shape = DraftShape(self.vocab_size)

    @torch.inference_mode()
    def _probe(self) -> Probe:
        probe, own = super()._probe(), Probe()
        [[states]] = self._taken()
        self.state_size = int(states.shape[-1])
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        read = LayerShape(states, states.new_empty(1, 0), 1, Scoring(1.0))
        for number in range(self._num_layers):
            self._layer(number, states, token, token, own)
        probe.shapes |= own.shapes | dict.fromkeys(self._mtp.layers, read)
        return probe

    def _run_packed(self, batch: Batch) -> Tensor:
        logits = super()._run_packed(batch)
        [[states]] = self._taken()
        self._known(0).keys[to_device(batch.slots, self.device), 0] = states
        self._run_layers(batch, 0, None)
        return logits

    def draft(self, batch: Batch | None, query: DraftQuery) -> Tensor:
        """See `ModelRunner`: chains that began together, so all nodes have one depth."""
        assert batch is not None
        self._copy(batch)
        first = min(int(query.depths[0]), self._num_layers - 1)
        states = self._nodes.add(query, self._run_layers(batch, first, self._nodes.before(query)))
        logits: Tensor = self._mtp._project_to_logits(states.to(self.model.dtype)).float()
        logits[:, self.num_embeddings :] = float("-inf")
        return logits

    def _run_layers(self, batch: Batch, first: int, states: Tensor | None) -> Tensor:
        """Run the layers from the first one on.

        Args:
            states: that it reads, by token; None for those in the pages, as all others read.

        Returns:
            [num_tokens, state_size], of the first layer, without the tokens that it does not read.
        """
        found, previous = states, batch.previous_slots()
        for number in range(first, self._num_layers):
            kept, segments = without_first(batch, number + 1)
            if not len(segments):
                break
            columns = batch.slots, previous, batch.token_ids, batch.positions
            slots, before, token_ids, positions = self._on_device(*(each[kept] for each in columns))
            packed = PackedBatch(slots, segments, self._layers, self.pool.page_size, uses_tables=False)
            given = states if number == first else None
            read = self._known(number).keys[before, 0] if given is None else given
            after = self._layer(number, read.to(self.model.dtype), token_ids, positions, packed)
            if number + 1 < self._num_layers:
                self._known(number + 1).keys[slots, 0] = after
            if number == first:
                found = after
        return found if found is not None else torch.empty(0, self.state_size)

    def _layer(
        self, number: int, states: Tensor, token_ids: Tensor, positions: Tensor, packed: attention.Attend
    ) -> Tensor:
        """One layer over a packed row: states and the result [num_tokens, state_size]."""
        with attention.running(packed):
            after: Tensor = self._mtp.forward_layer(
                number, states[None], positions[None], None, input_ids=token_ids[None]
            )
        return after[0]

    def _known(self, number: int) -> LayerCache:
        """The states that a layer reads, as keys of one head; there are no values."""
        return self._layers[self._mtp.layers[number]]


def without_first(batch: Batch, num_first: int) -> tuple[npt.NDArray[np.bool_], Segments]:
    """A row without the first tokens of its sequences, and with these hidden from all others, which kernels
    for page tables cannot do.

    Returns:
        Which tokens of the row are left, bool [num_tokens], and the segments of these.
    """
    segments = batch.segments
    offsets = np.array(segments.query_offsets)
    num_query, lens = np.diff(offsets), np.array(segments.cache_lens)
    num_dropped = np.clip(num_first - (lens - num_query), 0, num_query)
    kept = np.arange(offsets[-1]) >= np.repeat(offsets[:-1] + num_dropped, num_query)
    there = np.flatnonzero(num_dropped < num_query).tolist()
    left = Segments(
        [0, *accumulate((num_query - num_dropped)[there].tolist())],
        [segments.cache_lens[i] for i in there],
        [segments.tables[i] for i in there],
        segments.page_size,
        {place: segments.trees[i] for place, i in enumerate(there) if i in segments.trees},
        [num_first] * len(there),
    )
    return kept, left
