"""Layers that keep a state of the text instead of keys and values: linear attention, Mamba, convolutions.

A state cannot be cut back to an earlier token. So a sequence keeps a few, each with the number of tokens that
it is the state after, and one that is rolled back to a length between two of them runs the tokens after the
earlier one again (`SequenceCache.states`). A pass ends pieces of its tokens where a state is of use:

    sequence   ├── committed ─────────────────┤├─ draft ─┤
    states               |                    |          |
                         |                    |          if all draft tokens are accepted
                         |                    whatever is accepted
                         at the end of a page, for sequences that begin likewise

transformers' own code of a layer runs the pieces, as it continues from a cache. Pieces of equal length are
one batch.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from specwire.engine.cache.kv_cache import SequenceCache
from specwire.engine.model import lora
from specwire.errors import ModelLoadError

_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})
_CACHE_NAMES = ("cache", "cache_params", "past_key_values")

MOST_STATES = 3
"""Of a sequence, see `Recurrence.keep`."""

State = dict[int, Any]
"""By the layer's number, a `LinearAttentionLayer` of one sequence; never written once it is kept."""


@torch.inference_mode()
def wrap(model: Any) -> int:
    """Let passes with a `Recurrence` run the model's recurrent layers through it; may be repeated. Returns
    how many there are: modules whose code updates the states of a transformers cache.

    Raises:
        ModelLoadError: one takes or returns something else than a layer's states.
    """
    found = []
    for module in model.modules():
        functions = filter(inspect.isfunction, vars(type(module)).values())
        if any(_UPDATES & {*inspect.unwrap(each).__code__.co_names} for each in functions):
            found.append(module)
    if not found:
        return 0
    size = 8, 2, model.config.get_text_config(decoder=True).hidden_size
    hidden = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(model.device, model.dtype)
    for module in found:
        if "forward" not in module.__dict__:
            try:
                by_token = _drops_state(module.forward, module.layer_idx, hidden)
            except Exception as error:  # whatever the family's code raises
                what = f"{type(module).__name__} keeps a state, and is not called as recurrent layers are"
                raise ModelLoadError(what) from error
            module.forward = partial(_forward, module.forward, module.layer_idx, by_token)
    return len(found)


def cache_name(forward: Callable[..., Any]) -> str:
    """The keyword by which the forward of a model, or of a layer, takes a cache."""
    taken = inspect.signature(forward).parameters
    return next(name for name in _CACHE_NAMES if name in taken)


def _drops_state(own: Callable[..., Tensor], layer: int, hidden: Tensor) -> bool:
    """Whether a layer begins without its state when it is given several tokens, as the scan of some does:
    their output does not depend on it then. In half precision the self-check may not tell. `hidden` are
    inputs of some sequences, since a state may be forgotten at one token, and not at others."""
    cache = Cache(layers=[None] * layer + [LinearAttentionLayer()])
    name = cache_name(own)
    own(hidden[:, :1], **{name: cache})
    before, found = cache.layers[layer], []
    if before.recurrent_states[0] is None:
        return False
    for shift in (0, 64):
        cache.layers[layer] = _changed(before, lambda name, i: getattr(before, name)[i].clone())
        cache.layers[layer].recurrent_states[0].add_(shift)
        found.append(own(hidden, **{name: cache}))
    return torch.equal(*found)


def _forward(own: Callable[..., Tensor], layer: int, by_token: bool, *args: Any, **keywords: Any) -> Tensor:
    """A recurrent layer's forward; `own` is the model's."""
    name = next((name for name in _CACHE_NAMES if isinstance(keywords.get(name), Recurrence)), None)
    if name is None:
        return own(*args, **keywords)
    hidden = args[0] if args else keywords["hidden_states"]
    cache: Recurrence = keywords[name]
    return cache.run(lambda states: own(states, **{name: cache}), layer, hidden, by_token=by_token)


class _Piece(NamedTuple):
    """Tokens [start, end) of a sequence; the first is in `row` of the packed row."""

    sequence: int
    start: int
    end: int
    row: int


