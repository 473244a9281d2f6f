"""Encoder-decoders (T5, BART, Marian) on the packed, paged engine.

    inputs of new sequences ──encoder──▶ states ──▶ keys of each cross-attention, into the inputs' slots
    packed row of decoder tokens ──decoder──▶ logits

The modules are transformers' own. Three things are put in their way during a pass: positions of a packed row
where a decoder numbers its tokens itself; T5's bias by distance instead of by pairs of tokens; and a cache
that has the keys of earlier inputs, so that they are not computed again.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, EncoderDecoderCache

from specwire.engine.attention import paged as attention
from specwire.engine.attention.encoded import DecoderBatch, DecoderProbe, EncoderPass
from specwire.engine.batch import Batch, EncoderInputs
from specwire.engine.model import loading, recurrent
from specwire.engine.model.runner import ModelRunner, num_embeddings
from specwire.errors import ModelLoadError
from specwire.rule.transfer import to_device
from specwire.support import IntArray

_CHECK_INPUTS = (5, 9)
_CHECK_TOKENS = 12


def load(source: str | os.PathLike[str], *, dtype: str = "auto", device: str = "cpu") -> Any:
    """As `loading.load_model`, of an encoder-decoder."""
    return loading.load_model(
        source, dtype=dtype, device=device, kind=AutoModelForSeq2SeqLM, check=self_check
    )


def describe(model: Any, source: str | os.PathLike[str] = "") -> dict[str, Any]:
    """As `loading.describe`, with `encoder_len` and `decoder_token_ids` besides."""
    described = loading.describe(model, source)
    lengths = {"encoder_len": described["context_len"], "decoder_token_ids": first_tokens(model)}
    return described | lengths


def first_tokens(model: Any) -> tuple[int, ...]:
    """What the decoder begins with: its start token, and the first token of all outputs if there is one.

    Raises:
        ModelLoadError: it has no start token.
    """
    start = _setting(model, "decoder_start_token_id")
    if start is None:
        raise ModelLoadError(f"{model.config.model_type!r} names no decoder_start_token_id")
    forced = _setting(model, "forced_bos_token_id")
    return (start,) if forced is None else (start, forced)


def _setting(model: Any, name: str) -> int | None:
    """From the generation config, else from the config."""
    found = (getattr(config, name, None) for config in (model.generation_config, model.config))
    return next((value for value in found if value is not None), None)


def self_check(model: Any) -> None:
    """As `loading.self_check`: two sequences with inputs of their own share the passes.

    Raises:
        ModelLoadError: it has no start token, or the logits differ.
    """
    first_tokens(model)
    attention.register()
    rng, most = np.random.default_rng(0), num_embeddings(model)
    one, other = (rng.integers(most, size=size).tolist() for size in _CHECK_INPUTS)
    tokens = rng.integers(most, size=_CHECK_TOKENS).tolist()
    decoded = torch.tensor([tokens], device=model.device)
    reference = [loading.own_logits(model, each, decoder_input_ids=decoded) for each in (one, other)]
    runner = EncoderDecoderRunner(model, num_pages=sum(_CHECK_INPUTS) + 2 * _CHECK_TOKENS, page_size=4)
    loading.check_logits(model, loading.packed_logits(runner, tokens, (one, other)), torch.cat(reference))


class EncoderDecoderRunner(ModelRunner):
    """As `ModelRunner`; first tokens of a sequence are its encoder's input (`SequenceCache.encoder_len`)."""

    def __init__(
        self, model: Any, *, num_pages: int | Callable[[int, int], int], page_size: int = 16
    ) -> None:
        self._positions: Tensor | None = None  # of the pass that runs
        self._cache_name = recurrent.cache_name(model.forward)
        for module in model.get_decoder().modules():
            if getattr(module, "has_relative_attention_bias", False):
                self._bias_by_distance(module)
            elif (
                isinstance(module, nn.Embedding)
                and "position_ids" in inspect.signature(module.forward).parameters
            ):
                module.register_forward_pre_hook(self._with_positions, with_kwargs=True)
        super().__init__(model, num_pages=num_pages, page_size=page_size)
        self.attention_path = "views"
        self._cross = {module: self._layers[own] for module, own in self._cross_of.items()}

    @torch.inference_mode()
    def _probe(self) -> DecoderProbe:
        probe, row = DecoderProbe(), np.zeros(1, dtype=np.int64)
        with loading.errors_naming("the model cannot be served"):
            states = self._encoded(np.zeros(2, dtype=np.int64), [2])
            token = to_device(row, self.device)
            logits = self._decoded(token, token, probe, states)
        self.vocab_size = int(logits.shape[-1])
        probe.check(self.model.config)
        self._cross_of = probe.cross
        return probe

    def _run_packed(self, batch: Batch) -> Tensor:
        inputs = batch.inputs or EncoderInputs(batch.slots[:0], (), batch.slots[:0])
        packed = DecoderBatch(
            to_device(batch.slots, self.device),
            batch.segments,
            self._layers,
            self.pool.page_size,
            uses_tables=False,
            cross=self._cross,
            input_slots=to_device(inputs.slots, self.device),
        )
        states = self._encoded(inputs.token_ids, inputs.lens)
        token_ids, positions, rows = self._inputs(batch)
        logits = self._decoded(token_ids, positions, packed, states)
        return logits if rows is None else logits[rows]

    def _encoded(self, token_ids: IntArray, lens: Sequence[int]) -> Tensor:
        """The encoder's states [1, num_tokens, hidden_size] of inputs that are given one after another."""
        if not lens:
            return torch.empty(1, 0, self.model.config.hidden_size, device=self.device)
        encoder, inputs = self.model.get_encoder(), np.split(token_ids, np.cumsum(lens)[:-1])
        with attention.running(EncoderPass()):
            ids = [to_device(each, self.device)[None] for each in inputs]
            return torch.cat([encoder(input_ids=each).last_hidden_state for each in ids], dim=1)

    def _decoded(
        self, token_ids: Tensor, positions: Tensor, packed: attention.Attend, states: Tensor
    ) -> Tensor:
        """Logits [num_tokens, vocab_size] of a packed row of decoder tokens, in the model's dtype.

        Args:
            token_ids, positions: int64 [num_tokens].
            states: of the inputs whose keys and values the cross-attentions are to compute.
        """
        known = {} if states.shape[1] else {self._cache_name: _Known(token_ids.new_empty(1, 1, 0, 1))}
        self._positions = positions
        try:
            with attention.running(packed):
                output = self.model(
                    encoder_outputs=(states,),
                    decoder_input_ids=token_ids[None],
                    use_cache=False,
                    **known,
                )
        finally:
            self._positions = None
        logits: Tensor = output.logits[0]
        return logits

    def _with_positions(self, _: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
        if self._positions is None:
            return None
        return args, keywords | {"position_ids": self._positions}

    def _bias_by_distance(self, module: Any) -> None:
        """In passes, T5's layers hand on the bias by distance: `Scoring.bias`."""
        own = module.compute_bias
        with torch.inference_mode():
            # From the farthest distance that has an entry of its own down to 0, the query's own key.
            num = module.relative_attention_max_distance + 1
            table = own(1, num, past_seen_tokens=num - 1)[0, :, 0].flip(-1).contiguous()

        def compute_bias(*args: Any, **keywords: Any) -> Tensor:
            found: Tensor = own(*args, **keywords) if self._positions is None else table
            return found

        module.compute_bias = compute_bias


class _Known(EncoderDecoderCache):  # type: ignore[misc]
    """What transformers takes for its cache in a pass without new inputs: cross-attentions compute no keys,
    and those of self-attentions pass through, to be kept by `DecoderBatch`."""

    def __init__(self, nothing: Tensor) -> None:
        """Cross-attentions are given `nothing`, [1, 1, 0, 1], instead of keys and values."""
        layer = SimpleNamespace(keys=nothing, values=nothing)
        passing = SimpleNamespace(
            layers=_Same(layer),
            update=lambda keys, values, *_, **__: (keys, values),
            get_seq_length=lambda *_: 0,
            is_sliding=(),
            is_linear=(),
            is_dummy=(),
        )
        self.self_attention_cache = self.cross_attention_cache = passing
        self.is_updated = _Same(True)


class _Same:
    """The same thing for every layer."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __getitem__(self, index: int) -> Any:
        return self._thing

    def get(self, index: int) -> Any:
        return self._thing
