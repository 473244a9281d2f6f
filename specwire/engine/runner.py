"""One packed forward pass for any transformers causal language model.

`ModelRunner.forward` takes the new tokens of any number of sequences, prefill and verify alike, and
returns the logits that were asked for. It knows nothing of a model's architecture: a warm-up pass of
one token shows which layers attend, and with what shapes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specwire.core import IntArray
from specwire.engine import attention
from specwire.engine.attention import PackedBatch
from specwire.engine.kv_cache import PageCopy, PagePool, SequenceCache
from specwire.engine.layer_cache import LayerCache, Scoring, Segment
from specwire.errors import ContextLengthError, InvalidRequestError, ModelLoadError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Feed:
    """What one sequence contributes to a forward pass.

    Attributes:
        cache: the sequence; the tokens go to positions `cache.length` and on.
        token_ids: at least one; a list or an int64 array.
        num_rows: logits are wanted after each of the last `num_rows` tokens; 0 only fills the cache.
    """

    cache: SequenceCache
    token_ids: Sequence[int] | IntArray
    num_rows: int = 1


class ModelRunner:
    """A model with a paged KV cache.

    Args:
        model: a transformers causal language model; it is switched to the engine's attention.
        num_pages: pages of the KV cache, allocated here; or what says it, given the bytes of a page.
        page_size: tokens a page.

    Raises:
        ModelLoadError: the model's attention cannot be served by the engine.

    Attributes:
        pool: the bookkeeping of the pages.
        vocab_size: width of the logits.
        context_len: most tokens of one sequence; None when the model does not say.
        kv_bytes_per_token: memory a cached token takes in all layers.
    """

    def __init__(self, model: Any, *, num_pages: int | Callable[[int], int], page_size: int = 16) -> None:
        self.model = model.eval()
        self.device: torch.device = model.device
        self.context_len = context_length(model.config)
        self._num_embeddings: int = model.get_input_embeddings().weight.shape[0]
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        attention.register()
        if model.config._attn_implementation != attention.ATTENTION_NAME:
            model.set_attn_implementation(attention.ATTENTION_NAME)
        probe = self._probe()
        self.kv_bytes_per_token = sum(shape.bytes_per_token for shape in probe.shapes.values())
        if callable(num_pages):
            num_pages = num_pages(self.kv_bytes_per_token * page_size)
        self.pool = PagePool(num_pages, page_size)
        num_slots = num_pages * page_size
        self._layers = {module: shape.allocate(num_slots) for module, shape in probe.shapes.items()}

    @torch.inference_mode()
    def _probe(self) -> _Probe:
        """Learn the layers' shapes and the vocabulary from a forward pass of one token."""
        probe = _Probe()
        row = np.zeros(1, dtype=np.int64)
        try:
            logits = self._call_model(row, row, probe, [0])
        except (UnsupportedError, ModelLoadError) as error:
            raise ModelLoadError(f"the model cannot be served: {error}") from error
        self.vocab_size = int(logits.shape[-1])
        probe.check(self.model.config)
        return probe

    def new_sequence(self) -> SequenceCache:
        """An empty sequence of this runner's cache; the caller releases it."""
        return self.pool.new_sequence()

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        """Append each feed's tokens to its cache and compute the logits asked for.

        Args:
            feeds: sequences of this runner, none of them twice.

        Returns:
            float32 [sum of num_rows, vocab_size], in the order of the feeds; an inference tensor.

        Raises:
            InvalidRequestError: an empty feed, a token outside the vocabulary, a sequence given twice.
            ContextLengthError: a sequence would outgrow the model's context.
            ResourceExhaustedError: the cache is full.
            After any error all caches have the lengths they had before.
        """
        tokens = [np.asarray(feed.token_ids, dtype=np.int64) for feed in feeds]
        self._check(feeds, tokens)
        if not feeds:
            return torch.empty(0, self.vocab_size)
        with self._unchanged_on_error(feeds):
            packed, positions = self._pack(feeds, tokens)
            rows = _wanted_rows(packed.segments, feeds)
            logits = self._call_model(np.concatenate(tokens), positions, packed, rows)
        return logits.float()

    def _check(self, feeds: Sequence[Feed], tokens: Sequence[IntArray]) -> None:
        for feed, token_ids in zip(feeds, tokens, strict=True):
            if token_ids.ndim != 1 or token_ids.size == 0:
                raise InvalidRequestError("token_ids", feed.token_ids, "must be a non-empty list of tokens")
            if token_ids.min() < 0 or token_ids.max() >= self._num_embeddings:
                raise InvalidRequestError(
                    "token_ids", feed.token_ids, f"must lie in [0, {self._num_embeddings})"
                )
            if not 0 <= feed.num_rows <= token_ids.size:
                raise InvalidRequestError("num_rows", feed.num_rows, f"must lie in [0, {token_ids.size}]")
            if feed.cache.pool is not self.pool:
                raise InvalidRequestError("cache", feed.cache, "belongs to another runner")
            new_len = feed.cache.length + token_ids.size
            if self.context_len is not None and new_len > self.context_len:
                raise ContextLengthError(
                    "token_ids", new_len, f"the model's context is {self.context_len} tokens"
                )
        if len({id(feed.cache) for feed in feeds}) != len(feeds):
            raise InvalidRequestError("feeds", len(feeds), "name one sequence twice")

    @contextmanager
    def _unchanged_on_error(self, feeds: Sequence[Feed]) -> Iterator[None]:
        lengths = [feed.cache.length for feed in feeds]
        try:
            yield
        except BaseException:
            for feed, length in zip(feeds, lengths, strict=True):
                feed.cache.truncate(length)
            raise

    def _pack(self, feeds: Sequence[Feed], tokens: Sequence[IntArray]) -> tuple[PackedBatch, IntArray]:
        """Reserve slots for all feeds; returns the batch and the positions int64 [num_tokens]."""
        slots, positions, segments, offset = [], [], [], 0
        for feed, token_ids in zip(feeds, tokens, strict=True):
            cache, num_query = feed.cache, token_ids.size
            appended = cache.append(num_query)
            if appended.copy is not None:
                # At once: should a later feed fail, this page already stands for the shared one.
                self._copy_page(appended.copy)
            slots.append(appended.slots)
            positions.append(np.arange(cache.length - num_query, cache.length))
            segments.append(Segment(offset, num_query, cache.length, cache.runs(), cache.pages))
            offset += num_query
        row_slots = attention.make_slots(slots, self.device)
        packed = PackedBatch(row_slots, segments, self._layers, self.pool.page_size)
        return packed, np.concatenate(positions)

    def _copy_page(self, copy: PageCopy) -> None:
        size = self.pool.page_size
        for layer in self._layers.values():
            layer.copy(copy.src_page * size, copy.dst_page * size, copy.num_tokens)

    def _call_model(
        self, token_ids: IntArray, positions: IntArray, packed: attention.Attend, rows: list[int]
    ) -> Tensor:
        """The model's own forward on one packed row; logits [len(rows), vocab_size] in its dtype."""
        keywords: dict[str, Any] = {}
        if self._keeps_rows and len(rows) != len(token_ids):
            keywords["logits_to_keep"] = torch.tensor(rows, dtype=torch.int64, device=self.device)
        output = self.model(
            input_ids=torch.from_numpy(token_ids)[None].to(self.device),
            position_ids=torch.from_numpy(positions)[None].to(self.device),
            use_cache=False,
            packed=packed,
            **keywords,
        )
        logits: Tensor = output.logits[0]
        return logits if logits.shape[0] == len(rows) else logits[rows]