class Recurrence(Cache):  # type: ignore[misc]
    """The states of one pass, as the cache that transformers' layers read and update.

    Args:
        starts, num_query: tokens of each sequence before the pass, and in it.
        adapters: int64 [num_tokens], of the packed row, see `Batch`; None if no token has one.
    """

    def __init__(
        self,
        model: Any,
        caches: Sequence[SequenceCache],
        starts: Sequence[int],
        num_query: Sequence[int],
        adapters: Tensor | None = None,
    ) -> None:
        super().__init__(layers=[None] * model.config.get_text_config(decoder=True).num_hidden_layers)
        self._caches, self._starts, self._adapters = caches, starts, adapters
        self._states: list[dict[int, State]] = []
        batches: dict[tuple[int, int, bool], list[_Piece]] = defaultdict(list)
        row = 0
        for i, (cache, first, num) in enumerate(zip(caches, starts, num_query, strict=True)):
            self._states.append({first: cache.states[-1][1] if first else {}})
            ends = _ends(cache, first, first + num)
            for place, (start, end) in enumerate(itertools.pairwise([first, *ends])):
                batches[place, end - start, start > 0].append(_Piece(i, start, end, row))
                row += end - start
        self._batches = [
            (pieces, torch.tensor([[*range(p.row, p.row + length)] for p in pieces], device=model.device))
            for (_, length, _), pieces in sorted(batches.items(), key=lambda item: item[0])
        ]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **keywords: Any) -> Any:
        """Keys and values are written where attention is computed."""
        return key_states, value_states

    def run(self, own: Callable[[Tensor], Tensor], layer: int, hidden: Tensor, *, by_token: bool) -> Tensor:
        """One layer on the packed row, [1, num_tokens, size].

        Args:
            own: the layer itself, on sequences of equal length, [batch, num_tokens, size].
            by_token: it takes one token at a time after a state.
        """
        output = torch.empty_like(hidden)
        for pieces, rows in self._batches:
            before = [self._states[piece.sequence][piece.start].get(layer) for piece in pieces]
            self.layers[layer] = LinearAttentionLayer() if before[0] is None else _joined(before)
            length = 1 if by_token and before[0] is not None else rows.shape[1]
            parts = []
            for some in torch.split(rows, length, 1):  # [batch, num_tokens], with their adapters
                with lora.running(None if self._adapters is None else self._adapters[some.flatten()]):
                    parts.append(own(hidden[0, some]))
            output[0, rows] = torch.cat(parts, 1)
            for i, piece in enumerate(pieces):
                after = self._states[piece.sequence].setdefault(piece.end, {})
                after[layer] = _one_of(self.layers[layer], i)
        return output

    def keep(self) -> None:
        """Hand the states to their sequences: after the pass, and the last two after committed tokens only,
        of which the earlier one serves a sequence whose last committed token is run again."""
        for cache, start, found in zip(self._caches, self._starts, self._states, strict=True):
            states = [*cache.states, *((length, found[length]) for length in found if length != start)]
            settled = [state for state in states if state[0] <= cache.committed_len][-2:]
            cache.states = settled if states[-1] in settled else [*settled, states[-1]]


def _ends(cache: SequenceCache, first: int, last: int) -> list[int]:
    """Where the pieces of a sequence's tokens [first, last) end."""
    committed, size = cache.committed_len, cache.pool.page_size
    page_end = (min(committed, last + 1) - 1) // size * size  # the last one before the last committed token
    return sorted(end for end in {page_end, committed, last} if first < end <= last)


def num_bytes(state: State) -> int:
    return sum(
        tensor.nbytes
        for layer in state.values()
        for tensor in (*layer.conv_states.values(), *layer.recurrent_states.values())
        if tensor is not None
    )


def _joined(layers: Sequence[Any]) -> Any:
    """The states of some sequences as one batch; a copy, since layers write into what they are given."""
    return _changed(layers[0], lambda name, i: torch.cat([getattr(each, name)[i] for each in layers]))


def _one_of(batch: Any, index: int) -> Any:
    """The states of one sequence of a batch; a copy, so that the batch is freed."""
    return _changed(batch, lambda name, i: getattr(batch, name)[i][index : index + 1].clone())


def _changed(layer: Any, tensor: Callable[[str, int], Tensor]) -> Any:
    changed = copy.copy(layer)
    for name in ("conv_states", "recurrent_states"):
        states = {i: None if old is None else tensor(name, i) for i, old in getattr(layer, name).items()}
        setattr(changed, name, states)
    return changed
