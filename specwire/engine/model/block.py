"""Drafts of a whole block in one pass, from states of the target (DFlash: Chen et al., arXiv 2602.06036).

    states of some of the target's layers at token p ──▶ keys of each of the drafter's layers, in slot p
    last token, mask, mask, ... ──▶ the drafter's layers, which see these keys and each other ──▶ drafts

Keys at p follow from tokens 0..p, as the target's own do, so they lie in the same pages; see `mtp`. They are
computed in every pass of the target. A block is appended to the cache, and dropped again by the caller.

The modules are transformers' own (`DFlashTokenCandidateGenerator` names what they read). Files that z-lab and
speculators publish are of the same modules under other names; speculators' have embeddings and an output
layer of their own, which may have some of the target's tokens only (`d2t`).
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, Qwen3Config
from transformers.cache_utils import DFlashCache

from specwire.engine.attention import paged as attention
from specwire.engine.attention import views
from specwire.engine.attention.probe import LayerShape, Probe
from specwire.engine.batch import Batch
from specwire.engine.cache.layer_cache import LayerCache, Scoring
from specwire.engine.device import DraftQuery, DraftShape
from specwire.engine.model import loading, recurrent
from specwire.engine.model.drafter import KeepingRunner, check_drafts, read_tensors, target_ids
from specwire.engine.model.packing import pack_linears
from specwire.engine.model.runner import num_embeddings
from specwire.errors import ModelLoadError
from specwire.rule.transfer import to_device
from specwire.support import IntArray

_CHECK_TOKENS = 10
_NEEDS = ("block_size", "mask_token_id", "target_layer_ids")
_NAMED, _BLOCK_SIZE, _FULL = "dflash_config", 16, "full_attention"
"""What a config of z-lab's has, the block that it means where it names none, and attention to all tokens."""
_KIND, _LAYERS, _READ = "speculators_model_type", "transformer_layer_config", "aux_hidden_state_layer_ids"
"""What a config of speculators has. It names layers by the states that enter them."""
_OWN = ("embed_tokens.weight", "lm_head.weight", "d2t")
_UNREAD = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of speculators' files beside those of the layers, and those that the target or others have too."""
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "hidden_act"),
)
"""What both configs say under the same names."""
_RENAMED = {r"^fc\.": "encoder.fc.", r"^hidden_norm\.": "encoder.output_norm_enc."}
"""Published names of tensors, and transformers'."""


class BlockDrafter(NamedTuple):
    """A block drafter of a target.

    Attributes:
        layers: transformers' module.
        embedding: from token ids to what the layers read.
        output: from their states to logits.
        target_ids: int64, the target's ids of the tokens that have logits; None where these are all of its.
        first: the place of a block with the first draft token's state: 1, or 0 that of the last token itself.
    """

    layers: Any
    embedding: Any
    output: Any
    target_ids: Tensor | None = None
    first: int = 1


def load(source: str | os.PathLike[str], model: Any) -> BlockDrafter:
    """A block drafter for a loaded model.

    Raises:
        ModelLoadError: it is none, it is another model's, or the engine does not compute what it does.
    """
    source = os.fspath(source)
    with loading.errors_naming(source):
        dtype, path = str(model.dtype).removeprefix("torch."), Path(source) / "config.json"
        given: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
        tensors: dict[str, Tensor] = {}
        if _NAMED in given or _KIND in given:
            config, tensors = published_config(given), read_tensors(Path(source))
            rest = {name: each for name, each in tensors.items() if name not in (*_OWN, *_UNREAD)}
            layers = loading.load_weights(
                None,
                dtype,
                kind=MuseGlimmerAssistantModel,
                config=config,
                state_dict=rest,
                key_mapping=_RENAMED,
            )
        else:
            layers = loading.load_weights(source, dtype, kind=AutoModel)
        layers = layers.to(model.device)
        _check(layers.config, model)
        if _KIND in given:
            drafter = _with_own(layers, tensors, given, model)
        else:
            output = model.get_output_embeddings()
            drafter = BlockDrafter(layers, _without_norm(model.get_input_embeddings()), output)
        if layers.config.block_size <= drafter.first:
            raise ModelLoadError(f"block_size {layers.config.block_size} leaves no room for a draft token")
        pack_linears(layers)
        self_check(model, drafter)
    return drafter


