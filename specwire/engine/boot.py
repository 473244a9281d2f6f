"""From a config to a running engine: start-up and stream handling that draft and verify service share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specwire import embedded
from specwire.config.models import EMBEDDED, EMULATED
from specwire.config.own_methods import DRAFT_MODEL
from specwire.config.preflight.memory import gigabytes
from specwire.config.services import DraftConfig, ModelServiceConfig
from specwire.core import SAMPLING_DEFAULTS, ModelInfo, SamplingParams
from specwire.engine import emulated
from specwire.engine.device import Decider, Runner, StepHook
from specwire.engine.grammars.compiler import Grammars, vocabulary
from specwire.engine.jobs import TokenSequence
from specwire.engine.loop import Engine
from specwire.engine.measuring import as_load, measure, measure_draft
from specwire.engine.model.fingerprint import weights_fingerprint
from specwire.engine.place import place
from specwire.engine.threads import ComputeThread, ThreadCount, known_cores
from specwire.errors import InvalidRequestError, ModelLoadError, ResourceExhaustedError
from specwire.rpc import process
from specwire.rpc.wire import model as wire
from specwire.rpc.wire import tokenizer_files
from specwire.rpc.wire.tokenizer_files import NO_FILES, TokenizerFiles
from specwire.telemetry.logs import NOTICE
from specwire.text.tokenizer import Tokenizer
from specwire.text.tokenizer import load as load_tokenizer
from specwire.v1 import common_pb2

log = logging.getLogger(__name__)

_RETRY_AFTER_MS = 1000
_NOT_APPLIED = (
    *("typical_p", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("sequence_bias", "num_beams", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id"),
)
"""Of a generation config, what else changes the output of `generate`."""


@dataclass(frozen=True, slots=True)
class ModelService:
    """A loaded model behind its engine."""

    engine: Engine
    runner: Runner
    info: ModelInfo
    max_sequences: int
    grammars: Grammars | None = None
    """None where outputs, or drafts, cannot be constrained."""
    files: TokenizerFiles = NO_FILES
    """Of a target's tokenizer."""

    @contextlib.contextmanager
    def opened(self, message: common_pb2.OpenSequence) -> Iterator[TokenSequence]:
        """A sequence that lives while the body runs."""
        if not message.HasField("sampling"):
            raise InvalidRequestError("sampling", "unset", "must be set for a sequence")
        params = wire.opened_params(message)
        encoder_len = self._checked_prompt(message.prompt_len)
        if message.vocab_limit < 0:
            raise InvalidRequestError("vocab_limit", message.vocab_limit, "must be at least 0")
        if message.timeout_ms < 0:
            raise InvalidRequestError("timeout_ms", message.timeout_ms, "must be at least 0")
        if self.engine.status().num_sequences >= self.max_sequences:
            raise ResourceExhaustedError(f"{self.max_sequences} sequences are open", _RETRY_AFTER_MS)
        sequence = self.engine.open(params, message.prompt_len, encoder_len, message.vocab_limit)
        try:
            if params.grammar is not None and self.grammars is not None:
                sequence.grammar = self.grammars.open(params.grammar)
            yield sequence
        finally:
            self.engine.close_sequence(sequence)
            if params.grammar is not None and self.grammars is not None and sequence.grammar is not None:
                self.grammars.close_stream(params.grammar)

    def _checked_prompt(self, prompt_len: int) -> int:
        """How many tokens of the prompt are the input of an encoder: none without one."""
        info, num_others = self.info, len(self.info.decoder_token_ids)
        least, most = 1 + num_others, num_others + info.encoder_len if info.has_encoder else info.context_len
        if not least <= prompt_len <= most:
            raise InvalidRequestError("prompt_len", prompt_len, f"must lie in [{least}, {most}]")
        return prompt_len - num_others if info.has_encoder else 0

    def close(self) -> None:
        """End the engine after the running step, then its runner."""
        self.engine.close()
        self.runner.close()
        if self.grammars is not None:
            self.grammars.close()

    def status(self) -> common_pb2.EngineStatus:
        """Counts now, for the handshake."""
        status, pool = self.engine.status(), self.runner.pool
        return common_pb2.EngineStatus(
            num_sequences=status.num_sequences,
            num_requests=status.num_requests,
            num_steps=status.num_steps,
            num_tokens=status.num_tokens,
            num_preemptions=status.num_preemptions,
            num_held_pages=pool.num_held_pages,
            num_free_pages=pool.num_free_pages,
            num_cached_pages=pool.num_cached_pages,
            num_hit_tokens=status.num_hit_tokens,
            page_size=pool.page_size,
            silent_ms=int(status.silent_s * 1e3),
        )

    @contextlib.asynccontextmanager
    async def watched(self, on_change: Callable[[bool], Awaitable[None]]) -> AsyncIterator[None]:
        """Watch for a hung device while the body runs; see `Watchdog.watch`."""
        watching = asyncio.create_task(self.engine.watchdog.watch(on_change))
        try:
            yield
        finally:
            watching.cancel()


