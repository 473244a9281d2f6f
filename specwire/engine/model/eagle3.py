"""EAGLE-3: one layer that drafts from states of the target (Li et al. 2025, arXiv 2503.01840).

    f_p            fc(states of token p that enter some of the target's layers)
    x_p+1          layer(f_p, embedding of token p+1), which attends to its own keys at 1..p+1
    logits of p+2  lm_head(norm(x_p+1)), of the draft's vocabulary; target_id = d + d2t[d]
    x_p+2          layer(x_p+1, embedding of the draft token p+2), and so on

f_p and the layer's key at p follow from tokens 0..p, as the target's own keys do, so they lie in slot p of
the same pages; see `mtp`. With one layer keys need no attention: a pass of the target computes them, and
nothing else of the layer. Drafting runs the layer over draft tokens, which are appended to the cache and
dropped again.

Files are those of SafeAILab (a flat config of a Llama layer, `midlayer.`) and of speculators
(`transformer_layer_config`, `layers.0.`).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from specwire.engine.attention import paged as attention
from specwire.engine.attention.probe import LayerShape, Probe
from specwire.engine.batch import Batch
from specwire.engine.cache.layer_cache import LayerCache, Scoring
from specwire.engine.device import DraftQuery, DraftShape
from specwire.engine.model import loading
from specwire.engine.model.drafter import (
    KeepingRunner,
    NodeStates,
    bare_rows,
    check_drafts,
    read_tensors,
    target_ids,
)
from specwire.engine.model.mtp import without_first
from specwire.engine.model.packing import pack_linears
from specwire.engine.model.runner import num_embeddings
from specwire.errors import ModelLoadError

_CHECK_TOKENS = 10
_NUM_CHECKED = 3
"""Draft tokens of the check at loading."""
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LAYERS = {"llama": LlamaMLP, "qwen3": Qwen3MLP}
"""What the layer may be one of, with its MLP."""
READ = "eagle_aux_hidden_state_layer_ids"
_UNREAD = ("t2d",)
"""Tensors that follow from others."""


class Settings(NamedTuple):
    """What a config says.

    Attributes:
        layer: transformers' config of the layer.
        layer_ids: layers of the target whose inputs are read, in ascending order.
        norm_before_residual: the layer adds to the normalised state.
        norm_before_fc: one norm covers the states that are read; with `fc_norm` each has its own.
        norm_output: the next state is taken after the last norm.
    """

    layer: Any
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


def read_settings(config: Mapping[str, Any], target: Any) -> Settings:
    """Of either layout.

    Args:
        config: what its `config.json` says.
        target: transformers' config of the target's text model.

    Raises:
        ModelLoadError: it is no EAGLE-3, or not this target's.
    """
    is_flat = "transformer_layer_config" not in config
    inner = dict(config) if is_flat else config["transformer_layer_config"]
    others = config.get("eagle_config") or {}
    given = dict(config) | others
    kind = inner.get("model_type")
    if kind not in _LAYERS:
        raise ModelLoadError(f"its layer is of type {kind!r}, and not {' or '.join(_LAYERS)}")
    needs = ("draft_vocab_size",) if is_flat else ("draft_vocab_size", "norm_before_residual")
    if lacking := [name for name in needs if given.get(name) is None]:
        raise ModelLoadError(f"is no EAGLE-3: its config has no {', '.join(lacking)}")
    layer = CONFIG_MAPPING[kind].from_dict(dict(inner))
    num_layers = target.num_hidden_layers
    after = [number + 1 for number in others.get(READ) or ()]  # as SGLang and SpecForge count: outputs
    chosen = config.get(READ) or after or (2, num_layers // 2, num_layers - 3)
    found = Settings(
        layer,
        given["draft_vocab_size"],
        given.get("target_hidden_size") or layer.hidden_size,
        tuple(sorted(set(chosen))),
        *(bool(given.get(name)) for name in _NORMS),
    )
    _check(found, target)
    return found


def _check(settings: Settings, target: Any) -> None:
    layer, num_layers = settings.layer, target.num_hidden_layers
    if settings.target_hidden_size != target.hidden_size:
        raise ModelLoadError(
            f"is for states of {settings.target_hidden_size}, and the target has {target.hidden_size}"
        )
    if layer.vocab_size != target.vocab_size:
        raise ModelLoadError(
            f"is for a vocabulary of {layer.vocab_size}, and the target has {target.vocab_size}"
        )
    if outside := [number for number in settings.layer_ids if not 0 <= number < num_layers]:
        raise ModelLoadError(f"reads what enters layer {outside[0]}, and the target has {num_layers}")
    if layer.num_hidden_layers != 1:
        raise ModelLoadError(f"has {layer.num_hidden_layers} layers, and EAGLE-3 has one")
    kind = (layer.rope_parameters or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ModelLoadError(f"its rope_type {kind!r} changes with the length, which cached keys cannot")


class _Attention(nn.Module):
    """Reads an embedding and a state side by side.

    With transformers' own module a layer of 256 takes 443 us of a CPU instead of 405.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, num_heads, num_kv_heads = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        has_bias, self.head_dim = config.attention_bias, config.head_dim or size // num_heads
        self.q_proj = nn.Linear(2 * size, num_heads * self.head_dim, bias=has_bias)
        self.k_proj = nn.Linear(2 * size, num_kv_heads * self.head_dim, bias=has_bias)
        self.v_proj = nn.Linear(2 * size, num_kv_heads * self.head_dim, bias=has_bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, size, bias=has_bias)
        normed = config.model_type == "qwen3"
        self.q_norm, self.k_norm = (
            LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if normed else nn.Identity() for _ in range(2)
        )
        types = getattr(config, "layer_types", None) or ()
        window = config.sliding_window if "sliding_attention" in types else None
        self.scoring = Scoring(self.head_dim**-0.5, window)

    def keys(self, read: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [num_tokens, num_kv_heads, head_dim] of what is read, [num_tokens, 2 * size]."""
        return self._heads(self.k_proj, self.k_norm, read, rotary), self._heads(self.v_proj, None, read, None)

    def forward(self, read: Tensor, rotary: tuple[Tensor, Tensor], packed: attention.Attend) -> Tensor:
        """[num_tokens, size]."""
        query, (key, value) = self._heads(self.q_proj, self.q_norm, read, rotary), self.keys(read, rotary)
        found: Tensor = self.o_proj(packed.attend(self, query, key, value, self.scoring).flatten(1))
        return found

    def _heads(
        self, project: nn.Module, norm: nn.Module | None, read: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        found: Tensor = project(read).unflatten(-1, (-1, self.head_dim))
        if norm is not None:
            found = norm(found)
        return found if rotary is None else found * rotary[0] + rotate_half(found) * rotary[1]


class _Layer(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        config = settings.layer
        norm = functools.partial(LlamaRMSNorm, config.hidden_size, config.rms_norm_eps)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = norm(), norm(), norm()
        self.self_attn, self.mlp = _Attention(config), _LAYERS[config.model_type](config)
        self._adds_to_norm = settings.norm_before_residual

    def read(self, states: Tensor, embedded: Tensor) -> Tensor:
        """What attention reads, [num_tokens, 2 * size]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)

    def forward(
        self, states: Tensor, embedded: Tensor, rotary: tuple[Tensor, Tensor], packed: attention.Attend
    ) -> Tensor:
        """[num_tokens, size]."""
        read = self.read(states, embedded)
        before = read[:, embedded.shape[-1] :] if self._adds_to_norm else states
        between = before + self.self_attn(read, rotary, packed)
        found: Tensor = between + self.mlp(self.post_attention_layernorm(between))
        return found


