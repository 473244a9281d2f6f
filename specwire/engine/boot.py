"""From a config to a running engine: what draft and verify service do alike at start and per stream."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from specwire import embedded, tracing, wire
from specwire.config import EMBEDDED, EMULATED, ModelServiceConfig
from specwire.core import ModelInfo
from specwire.engine import emulated
from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.loading import describe, load_model
from specwire.engine.loop import Consume, Engine, Runner
from specwire.engine.memory import free_bytes
from specwire.engine.runner import ModelRunner
from specwire.engine.thread import ComputeThread
from specwire.errors import InvalidRequestError, ModelLoadError, ResourceExhaustedError
from specwire.tokenizer import load as load_tokenizer
from specwire.v1 import common_pb2

_RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True)
class ModelService:
    """A loaded model behind its engine."""

    engine: Engine
    runner: Runner
    info: ModelInfo
    max_sequences: int

    @contextlib.contextmanager
    def opened(self, message: common_pb2.OpenSequence) -> Iterator[TokenSequence]:
        """A sequence that lives as long as its stream."""
        if not message.HasField("sampling"):
            raise InvalidRequestError("open", "unset", "the first request of a stream must open it")
        params = wire.opened_params(message)
        if message.prompt_len < 1:
            raise InvalidRequestError("prompt_len", message.prompt_len, "must be at least 1")
        if self.engine.status().num_sequences >= self.max_sequences:
            raise ResourceExhaustedError(f"{self.max_sequences} streams are open", _RETRY_AFTER_MS)
        sequence = self.engine.open(params, message.prompt_len)
        try:
            yield sequence
        finally:
            self.engine.close_sequence(sequence)

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
        )


def start(config: ModelServiceConfig, role: str, consume: Consume) -> ModelService:
    """Load the model, check it, and start the engine.

    Raises:
        ModelLoadError: naming the flag, the model and the reason.
    """
    disable_progress_bar()  # a service's standard error is a log
    source = _resolve(config.model, role)
    thread = ComputeThread(role)
    try:
        runner, description = thread.call(lambda: _make_runner(config, source))
    except ModelLoadError as error:
        raise ModelLoadError(f"--model {error}") from error
    # What the cache cannot hold even alone is over the context: refused at once, not when it gets there.
    description["context_len"] = min(description["context_len"], runner.pool.num_pages * config.page_size)
    info = _model_info(config.model, source, description)
    engine = Engine(
        runner,
        consume,
        max_num_tokens=config.max_num_tokens,
        max_prefill_tokens=config.max_prefill_tokens,
        context_len=info.context_len,
        thread=thread,
        prefix_sharing=config.prefix_sharing,
    )
    return ModelService(engine, runner, info, config.max_sequences)


def _make_runner(config: ModelServiceConfig, source: str) -> tuple[Runner, dict[str, Any]]:
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    if source.startswith(EMULATED):
        pretended = emulated.EmulatedModel.parse(source)
        if config.kv_cache_memory:
            raise ModelLoadError(f"{source}: has no memory for --kv-cache-memory to be a fraction of")
        runner = emulated.EmulatedRunner(pretended, num_pages=config.num_pages, page_size=config.page_size)
        return runner, pretended.describe()
    model = load_model(source, dtype=_dtype(config), device=config.device)
    num_pages: int | Callable[[int], int] = config.num_pages
    if config.kv_cache_memory:
        num_pages = functools.partial(_pages_in_memory, config, model.device)
    return ModelRunner(model, num_pages=num_pages, page_size=config.page_size), describe(model, source)


def _pages_in_memory(config: ModelServiceConfig, device: torch.device, page_bytes: int) -> int:
    """Pages in the fraction of the memory that is free now, with the model loaded."""
    num_bytes = int(free_bytes(device) * config.kv_cache_memory)
    if num_bytes < page_bytes:
        raise ModelLoadError(
            f"{config.model}: --kv-cache-memory {config.kv_cache_memory} is {num_bytes} bytes on {device}, "
            f"less than a page of {page_bytes}"
        )
    return num_bytes // page_bytes


def _dtype(config: ModelServiceConfig) -> str:
    """The embedded pair is stored in bfloat16 to be small, and computed in float32, faster on a CPU."""
    if config.model == EMBEDDED and config.dtype == "auto" and config.device == "cpu":
        return "float32"
    return config.dtype


def timings(job: Job) -> common_pb2.Timings:
    """What a finished job cost."""
    return common_pb2.Timings(queue_ns=job.queue_ns, forward_ns=job.forward_ns)


def record_spans(tracer: tracing.Tracing, name: str, job: Job, parent: str) -> None:
    """`<name>.queue` and `<name>.forward` under the caller's span."""
    tracer.record(f"{name}.queue", start_ns=job.arrived_ns, end_ns=job.started_ns, parent=parent)
    end_ns = job.finished_ns
    tracer.record(f"{name}.forward", start_ns=job.started_ns, end_ns=end_ns, parent=parent)


def _resolve(model: str, role: str) -> str:
    if model != EMBEDDED:
        return model
    return str(embedded.DRAFT_DIR if role == "draft" else embedded.TARGET_DIR)


def _model_info(name: str, source: str, description: dict[str, object]) -> ModelInfo:
    tokenizer = None if source.startswith(EMULATED) else load_tokenizer(source)
    return ModelInfo(
        name=Path(name).name if Path(name).exists() else name,
        tokenizer_fingerprint=tokenizer.fingerprint if tokenizer else "",
        tokenizer_source=name if tokenizer else "",
        incarnation=uuid.uuid4().hex[:12],
        **description,  # type: ignore[arg-type]
    )