def _with_own(
    layers: Any, tensors: Mapping[str, Tensor], given: Mapping[str, Any], model: Any
) -> BlockDrafter:
    """With embeddings and output layer of its file, which is speculators'."""
    text, named = model.config.get_text_config(decoder=True), given[_LAYERS].get("vocab_size")
    if named != text.vocab_size:
        raise ModelLoadError(f"is for a vocabulary of {named}, and the target has {text.vocab_size}")
    if layers.config.target_layer_ids[-1] == text.num_hidden_layers - 1:
        raise ModelLoadError(f"{_READ} {text.num_hidden_layers}: no layer of the target reads these states")
    size = given.get("draft_vocab_size") or named
    shapes = {"embed_tokens.weight": (named, text.hidden_size), "lm_head.weight": (size, text.hidden_size)}
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelLoadError(f"lacks {name}")
        if tensors[name].shape != shape:
            raise ModelLoadError(f"{name} is {[*tensors[name].shape]}, and not {[*shape]}")
    ids = target_ids(size, named, tensors.get("d2t"), num_embeddings(model)).to(model.device)
    embed, project = (tensors[name].to(model.device, model.dtype) for name in shapes)
    embedding = functools.partial(nn.functional.embedding, weight=embed)
    output = functools.partial(nn.functional.linear, weight=project)
    return BlockDrafter(layers, embedding, output, ids, first=0 if given.get("sample_from_anchor") else 1)


def published_config(given: Mapping[str, Any]) -> MuseGlimmerAssistantConfig:
    """transformers' config of a drafter as z-lab publishes it, a config of Qwen3 with `dflash_config`, or as
    speculators does.

    Raises:
        ModelLoadError: it computes what transformers' modules do not.
    """
    is_speculators = _KIND in given
    named = _speculators_names(given) if is_speculators else _names(given)
    if lacking := [name for name, value in named.items() if value is None]:
        raise ModelLoadError(f"its config has no {', '.join(lacking)}")
    layers = given[_LAYERS] if is_speculators else {k: v for k, v in given.items() if k != _NAMED}
    inner: Any = Qwen3Config.from_dict(dict(layers))
    types = layers.get("layer_types") or [_FULL] * inner.num_hidden_layers
    if {*types} != {_FULL}:
        raise ModelLoadError(
            "layer_types: sliding layers of a block drafter see no later token, and would here"
        )
    if inner.attention_bias or given.get("is_causal"):
        raise ModelLoadError("attention_bias and is_causal are not supported in a block drafter")
    sizes = {name: getattr(inner, name) for name in _SIZES}
    return MuseGlimmerAssistantConfig(**sizes, **named, layer_types=types, dtype=given.get("dtype"))