class Eagle3(nn.Module):
    """The drafter. Its parameters have the names that they have in files, but for its layer.

    Args:
        has_embedding: embeddings are its own.

    Attributes:
        target_ids: int64 [draft_vocab_size], of its own ids.
        embedding: from token ids to rows of its own embedding or the target's, which ranks may share.
    """

    target_ids: Tensor
    embedding: Callable[[Tensor], Tensor]

    def __init__(self, settings: Settings, *, has_embedding: bool) -> None:
        super().__init__()
        self.settings, config = settings, settings.layer
        size, num_read = config.hidden_size, len(settings.layer_ids)
        norm = functools.partial(LlamaRMSNorm, eps=config.rms_norm_eps)
        read_size = settings.target_hidden_size
        self.fc = nn.Linear(num_read * read_size, size, bias=False)
        self.input_norm = norm(num_read * read_size) if settings.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(
            norm(read_size) if settings.fc_norm else nn.Identity() for _ in range(num_read)
        )
        self.layer, self.norm = _Layer(settings), norm(size)
        self.lm_head = nn.Linear(size, settings.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if has_embedding else None
        with torch.device("cpu"):  # the others are filled from a file
            self.rotary = LlamaRotaryEmbedding(config)

    def reduced(self, states: Sequence[Tensor]) -> Tensor:
        """[num_tokens, size], of the states that it reads, [num_tokens, target_hidden_size] of each layer."""
        dtype = self.norm.weight.dtype  # some targets keep their states in another one
        normed = [norm(each.to(dtype)) for norm, each in zip(self.fc_norm, states, strict=True)]
        found: Tensor = self.fc(self.input_norm(torch.cat(normed, dim=-1)))
        return found

    def keys(self, states: Tensor, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of the layer; arguments as of `forward`."""
        read = self.layer.read(states, self.embedding(token_ids))
        return self.layer.self_attn.keys(read, self._rotary(states, positions))

    def forward(
        self, states: Tensor, token_ids: Tensor, positions: Tensor, packed: attention.Attend
    ) -> Tensor:
        """[num_tokens, size], which logits and the next states are computed from.

        Args:
            states: [num_tokens, size] of the token before each one.
            token_ids, positions: int64 [num_tokens].
        """
        found: Tensor = self.layer(states, self.embedding(token_ids), self._rotary(states, positions), packed)
        return found

    def logits(self, found: Tensor) -> Tensor:
        """Float32 [num_tokens, draft_vocab_size], of what `forward` returns."""
        logits: Tensor = self.lm_head(self.norm(found))
        return logits.float()

    def following(self, found: Tensor) -> Tensor:
        """What the layer reads next, of what `forward` returned."""
        return self.norm(found) if self.settings.norm_output else found

    def _rotary(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, 1, head_dim] each. A state and the token after it have the position of the state."""
        cos, sin = self.rotary(states, positions[None] - 1)
        return cos[0][:, None], sin[0][:, None]


def load(source: str | os.PathLike[str], model: Any) -> Eagle3:
    """EAGLE-3 for a loaded model.

    Raises:
        ModelLoadError: it is none, it is another model's, or the engine does not compute what it does.
    """
    source = os.fspath(source)
    with loading.errors_naming(source):
        config = json.loads((Path(source) / "config.json").read_bytes())
        settings = read_settings(config, model.config.get_text_config(decoder=True))
        tensors = {  # with the layer's under one name
            name.removeprefix("model.").replace("midlayer.", "layer.").replace("layers.0.", "layer."): tensor
            for name, tensor in read_tensors(Path(source)).items()
            if name not in _UNREAD and not name.endswith("rotary_emb.inv_freq")
        }
        offsets = tensors.pop("d2t", None)
        own = "embed_tokens.weight" in tensors or settings.layer.hidden_size != settings.target_hidden_size
        with torch.device("meta"):
            drafter = Eagle3(settings, has_embedding=own)
        _fill(drafter, tensors, model.dtype)
        drafter = drafter.to(model.device).eval().requires_grad_(False)
        sizes = settings.draft_vocab_size, settings.layer.vocab_size
        drafter.target_ids = target_ids(*sizes, offsets, num_embeddings(model)).to(model.device)
        shared = drafter.embed_tokens or model.get_input_embeddings()
        drafter.embedding = bare_rows(shared)  # no parameter of its own
        pack_linears(drafter)
        self_check(model, drafter)
    return drafter


def _fill(drafter: Eagle3, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Take all parameters from a file; a ModelLoadError names one that it lacks, has besides, or in another
    shape."""
    wanted = drafter.state_dict()
    for problem, names in (
        ("lacks", wanted.keys() - tensors.keys()),
        ("has more than is known of EAGLE-3:", tensors.keys() - wanted.keys()),
    ):
        if names:
            raise ModelLoadError(f"{problem} {', '.join(sorted(names)[:3])}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"{[*tensor.shape]}, and not {[*wanted[name].shape]}"
            raise ModelLoadError(f"{name} is {shapes}")
    drafter.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)


def self_check(model: Any, drafter: Eagle3) -> None:
    tokens = loading.check_ids(model, _CHECK_TOKENS)
    runner = Eagle3Runner(model, drafter, num_pages=2 * len(tokens), page_size=4)
    before, chain = tokens[:-_NUM_CHECKED], tokens[-_NUM_CHECKED:]
    expected = functools.partial(_reference, model, drafter, tokens)
    check_drafts(model, runner, before, chain, expected, drafter.target_ids)


@torch.inference_mode()
def _reference(model: Any, drafter: Eagle3, tokens: Sequence[int]) -> Tensor:
    """Logits [_NUM_CHECKED, draft_vocab_size] after the last tokens, which are draft tokens but for the
    first: by passes over the whole text, without any cache."""
    with loading.eager(model):
        token_ids = torch.tensor(tokens, device=model.device)
        shown = model.get_decoder()(
            input_ids=token_ids[None, :-_NUM_CHECKED], use_cache=False, output_hidden_states=True
        ).hidden_states
    states = drafter.reduced([shown[number][0] for number in drafter.settings.layer_ids])
    found = []
    for _ in range(_NUM_CHECKED):
        positions = torch.arange(1, len(states) + 1, device=model.device)
        last = drafter(states, token_ids[positions], positions, _Whole())[-1:]
        found.append(drafter.logits(last))
        states = torch.cat([states, drafter.following(last)])
    return torch.cat(found)


class _Whole:
    """Attention of a row to itself."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        behind = torch.arange(len(query))[:, None] - torch.arange(len(query))
        sees = (behind >= 0) & (behind < (scoring.sliding_window or len(behind)))
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        found = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=sees.to(query.device), scale=scoring.scale, enable_gqa=True
        )
        return found[0].transpose(0, 1)


class Eagle3Runner(KeepingRunner):
    """As `ModelRunner`; fills the pages for EAGLE-3, and runs it."""

    _has_previous = True

    def __init__(self, model: Any, drafter: Eagle3, **pages: Any) -> None:
        self._drafter, self._nodes = drafter, NodeStates()
        self.draft_shape = DraftShape(drafter.settings.draft_vocab_size)
        super().__init__(model, drafter.settings.layer_ids, **pages)

    def _reduced(self) -> Tensor:
        return self._drafter.reduced([each[0] for each in self._taken()])

    @torch.inference_mode()
    def _probe(self) -> Probe:
        probe, own, states = super()._probe(), Probe(), self._reduced()
        token = torch.ones(1, dtype=torch.int64, device=self.device)
        self._drafter(states, token, token, own)
        known = LayerShape(states, states.new_empty(1, 0), 1, Scoring(1.0))
        probe.shapes |= own.shapes | {self._drafter: known}
        return probe

    @property
    def _known(self) -> LayerCache:
        """The states that the target has shown, as keys of one head; there are no values."""
        return self._layers[self._drafter]

    def _keep(self, slots: Tensor, before: Tensor | None, token_ids: Tensor, positions: Tensor) -> None:
        assert before is not None
        self._known.keys[slots, 0] = self._reduced()
        # No state comes before a first token, whose key is computed of another one and never read.
        key, value = self._drafter.keys(self._known.keys[before, 0], token_ids, positions)
        self._layers[self._drafter.layer.self_attn].write(slots, key, value)

    def draft(self, batch: Batch | None, query: DraftQuery) -> Tensor:
        assert batch is not None
        self._copy(batch)
        states = self._nodes.before(query)  # None where the target has computed them
        slots, before, token_ids, positions = self._on_device(
            batch.slots, batch.previous_slots(), batch.token_ids, batch.positions
        )
        given = self._known.keys[before, 0] if states is None else self._drafter.following(states)
        _, segments = without_first(batch, 1)
        packed = attention.PackedBatch(slots, segments, self._layers, self.pool.page_size, uses_tables=False)
        found = self._nodes.add(query, self._drafter(given, token_ids, positions, packed))
        return self._spread(self._drafter.logits(found), self._drafter.target_ids)