def start(
    config: ModelServiceConfig,
    role: str,
    decider: Decider,
    *,
    vocab_size: int | None = None,
    hook: StepHook | None = None,
    target_tokenizer: Tokenizer | None = None,
) -> ModelService:
    """Load the model, check it, and start the engine.

    Args:
        vocab_size: token ids of requests are below it; None for the model's own.
        hook: loaded after the model, and called before each step.
        target_tokenizer: of a draft with another vocabulary.

    Raises:
        ModelLoadError: naming the flag, the model and the reason.
    """
    source = resolve(config.model, role)
    thread = ComputeThread(role)
    try:
        threads = thread.call(lambda: _threads(config, source))
        runner, description = thread.call(lambda: _make_runner(config, source))
    except ModelLoadError as error:
        names_flag = str(error).startswith("--")
        raise ModelLoadError(str(error) if names_flag else f"--model {error}") from error
    kv_bytes = getattr(runner, "kv_bytes_per_token", 0)
    if hook is not None:
        thread.call(lambda: hook.load(runner.vocab_size))
    description |= place(config, runner, threads.most)
    if config.least_pass_ms:
        emulated.pace(runner, config.least_pass_ms / 1e3)
    _limit_lengths(description, config, source, runner.pool.num_pages * config.page_len)
    description["trees"] = not (config.batch_invariant or runner.pool.keeps_states)
    tokenizer = None if source.startswith(EMULATED) else load_tokenizer(source)
    files = tokenizer_files.read(source) if role == "verify" and tokenizer else NO_FILES
    if role == "verify" and not source.startswith(EMULATED):
        description["sampling"] = _sampling_of(source)
    info = _model_info(config, source, description, tokenizer, files)
    _log_start(role, config, info, runner.pool.num_pages * config.page_len, kv_bytes)
    end_ids = info.eos_token_ids
    if target_tokenizer is not None:
        tokenizer, eos_id = target_tokenizer, target_tokenizer.eos_id
        end_ids = () if eos_id is None else (eos_id,)
    known = vocabulary(tokenizer, vocab_size or runner.vocab_size, end_ids)
    # Where a draft has a drafter of its own, or translates, a draft token is not what a pass costs.
    is_usual = hook is None and target_tokenizer is None
    is_measured = is_usual and not (source.startswith(EMULATED) or info.has_encoder)
    costs = thread.call(lambda: measure(runner)) if is_measured else None
    draft = _drafting(config, runner) if is_measured else None
    draft_costs = thread.call(lambda: measure_draft(draft)) if draft is not None else None
    engine = Engine(
        runner,
        decider,
        costs=costs if role == "verify" else None,  # a draft that knew them at once would prepare more
        draft_costs=draft_costs,
        max_num_tokens=config.max_num_tokens,
        max_prefill_tokens=config.max_prefill_tokens,
        context_len=info.longest_len,
        thread=thread,
        prefix_sharing=config.prefix_sharing,
        step_timeout_s=config.step_timeout_s,
        vocab_size=vocab_size,
        hook=hook,
        threads=threads,
        adapters=tuple(info.adapters),
    )
    runner.on_loss = engine.check_device
    load = as_load(costs, draft_costs) if costs else None
    info = dataclasses.replace(info, grammars=known is not None, costs=load)
    grammars = Grammars(known) if known else None
    return ModelService(engine, runner, info, config.max_sequences, grammars, files)


def _drafting(config: ModelServiceConfig, runner: Any) -> Any:
    """What drafts after a pass: a target's own draft model, or the device of a draft service, which decodes
    chains; None without."""
    if config.own.source == DRAFT_MODEL:
        return getattr(runner, "drafting", None)
    decodes = isinstance(config, DraftConfig) and not config.least_pass_ms
    return runner if decodes and getattr(runner, "can_decode", False) else None


def _log_start(
    role: str, config: ModelServiceConfig, info: ModelInfo, num_kv_tokens: int, kv_bytes: int
) -> None:
    """Say what is served; `kv_bytes` are of a token in the KV cache, 0 where that is not known."""
    size = f", {gigabytes(num_kv_tokens * kv_bytes)}" if kv_bytes else ""
    own = f"; drafts by its own {info.own_source}" if info.own_source else ""
    cache = f"KV cache of {num_kv_tokens} tokens{size}"
    log.log(NOTICE, "%s model %s on %s; %s%s", role, info.summary, config.device, cache, own)