def _names(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a config of z-lab's says of `_NEEDS`."""
    own = dict(given[_NAMED])
    named = {name: own.pop(name, given.get(name)) for name in _NEEDS}
    named["block_size"] = named["block_size"] or _BLOCK_SIZE
    if others := {name: value for name, value in own.items() if value is not None}:
        raise ModelLoadError(f"dflash_config: {', '.join(others)} is not supported")
    return named


def _speculators_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a config of speculators says of `_NEEDS`."""
    layers, read = given.get(_LAYERS) or {}, given.get(_READ)
    if given[_KIND] != "dflash" or not read:
        raise ModelLoadError(f"{_KIND} {given[_KIND]} with {_READ} {read} is no block drafter")
    if not layers:
        raise ModelLoadError(f"its config has no {_LAYERS}")
    if min(read) < 1:
        raise ModelLoadError(f"{_READ} {min(read)}: a block drafter reads what layers give, not embeddings")
    kind, width = layers.get("model_type", "qwen3"), given.get("target_hidden_size")
    if kind != "qwen3":
        raise ModelLoadError(f"its layers are of type {kind!r}, and not qwen3")
    if width not in (None, layers.get("hidden_size")):
        raise ModelLoadError(f"target_hidden_size {width} is not the hidden_size of its layers")
    # The states lie side by side from the first layer to the last.
    return {**{name: given.get(name) for name in _NEEDS}, "target_layer_ids": [i - 1 for i in sorted(read)]}


def _check(config: Any, model: Any) -> None:
    lacking = [name for name in _NEEDS if getattr(config, name, None) is None]
    if lacking:
        raise ModelLoadError(f"{config.model_type!r} is no block drafter: it has no {', '.join(lacking)}")
    text = model.config.get_text_config(decoder=True)
    if config.hidden_size != text.hidden_size:
        raise ModelLoadError(f"is for states of {config.hidden_size}, and the target has {text.hidden_size}")
    if max(config.target_layer_ids) >= text.num_hidden_layers:
        named, num = max(config.target_layer_ids), text.num_hidden_layers
        raise ModelLoadError(f"reads layer {named}, and the target has {num}")
    if config.mask_token_id >= num_embeddings(model):
        raise ModelLoadError(f"its mask is token {config.mask_token_id}, which the target cannot read")


def self_check(model: Any, drafter: BlockDrafter) -> None:
    """See `check_drafts`: against the drafter's own logits."""
    tokens = loading.check_ids(model, _CHECK_TOKENS)
    size = drafter.layers.config.block_size
    runner = BlockRunner(model, drafter, num_pages=len(tokens) + size, page_size=4)
    columns = slice(None) if drafter.target_ids is None else drafter.target_ids  # the others have no logits
    chain = tokens[-1:] * (size - drafter.first)  # a block is the same whatever follows its first token
    expected = functools.partial(_reference, model, drafter, runner, tokens, columns)
    check_drafts(model, runner, tokens[:-1], chain, expected, columns)


@torch.inference_mode()
def _reference(
    model: Any, drafter: BlockDrafter, runner: BlockRunner, tokens: Sequence[int], columns: slice | Tensor
) -> Tensor:
    """Logits [num_drafts, num_columns] after all tokens, as transformers computes them."""
    with loading.eager(model, drafter.layers):
        config, num_before = drafter.layers.config, len(tokens) - 1
        token_ids = torch.tensor([tokens], device=model.device)
        shown = model.get_decoder()(
            input_ids=token_ids[:, :-1], use_cache=False, output_hidden_states=True
        ).hidden_states
        cache = DFlashCache(config=config)
        cache.set_previous_accepted_tokens(num_before)
        states = drafter.layers(
            noise_embeds=runner.embedded(runner.block(tokens[-1:])),
            context_hidden_states=torch.cat([shown[i + 1] for i in config.target_layer_ids], dim=-1),
            position_ids=torch.arange(num_before + config.block_size, device=model.device)[None],
            **{recurrent.cache_name(drafter.layers.forward): cache},
        ).last_hidden_state
        return runner.logits(states[0, drafter.first :])[:, columns]


class BlockRunner(KeepingRunner):
    """As `ModelRunner`; fills the pages for a block drafter of the model, and runs it."""

    def __init__(self, model: Any, drafter: BlockDrafter, **pages: Any) -> None:
        self._drafter, config = drafter, drafter.layers.config
        self.state_size = config.hidden_size
        self._masks = (config.mask_token_id,) * (config.block_size - 1)
        self._drafted: Tensor  # of the latest blocks, [num_blocks, num_drafts, state_size]
        self._blocks: IntArray = np.empty(0, np.int64)  # of each node since these
        read = [number + 1 for number in config.target_layer_ids]  # its ids name layers by what they give
        super().__init__(model, read, **pages)
        num_drafted = self.vocab_size if drafter.target_ids is None else len(drafter.target_ids)
        num_drafts = len(self._masks) + 1 - drafter.first
        self.draft_shape = DraftShape(num_drafted, masks=self._masks, longest=num_drafts)

    @torch.inference_mode()
    def _probe(self) -> Probe:
        probe, own = super()._probe(), _Context(None, {})
        self._run_context(torch.zeros(1, dtype=torch.int64, device=self.device), own)
        probe.shapes |= own.shapes
        return probe

    def _keep(self, slots: Tensor, before: Tensor | None, token_ids: Tensor, positions: Tensor) -> None:
        self._run_context(positions, _Context(slots, self._layers))

    def _run_context(self, positions: Tensor, packed: attention.Attend) -> None:
        """Run the drafter over the states of the latest pass, and one token that nothing reads."""
        context = torch.cat(self._taken(), dim=-1)
        self._run_drafter(context.new_zeros(1, 1, self.state_size), context, positions, packed)

    def _run_drafter(
        self, embedded: Tensor, context: Tensor, positions: Tensor, packed: attention.Attend
    ) -> Tensor:
        """States [1, num_tokens, state_size] of tokens, whose keys come after those of the context.

        Args:
            positions: int64, of the context and the tokens, or of the context alone, where any serve for the
                tokens.
        """
        num_missing = context.shape[1] + embedded.shape[1] - len(positions)
        positions = torch.cat([positions, positions[:num_missing]])
        with attention.running(packed):
            states: Tensor = self._drafter.layers(
                noise_embeds=embedded, context_hidden_states=context, position_ids=positions[None]
            ).last_hidden_state
        return states

    def block(self, token_ids: Sequence[int]) -> list[int]:
        """Each token, and the masks of a block."""
        return [each for token_id in token_ids for each in (token_id, *self._masks)]

    def embedded(self, token_ids: Sequence[int]) -> Tensor:
        """[1, num_tokens, hidden_size], as the drafter reads tokens."""
        found: Tensor = self._drafter.embedding(to_device(np.array(token_ids, np.int64), self.device))[None]
        return found

    def draft(self, batch: Batch | None, query: DraftQuery) -> Tensor:
        """See `ModelRunner`: all blocks in one pass, before the first candidates."""
        if batch is not None:
            self._drafted = self._run_blocks(batch, query.token_ids.tolist())
            self._blocks = found = np.arange(len(query.rows))
        else:
            found = self._blocks[query.rows]
            self._blocks = np.concatenate([self._blocks, found])
        at = to_device(found, self.device), to_device(query.depths, self.device)
        return self.logits(self._drafted[at])

    def _run_blocks(self, batch: Batch, token_ids: Sequence[int]) -> Tensor:
        """The states of the draft tokens after these, [n, num_drafts, state_size]."""
        self._copy(batch)
        slots, positions = self._on_device(batch.slots, batch.positions)
        packed = _Block(slots, batch.segments, self._layers, self.pool.page_size, uses_tables=False)
        embedded = self.embedded(self.block(token_ids))
        context = embedded.new_zeros(1, 0, self.state_size * len(self._layer_ids))
        states = self._run_drafter(embedded, context, positions, packed)
        return states.view(len(token_ids), len(self._masks) + 1, -1)[:, self._drafter.first :]

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Float32 [n, vocab_size]; -inf for tokens that are never drafted, or that the target cannot read."""
        logits: Tensor = self._drafter.output(states.to(self.model.dtype)).float()
        if self._drafter.target_ids is not None:
            return self._spread(logits, self._drafter.target_ids)
        logits[:, self.num_embeddings :] = float("-inf")
        return logits


def _without_norm(embedding: Any) -> Any:
    """The drafter reads embeddings before the norm that some models have there."""
    if not hasattr(embedding, "embed_norm"):
        return embedding
    plain = copy.deepcopy(embedding)
    plain.embed_norm = nn.Identity()
    return plain


@dataclass
class _Context:
    """Keeps the keys of a context, in these slots (int64 [num_tokens]); nothing attends to them yet. Without
    slots it records shapes."""

    slots: Tensor | None
    layers: dict[nn.Module, LayerCache]
    shapes: dict[nn.Module, LayerShape] = field(default_factory=dict)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See `attention.Attend`; what the tokens after the context get is of no use."""
        if self.slots is None:
            self.shapes[module] = LayerShape(key[0], value[0], query.shape[1], scoring)
        else:
            num = len(self.slots)
            self.layers[module].write(self.slots, key[:num], value[:num])
        return query.new_zeros(*query.shape[:2], value.shape[2])


@dataclass
class _Block(attention.PackedBatch):
    """Blocks of several sequences: the tokens of each see one another and the sequence before them."""

    def _plan(self, layer: LayerCache, query: Tensor, scoring: Scoring) -> views.ReadPlan:
        window, group = scoring.sliding_window, query.shape[1] // layer.keys.shape[1]
        if (kind := (window, group, 0)) not in self._plans:
            self._plans[kind] = views.plan_blocks(self.segments, window, group, layer.keys)
        return self._plans[kind]