def _wanted_rows(segments: Sequence[Segment], feeds: Sequence[Feed]) -> list[int]:
    """Indices in the packed row whose logits are wanted."""
    ends = [segment.query_offset + segment.num_query for segment in segments]
    return [row for end, feed in zip(ends, feeds, strict=True) for row in range(end - feed.num_rows, end)]


def context_length(config: Any) -> int | None:
    """Most tokens of one sequence under a transformers config, None when it names no limit.

    Rotary scalings that depend on the longest sequence seen would let one sequence of a batch change
    another and outdate cached keys; up to their original length they are constant, so that is the limit.
    """
    text = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
    limit = next((int(v) for n in names if isinstance(v := getattr(text, n, None), int)), None)
    for rope in _rope_settings(getattr(text, "rope_parameters", None)):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or limit
            limit = original if limit is None else min(limit, original or limit)
    return limit


def _rope_settings(parameters: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config, which hold one dict or one for each layer type."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [parameters]
    return [value for value in parameters.values() if isinstance(value, dict)]


@dataclass(frozen=True, slots=True)
class _LayerShape:
    """Shapes of one token's key and value in a layer, [num_kv_heads, dim] each, and the layer's window."""

    key: Tensor
    value: Tensor
    sliding_window: int | None

    @property
    def bytes_per_token(self) -> int:
        return self.key.nbytes + self.value.nbytes

    def allocate(self, num_slots: int) -> LayerCache:
        return LayerCache(
            self.key.new_zeros((num_slots, *self.key.shape)),
            self.value.new_zeros((num_slots, *self.value.shape)),
        )


class _Probe:
    """Stands in for a `PackedBatch` of one token and notes what each layer hands over."""

    def __init__(self) -> None:
        self.shapes: dict[nn.Module, _LayerShape] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See `attention.Attend`. A single token attends to itself, so its value is the result."""
        name = type(module).__name__
        if module in self.shapes:
            raise ModelLoadError(f"{name} attends twice in one pass, which the KV cache cannot tell apart")
        if getattr(module, "is_causal", True) is False:
            raise ModelLoadError(f"{name} looks ahead (is_causal is False)")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise ModelLoadError(f"{name} has {query.shape[1]} query and {key.shape[1]} key heads")
        self.shapes[module] = _LayerShape(key[0, :, 0], value[0, :, 0], scoring.sliding_window)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)

    def check(self, config: Any) -> None:
        """Refuse a model whose layers do not attend in the way that its config announces.

        Raises:
            ModelLoadError: naming the first difference.
        """
        text = config.get_text_config(decoder=True)
        if not self.shapes:
            raise ModelLoadError(
                f"no layer of {text.model_type!r} calls transformers' attention interface; "
                "recurrent models and models with attention of their own cannot be served"
            )
        windows = [shape.sliding_window for shape in self.shapes.values()]
        expected = getattr(text, "num_hidden_layers", len(windows))
        if len(windows) != expected:
            raise ModelLoadError(f"{len(windows)} of {expected} layers call the attention interface")
        _check_windows(text, windows)


def _check_windows(config: Any, windows: Sequence[int | None]) -> None:
    """A window that lives only in the model's mask would be lost: the layer must pass it on."""
    if getattr(config, "attention_chunk_size", None):
        raise ModelLoadError("chunked attention is not supported")
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        announced = getattr(config, "sliding_window", None)
        if announced and getattr(config, "use_sliding_window", True) and not any(windows):
            raise ModelLoadError(f"the sliding window of {announced} does not reach the attention layers")
        return
    for index, (layer_type, window) in enumerate(zip(layer_types, windows, strict=False)):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ModelLoadError(f"layer {index} is of type {layer_type!r}, which cannot be served")
        if (layer_type == "sliding_attention") != (window is not None):
            raise ModelLoadError(f"layer {index} is {layer_type!r} but its window is {window}")