def _sampling_of(source: str) -> dict[str, float]:
    """The parameters that the model's generation config asks for; says them, and what is not applied of it.

    Raises:
        ModelLoadError: one of them could not be asked for.
    """
    from specwire.engine.model.loading import generation_config  # imported already, for the model

    given = generation_config(model_directory(source))
    sampling = {
        name: given[name]
        for name, neutral in SAMPLING_DEFAULTS.items()
        if given.get(name) not in (None, neutral)
    }
    try:
        SamplingParams(**sampling)
    except InvalidRequestError as error:
        raise ModelLoadError(f"--model {source}: generation_config.json: {error}") from None
    ignored = {name: given[name] for name in _NOT_APPLIED if given.get(name) not in (None, False, 0, 1, [])}
    said = ", ".join(f"{name}={value}" for name, value in sampling.items())
    if said:
        log.log(NOTICE, "%s: generation_config.json: default over HTTP: %s", source, said)
    if ignored:
        said = ", ".join(f"{name}={value}" for name, value in ignored.items())
        log.log(NOTICE, "%s: generation_config.json: not applied: %s", source, said)
    return sampling


def _limit_lengths(
    description: dict[str, Any], config: ModelServiceConfig, source: str, num_slots: int
) -> None:
    """To `max_model_len`, and to what the cache can hold; of an encoder-decoder, input and output together.

    A longer sequence is over the context: refused at once, not when it gets that long.
    """
    most = description["context_len"]
    if config.max_model_len > most:
        raise ModelLoadError(f"--max-model-len {config.max_model_len}: {source} has a context of {most}")
    if encoder_len := description.get("encoder_len", 0):
        description["encoder_len"] = encoder_len = min(encoder_len, num_slots // 2)
    description["context_len"] = min(config.max_model_len or most, num_slots - encoder_len)


def _threads(config: ModelServiceConfig, source: str) -> ThreadCount:
    """Of the calling thread's passes. Rounding depends on their number: it stays where tokens are to be the
    same in any batch."""
    if source.startswith(EMULATED):  # waking sleeping worker threads to sample would take milliseconds
        return ThreadCount(1, torch.set_num_threads, is_fixed=True, cores=())
    is_fixed = bool(config.num_threads or "OMP_NUM_THREADS" in os.environ or config.batch_invariant)
    most = config.num_threads or torch.get_num_threads()
    cores = known_cores() if config.device == "cpu" else ()  # passes elsewhere need none to themselves
    return ThreadCount(most, torch.set_num_threads, is_fixed=is_fixed, cores=cores)


def _make_runner(config: ModelServiceConfig, source: str) -> tuple[Runner, dict[str, Any]]:
    if source.startswith(EMULATED):
        model = emulated.EmulatedModel.parse(source)
        if config.fills_memory:
            flag = "--kv-cache-memory" if config.kv_cache_memory else "--gpu-memory-utilization"
            raise ModelLoadError(f"{source}: has no memory for {flag} to be a fraction of")
        pages = {"num_pages": config.num_pages, "page_size": config.page_len}
        return emulated.EmulatedRunner(model, **pages), model.describe()
    with process.importing():
        from specwire.engine import models  # takes seconds to import, and emulated devices do not need it

    return models.make_runner(config, source)


def resolve(model: str, role: str) -> str:
    """Where the model is loaded from."""
    if model != EMBEDDED:
        return model
    return str(embedded.DRAFT_DIR if role == "draft" else embedded.TARGET_DIR)


def _model_info(
    config: ModelServiceConfig,
    source: str,
    description: dict[str, object],
    tokenizer: Tokenizer | None,
    files: TokenizerFiles,
) -> ModelInfo:
    name = config.model
    is_emulated = source.startswith(EMULATED)
    return ModelInfo(
        name=Path(name).name if Path(name).exists() else name,
        tokenizer_fingerprint=tokenizer.fingerprint if tokenizer else "",
        tokenizer_source=name if tokenizer else "",
        tokenizer_hash=files.hash,
        tokenizer_bytes=len(files.data),
        incarnation=uuid.uuid4().hex[:12],
        batch_invariant=config.batch_invariant or is_emulated,
        drafts=config.own.source != "",
        own_source=config.own.source,
        least_pass_ms=config.least_pass_ms,
        num_ranks=config.tensor_parallel_size if config.tensor_parallel_size > 1 else 0,
        weights_fingerprint="" if is_emulated else weights_fingerprint(model_directory(source)),
        **description,  # type: ignore[arg-type]
    )


def model_directory(source: str) -> Path:
    """The directory with the files of a loaded model."""
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils import cached_file

    return Path(str(cached_file(source, "config.json", local_files_only=True))).parent
