"""What drafters of a target have in common: states of its layers and of draft tokens, files, and a check."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from specwire.engine.batch import Batch, Feed
from specwire.engine.cache.kv_cache import SequenceCache
from specwire.engine.device import DraftQuery
from specwire.engine.model import loading
from specwire.engine.model.graphs import StepInputs
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ModelLoadError
from specwire.rule.transfer import to_device


class NodeStates:
    """The states after the nodes of proposals, as long as these grow: [num_nodes, state_size]."""

    _states: Tensor

    def before(self, query: DraftQuery) -> Tensor | None:
        """Of each node's parent; None where proposals begin."""
        return None if query.is_first else self._states[to_device(query.rows, self._states.device)]

    def add(self, query: DraftQuery, found: Tensor) -> Tensor:
        """The states after the nodes, which are returned."""
        self._states = found if query.is_first else torch.cat([self._states, found])
        return found


class NotingRunner(ModelRunner):
    """As `ModelRunner`; notes what enters some of the target's layers.

    Args:
        layer_ids: of these, in the order in which states are wanted; the number of layers stands for what the
            last norm gives.
    """

    def __init__(self, model: Any, layer_ids: Collection[int], **pages: Any) -> None:
        self._layer_ids = layer_ids
        self._seen: dict[int, Tensor] = {}  # by layer, of the latest pass, [1, num_tokens, hidden_size]
        self._noted = [self._note(model.get_decoder(), number) for number in layer_ids]
        super().__init__(model, **pages)
        if self._padded is None:
            self.attention_path = "views"

    def close(self) -> None:
        """Leave the model as it was."""
        for each in self._noted:
            each.remove()

    def _note(self, decoder: Any, number: int) -> Any:
        """A hook that notes what enters a layer, or what the last norm gives."""

        def note_input(_: Any, args: Any, keywords: Any) -> None:
            self._seen[number] = args[0] if args else keywords["hidden_states"]

        def note_output(_: Any, __: Any, output: Any) -> None:
            self._seen[number] = output[0]

        if number == len(decoder.layers):
            return decoder.register_forward_hook(note_output)
        return decoder.layers[number].register_forward_pre_hook(note_input, with_kwargs=True)

    def _taken(self) -> list[Tensor]:
        """The states of the latest pass, [1, num_tokens, hidden_size] of each layer."""
        return [self._seen.pop(number) for number in self._layer_ids]

    def _spread(self, logits: Tensor, target_ids: Tensor) -> Tensor:
        """Logits of some of the target's tokens as float32 [n, vocab_size]; -inf for all others."""
        found = logits.new_full((len(logits), self.vocab_size), float("-inf"), dtype=torch.float32)
        return found.index_copy_(1, target_ids, logits.float())


class KeepingRunner(NotingRunner):
    """As `NotingRunner`; keeps what its drafter reads of a pass: a part of the pass, and recorded with it."""

    def _keep(self, slots: Tensor, before: Tensor | None, token_ids: Tensor, positions: Tensor) -> None:
        """Write to the pages what the drafter will read of the latest pass.

        Args:
            slots, before, token_ids, positions: int64 [num_tokens] on the device; `before` is the slot of the
                token before each, anything for a first one, and None unless passes know it.
        """
        raise NotImplementedError

    def _run_packed(self, batch: Batch) -> Tensor:
        logits = super()._run_packed(batch)
        slots, token_ids, positions = self._on_device(batch.slots, batch.token_ids, batch.positions)
        before = to_device(batch.previous_slots(), self.device) if self._has_previous else None
        self._keep(slots, before, token_ids, positions)
        return logits

    def _run_padded(self, inputs: StepInputs) -> Tensor:
        logits, parts = super()._run_padded(inputs), inputs.on_device
        self._keep(parts.slots, parts.previous, parts.token_ids, parts.positions)
        return logits


def chain_logits(runner: Any, cache: SequenceCache, token_ids: Iterable[int]) -> Iterator[Tensor]:
    """What drafts, along a chain: its logits after each token, float32 [1, vocab_size].

    Args:
        cache: what the first token follows; the chain, or the block that it is drafted in, is appended.

    Raises:
        ResourceExhaustedError, ContextLengthError: there is no room; the cache has the length it had before.
    """
    masks = runner.draft_shape.masks
    for depth, token_id in enumerate(token_ids):
        columns = (max(0, depth - 1), token_id, depth)
        query = DraftQuery(depth == 0, *(np.array([number], np.int64) for number in columns))
        feeds = [Feed(cache, [token_id, *masks])] if not (masks and depth) else ()
        yield runner.run_draft(feeds, query, None, lambda _, logits: logits)


def check_drafts(
    model: Any,
    runner: ModelRunner,
    before: Sequence[int],
    chain: Sequence[int],
    expected: Callable[[], Tensor],
    columns: slice | Tensor = slice(None),
) -> None:
    """Compare logits of drafts through the engine, after chunks and a rollback, with those of whole passes.

    Args:
        runner: closed in the end.
        before, chain: a text, and the tokens after it that are drafted after.
        expected: the logits after each of these, of these columns: tokens that are ever drafted.

    Raises:
        ModelLoadError: they differ.
    """
    first = len(before) // 2
    with runner.new_sequence() as cache:
        runner.forward([Feed(cache, [*before[:first], *before[first : first + 2][::-1]])])
        cache.truncate(first)
        runner.forward([Feed(cache, before[first:])])
        found = torch.cat([*chain_logits(runner, cache, chain)])
    runner.close()
    loading.check_logits(model, found[:, columns], expected())


def bare_rows(embedding: Any) -> Callable[[Tensor], Tensor]:
    """From token ids to rows of an embedding, without what a model's own class does to them."""
    plain = functools.partial(torch.nn.functional.embedding, weight=embedding.weight.detach())
    return getattr(embedding, "bare_rows", plain)  # of a rank, which has some of the rows


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory's files; a ModelLoadError if there are none."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    for path in () if found else sorted(directory.glob("pytorch_model*.bin")):
        found |= torch.load(path, map_location="cpu", weights_only=True)
    if not found:
        raise ModelLoadError("no *.safetensors and no pytorch_model*.bin in this directory")
    return found


def target_ids(num_drafted: int, vocab_size: int, offsets: Tensor | None, num_known: int) -> Tensor:
    """The target's id of each token that is drafted, int64 [num_drafted].

    Args:
        vocab_size: of the target, by the drafter's config.
        offsets: `d2t`, from the drafter's ids to the target's; None if its file has none.
        num_known: ids that the target can read.

    Raises:
        ModelLoadError: it does not lead to as many of these.
    """
    if offsets is None:
        if num_drafted != vocab_size:
            raise ModelLoadError(f"lacks d2t, for {num_drafted} of {vocab_size} tokens")
        offsets = torch.zeros(num_drafted, dtype=torch.int64)
    if offsets.shape != (num_drafted,):
        raise ModelLoadError(f"d2t is {[*offsets.shape]}, and not [{num_drafted}]")
    found = torch.arange(num_drafted) + offsets.to(torch.int64)
    if int(found.min()) < 0 or int(found.max()) >= num_known or len({*found.tolist()}) < num_drafted:
        raise ModelLoadError(f"d2t does not lead to {num_drafted} different ids of the target's {num_known}")
    return found
