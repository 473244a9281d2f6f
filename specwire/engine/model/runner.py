"""One packed forward pass for transformers causal language models.

`ModelRunner.forward` takes the new tokens of any number of sequences, prefill and verify alike, and returns
the logits of the wanted rows. It is independent of the model's architecture: a warm-up pass of one token
shows which layers attend, and with what shapes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specwire.config.blocks import Block
from specwire.config.preflight import models
from specwire.core import Rule, SamplingParams
from specwire.engine import chosen
from specwire.engine.attention import paged as attention
from specwire.engine.attention.paged import PackedBatch
from specwire.engine.attention.probe import RECURRENT_TYPES, Probe
from specwire.engine.batch import Batch, Feed, Packer
from specwire.engine.cache.kv_cache import PagePool, SequenceCache
from specwire.engine.device import Decide, DraftQuery, DraftShape, Runner
from specwire.engine.layers.blocks import Blocks
from specwire.engine.model import lora, recurrent, tokenwise
from specwire.engine.model.chains import ChainSteps, Choice
from specwire.engine.model.compiled import CompiledLayers, join_projections
from specwire.engine.model.direct import DirectPass, can_run
from specwire.engine.model.graphs import INVARIANT_TOKENS, Buckets, PaddedSteps, StepInputs, TabledBatch
from specwire.engine.model.recurrent import Recurrence
from specwire.engine.model.tokenwise import TOKENWISE_TOKENS, TokenwiseBatch
from specwire.engine.private import end_compilers
from specwire.engine.progress import LEAST_LIMIT_S
from specwire.errors import ModelLoadError, UnsupportedError
from specwire.rule.captured import CudaReplay, Replay
from specwire.rule.columns import Encoded
from specwire.rule.transfer import to_device
from specwire.support import IntArray

log = logging.getLogger(__name__)

_UNEVEN_S = 10.0
"""Of a pass whose size does not tell its cost: to capture a graph of a large model takes so long, after two
eager passes; a recurrent model takes 100 times as long for two tokens of a sequence as for one."""

_REPLAY_TOLERANCE, _DIRECT_TOLERANCE = 0.1, 1e-3
"""In half precision, kernels for different sizes round differently; a defect differs by about 1."""


class ModelRunner(Runner):
    """A model with a paged KV cache.

    Args:
        model: a transformers causal language model; it is switched to the engine's attention.
        num_pages: of the KV cache, allocated here; or a function that returns it, given the bytes of a page,
            and those of a state of the recurrent layers.
        page_size: tokens per page.
        replay: pad steps to a few sizes and capture them in this way; None runs each step as it is.
        batch_invariant: pad all steps to one size, so that a row of logits is bitwise independent of the
            other rows, and of whether it was decoded, verified or prefilled. A CPU needs no replay.
        compiles: have torch's compiler fuse the layers when warming up.

    Raises:
        ModelLoadError: the model's attention cannot be served by the engine.

    Attributes:
        vocab_size: width of the logits.
        num_embeddings: token ids that the model can read.
        context_len: maximum tokens of one sequence; None when the model names no limit.
        drafting: the runner of a draft model beside this one; None without any.
        draft_shape: of what drafts on this device; only subclasses have it.
        attention_path: `views` on a CPU, else as in `Probe.attention_path`.
        kv_bytes_per_token: memory of a cached token in all layers.
        state_bytes: memory of a state of all recurrent layers; 0 without any.
    """

    drafting: Any = None
    _has_previous = False
    """Whether padded passes know the slot of the token before each."""
    draft_shape: DraftShape | None = None

    def __init__(
        self,
        model: Any,
        *,
        num_pages: int | Callable[[int, int], int],
        page_size: int = 16,
        replay: Replay | None = None,
        batch_invariant: bool = False,
        compiles: bool = False,
    ) -> None:
        self.model = model.eval()
        self.device: torch.device = model.device
        self.context_len = context_length(model.config)
        self.num_embeddings = num_embeddings(model)
        self._batch_invariant = batch_invariant
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        attention.register()
        if model.config._attn_implementation != attention.ATTENTION_NAME:
            model.set_attn_implementation(attention.ATTENTION_NAME)
        self._num_recurrent = recurrent.wrap(model)
        if self._num_recurrent:  # what they run depends on the sequences, not on sizes alone
            replay, compiles = None, False
        probe = self._probe()
        self.kv_bytes_per_token = sum(each.key.nbytes + each.value.nbytes for each in probe.shapes.values())
        if callable(num_pages):
            num_pages = num_pages(self.kv_bytes_per_token * page_size, self.state_bytes)
        self.pool = PagePool(num_pages, page_size)
        self.pool.keeps_states = self._num_recurrent > 0
        is_uneven = isinstance(replay, CudaReplay) or self.pool.keeps_states
        self.longest_pause_s = _UNEVEN_S if is_uneven else LEAST_LIMIT_S
        self._packer = Packer(
            self.pool, self.num_embeddings, self.context_len, batch_invariant=batch_invariant
        )
        self.attention_path = (
            probe.attention_path(page_size) if replay or self.device.type == "cuda" else "views"
        )
        has_scratch = replay is not None or batch_invariant
        num_slots = (num_pages + has_scratch) * page_size  # the last page is scratch
        self._layers = {module: shape.allocate(num_slots) for module, shape in probe.shapes.items()}
        self._replay, self._compiles = replay, compiles
        self._padded: PaddedSteps | None = None
        self._padded_without: dict[tuple[Block, ...], PaddedSteps] = {}
        self._chains: ChainSteps | None = None
        if replay:
            self._padded = self._make_padded(replay, batch_invariant=batch_invariant)
            if not batch_invariant:
                self._chains = ChainSteps(self._padded, replay)
        self._direct: DirectPass | None = None
        if type(self) is ModelRunner and not (has_scratch or compiles) and can_run(model):
            scorings = {module: shape.scoring for module, shape in probe.shapes.items()}
            self._direct = DirectPass(model, scorings, min(num_slots, self.context_len or num_slots))
            self._try_direct()

    def _make_padded(self, replay: Replay, *, batch_invariant: bool = False) -> PaddedSteps:
        page_size, num_pages = self.pool.page_size, self.pool.num_pages
        most_tokens = min(self.context_len or num_pages * page_size, num_pages * page_size)
        buckets = Buckets(
            page_size,
            max_pages=-(-most_tokens // page_size),
            gathers=self.attention_path != "paged",
            batch_invariant=batch_invariant,
            has_previous=self._has_previous,
        )
        if batch_invariant and not buckets.allows(buckets.invariant):
            raise ModelLoadError(
                f"--batch-invariant with a context of {most_tokens} tokens needs paged attention, which this "
                f"torch does not have on {self.device}; lower --num-kv-tokens"
            )
        return PaddedSteps(self._run_padded, buckets, replay, self.device, num_pages * page_size)

    @torch.inference_mode()
    def warm(self) -> None:
        """Prepare for the steps of a single stream; without it the first ones take longer.

        Raises:
            ModelLoadError: batch invariance was requested, and does not hold.
        """
        if self._compiles:
            self._compile()
        if self._padded is not None:
            self._padded.warm()
            tokens = self._tried_tokens(9)
            with self.new_sequence() as cache:
                replayed = self.forward([Feed(cache, tokens, len(tokens))])
            error = relative_error(replayed, self._trial()[1:])
            if not error <= _REPLAY_TOLERANCE:
                what = "replayed steps differ by %.2g of the logits' spread: they are not replayed"
                log.warning(what, error)
                self.stop_replaying()
        adapters = range(lora.num_adapters(self.model) + 1) if self._batch_invariant else ()
        if not all(map(self._is_invariant, adapters)):
            raise ModelLoadError(
                "--batch-invariant: a token's logits depend on the tokens beside it, whatever the passes' "
                "size (experts, or kernels that are not deterministic)"
            )

    def _compile(self) -> None:
        """Join what is read together; compile the layers, unless that fails or changes what they compute."""
        expected = self._trial()
        join_projections([*self._layers])
        try:
            layers = CompiledLayers(self.model, [*self._layers])
        except ModelLoadError as error:
            log.info("layers are not compiled: %s", error)
            return
        try:
            difference = relative_error(self._trial(), expected)
            problem = f"logits differ by {difference:.2g} of their spread"
        except Exception as failure:
            difference = float("inf")
            problem = str(failure).strip().partition("\n")[0] or type(failure).__name__
        if not difference <= _REPLAY_TOLERANCE:
            layers.undo()
            log.warning("layers are not compiled: %s", problem)
        end_compilers()

    @torch.inference_mode()
    def _try_direct(self) -> None:
        """Passes of our own are kept where they come to what the model's own do."""
        difference = relative_error(self._trial(self._run_directly), self._trial())
        if not difference <= _DIRECT_TOLERANCE:
            self._direct = None
            log.warning("direct passes differ by %.2g of the logits' spread: they are not used", difference)

    def _trial(self, run: Callable[[Batch], Tensor] | None = None) -> Tensor:
        """Logits of some tokens in plain passes, or in others: of one token alone, and of some at once."""
        found, tokens = [], self._tried_tokens(9)
        with self.new_sequence() as cache:
            for some in (tokens[:1], tokens):
                cache.truncate(0)
                with self._packer.packed([Feed(cache, some, len(some))]) as batch:
                    found.append((run or self._run_packed)(batch).float())
        return torch.cat(found)[:, : self.vocab_size]

    def _tried_tokens(self, most: int, num_sequences: int = 1) -> IntArray:
        """Tokens from all over the vocabulary, as many as so many sequences have room for."""
        num_slots = self.pool.num_pages * self.pool.page_size
        num = min(most, self.context_len or most, self.num_embeddings, num_slots // num_sequences)
        return np.linspace(0, self.num_embeddings - 1, num).astype(np.int64)

    def _is_invariant(self, adapter: int) -> bool:
        """Whether tokens with an adapter have bitwise the same logits in one pass, in chunks, and beside some
        without one."""
        tokens = self._tried_tokens(2 * TOKENWISE_TOKENS, 4)
        num_tokens = len(tokens)
        with self.new_sequence() as whole:
            whole.adapter = adapter
            expected = self.forward([Feed(whole, tokens, num_tokens)])
        with self.new_sequence() as pieces, self.new_sequence() as other:
            pieces.adapter = adapter
            rows, start = [], 0
            for size in (num_tokens // 2, 1, num_tokens // 8, num_tokens):
                mine, theirs = tokens[start : start + size], tokens[::-1][start : start + size]
                if len(mine):
                    both = self.forward([Feed(other, theirs, 1), Feed(pieces, mine, len(mine))])
                    rows.append(both[1:])
                start += size
        return torch.equal(torch.cat(rows), expected)

    def stop_replaying(self) -> None:
        """Run steps eagerly from now on."""
        self._replay = self._chains = None
        for steps in (self._padded, *self._padded_without.values()):
            if steps is not None:
                steps.stop_replaying()

    @torch.inference_mode()
    def _probe(self) -> Probe:
        """Find the layers' shapes and the vocabulary size in a forward pass of one token."""
        recurrence, cache = None, PagePool(1, 1).new_sequence()
        if self._num_recurrent:
            recurrence = Recurrence(self.model, [cache], [0], [1])
        probe = Probe(recurrence)
        row = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            logits = self._logits(probe, row, row, None)
        except (UnsupportedError, ModelLoadError) as error:
            raise ModelLoadError(f"the model cannot be served: {error}") from error
        self.vocab_size = int(logits.shape[-1])
        probe.check(self.model.config)
        state: recurrent.State = {}
        if recurrence is not None:
            recurrence.keep()
            state = cache.states[-1][1]
        self.state_bytes = recurrent.num_bytes(state)
        types = getattr(self.model.config.get_text_config(decoder=True), "layer_types", None) or ()
        num_declared = sum(kind in RECURRENT_TYPES for kind in types)
        if not len(state) == self._num_recurrent == num_declared:
            problem = f"{len(state)} layers keep a state in transformers' cache, and not {num_declared}"
            raise ModelLoadError(f"{problem}, as the config declares")
        return probe

    @property
    def num_graphs(self) -> int:
        """Number of captured step sizes."""
        return len(self._padded.recorded) if self._padded is not None else 0

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        """Append each feed's tokens to its cache and compute the wanted logits.

        Returns:
            float32 [sum of num_rows, vocab_size], in the order of the feeds; an inference tensor.

        Raises: see `Packer.packed`; after any error all caches have the lengths they had before.
        """
        if not feeds:
            return torch.empty(0, self.vocab_size)
        with self._packer.packed(feeds) as batch:
            return self.compute(batch)

    @property
    def can_decode(self) -> bool:
        """Whether `decode` does anything: not on a CPU, where the host may as well choose each token."""
        return self._chains is not None and self._chains.can_run

    @torch.inference_mode()
    def decode(
        self, caches: Sequence[SequenceCache], logits: Tensor, choice: Choice
    ) -> tuple[Tensor, ...] | None:
        """Decode some tokens of each sequence, all on the device; all but the last are appended to its cache.

        Args:
            logits, choice: see `ChainSteps.run`; at least two steps.

        Returns:
            See there; None where it cannot be done so, and nothing was appended.

        Raises:
            ContextLengthError, ResourceExhaustedError: as `forward`.
        """
        if self._chains is None or any(cache.adapter for cache in caches):
            return None
        lengths = [cache.length for cache in caches]
        token_ids = [0] * (len(choice.columns[0]) - 1)
        with self._packer.packed([Feed(cache, token_ids, 0) for cache in caches]) as batch:
            self._copy(batch)
            found = self._chains.run(batch, logits, choice)
        if found is None:
            for cache, length in zip(caches, lengths, strict=True):
                cache.truncate(length)
        return found

    @torch.inference_mode()
    def warm_chains(self) -> None:
        """Capture the steps of a single stream's chains, so that its first ones need not wait for that."""
        if self._chains is None or self.context_len == 1:
            return
        logits = torch.zeros((1, self.vocab_size), device=self.device)
        for params in (
            SamplingParams(temperature=0),
            SamplingParams(rule=Rule.GUMBEL),
            SamplingParams(rule=Rule.REJECTION),
        ):
            encoded = Encoded.of(params, 0)
            kind = chosen.kind_of(encoded)
            assert kind is not None
            choice = chosen.choice(kind, [encoded], [1], [1], 2, logits)
            with self.new_sequence() as cache:
                self.decode([cache], logits, choice)

    @torch.inference_mode()
    def forward_without(self, left_out: Blocks, feeds: Sequence[Feed]) -> Tensor:
        """As `forward`, with some blocks left out: approximate logits, to draft with.

        Keys and values of layers whose attention is left out are not written, so what such a pass appends to
        a cache has to be dropped again, before a pass of the whole model.
        """
        with self._packer.packed(feeds) as batch:
            return self._compute_without(left_out, batch)

    def _compute_without(self, left_out: Blocks, batch: Batch) -> Tensor:
        self._copy(batch)
        logits, blocks = None, left_out.blocks
        with left_out.skipped():
            if self._padded is not None and self._replay is not None:  # in padded steps of its own
                if blocks not in self._padded_without:
                    self._padded_without[blocks] = self._make_padded(self._replay)
                logits = self._padded_without[blocks].run(batch)
            return self._run_packed(batch).float() if logits is None else logits

    def run(self, feeds: Sequence[Feed], question: Any, decide: Decide) -> Any:
        logits = self.forward(feeds)
        return None if question is None else decide(question, logits)

    @torch.inference_mode()
    def run_draft(self, feeds: Sequence[Feed], query: DraftQuery, question: Any, decide: Decide) -> Any:
        """One pass of the draft: the answer, of float32 logits [num_nodes, the target's vocabulary], which
        are -inf for tokens that are never drafted.

        Args:
            feeds: what it appends to caches, for the caller to drop again; none where nothing is.

        Raises:
            ResourceExhaustedError, ContextLengthError: there is no room; all caches have the lengths they had
                before.
        """
        if not feeds:
            return decide(question, self.draft(None, query))
        with self._packer.packed(feeds) as batch:
            return decide(question, self.draft(batch, query))

    def draft(self, batch: Batch | None, query: DraftQuery) -> Tensor:
        """The pass of the draft itself; logits as of `run_draft`."""
        raise NotImplementedError

    @torch.inference_mode()
    def compute(self, batch: Batch) -> Tensor:
        """The pass itself, without bookkeeping; float32 [len(batch.rows), vocab_size]."""
        self._copy(batch)
        if not self._batch_invariant:
            return self._run(batch)
        # In passes of one size.
        num_tokens = TOKENWISE_TOKENS if self._padded is None else INVARIANT_TOKENS
        return torch.cat([self._run(part) for part in batch.split(num_tokens)])

    def _copy(self, batch: Batch) -> None:
        """What is to be copied before the pass writes, in all layers."""
        if batch.copies is not None:
            src, dst = self._on_device(*batch.copies)
            for layer in self._layers.values():
                layer.copy(src, dst)

    def _run(self, batch: Batch) -> Tensor:
        """The pass in the one way of these that suits it: float32 [len(batch.rows), vocab_size]."""
        if self._padded is not None and (logits := self._padded.run(batch)) is not None:
            return logits
        if self._batch_invariant:
            return self._run_tokenwise(batch).float()
        if self._direct is not None and batch.adapters is None:
            return self._run_directly(batch).float()
        return self._run_packed(batch).float()

    def _run_packed(self, batch: Batch) -> Tensor:
        """The plain way, a batch as it is: logits [len(batch.rows), vocab_size] in the model's dtype."""
        packed = self._packed(batch, PackedBatch)
        if batch.caches:
            each = batch.segments
            starts, num_query = [one.first_query for one in each], [one.num_query for one in each]
            packed.recurrence = Recurrence(self.model, batch.caches, starts, num_query, packed.adapters)
        logits = self._logits(packed, *self._inputs(batch))
        if batch.caches:
            packed.recurrence.keep()
        return logits

    def _run_directly(self, batch: Batch) -> Tensor:
        """As `_run_packed`, without transformers' code."""
        assert self._direct is not None
        return self._direct.logits(self._packed(batch, PackedBatch), *self._inputs(batch))

    def _run_tokenwise(self, batch: Batch) -> Tensor:
        """On a CPU: one pass of `TOKENWISE_TOKENS` tokens, each attended in a call of its own."""
        row = tokenwise.padded(batch, self.pool.num_pages * self.pool.page_size)
        inputs = self._on_device(row.token_ids, row.positions, row.rows)
        return self._logits(self._packed(row, TokenwiseBatch), *inputs)[: len(batch.rows)]

    def _packed(self, batch: Batch, kind: type[PackedBatch]) -> PackedBatch:
        """What attends in a pass of a batch."""
        packed = kind(to_device(batch.slots, self.device), batch.segments, self._layers, self.pool.page_size)
        if batch.adapters is not None:
            packed.adapters = to_device(batch.adapters, self.device)
        return packed

    def _run_padded(self, inputs: StepInputs) -> Tensor:
        """Logits of a padded step; reads only device memory, so that it can be captured."""
        parts = inputs.on_device
        packed = TabledBatch(inputs, self._layers, self.pool.page_size)
        return self._logits(packed, parts.token_ids, parts.positions, parts.rows)

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Those of `_logits`."""
        token_ids, positions = self._on_device(batch.token_ids, batch.positions)
        are_all = len(batch.rows) == len(batch.token_ids)
        return token_ids, positions, None if are_all else to_device(batch.rows, self.device)

    def _on_device(self, *columns: IntArray) -> list[Tensor]:
        return [to_device(each, self.device) for each in columns]

    def _logits(
        self, packed: attention.Attend, token_ids: Tensor, positions: Tensor, rows: Tensor | None
    ) -> Tensor:
        """The model's own forward on one packed row: [number of rows, vocab_size] in the model's dtype.

        Args:
            token_ids, positions: int64 [num_tokens].
            rows: int64, indices of the tokens whose logits are wanted; None for all.
        """
        keywords: dict[str, Any] = {"logits_to_keep": rows} if rows is not None and self._keeps_rows else {}
        if (recurrence := getattr(packed, "recurrence", None)) is not None:
            keywords[recurrent.cache_name(self.model.forward)] = recurrence
        with attention.running(packed), lora.running(getattr(packed, "adapters", None)):
            output = self.model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **keywords
            )
        logits: Tensor = output.logits[0]
        return logits if rows is None or keywords else logits[rows]


def num_embeddings(model: Any) -> int:
    """Number of token ids that a model can read; its embedding may be a shard."""
    table = model.get_input_embeddings()
    return int(getattr(table, "num_embeddings", table.weight.shape[0]))


def relative_error(logits: Tensor, reference: Tensor) -> float:
    """Largest root mean square error of a row, relative to the standard deviation of the reference."""
    if logits.shape != reference.shape:
        return float("inf")
    spread = reference.std(dim=-1, correction=0).clamp_min(1e-9)
    error = (logits - reference).square().mean(dim=-1).sqrt() / spread
    return float(error.max())


def context_length(config: Any) -> int | None:
    """Maximum tokens of one sequence under a transformers config; None when it names no limit."""
    text = config.get_text_config(decoder=True)
    return models.context_len(lambda name: getattr(text, name, None))
