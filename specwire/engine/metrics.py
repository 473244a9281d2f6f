"""The metrics of draft and verify service, from the counts of their engines; a label names the service."""

from __future__ import annotations

from specwire.engine.boot import ModelService
from specwire.engine.counts import NUM_STEP_SIZES
from specwire.telemetry.metrics import Counter, Gauge, Group, Histogram, HistogramData, Labelled, Metric


def _step_sizes(service: ModelService) -> HistogramData:
    sizes, now = HistogramData([2**i for i in range(NUM_STEP_SIZES - 1)]), service.engine.status()
    sizes.counts, sizes.sum = now.step_sizes, now.step_sequences
    return sizes


def _pages(service: ModelService) -> Labelled:
    pool = service.runner.pool
    empty = pool.num_free_pages - pool.num_cached_pages
    return {("held",): pool.num_held_pages, ("cached",): pool.num_cached_pages, ("free",): empty}


TABLE: tuple[Metric[ModelService], ...] = (
    Gauge(
        "specwire_engine_streams",
        "Sequences whose stream is open.",
        lambda now: now.engine.status().num_sequences,
    ),
    Gauge(
        "specwire_engine_streams_limit",
        "Most streams that may be open (--max-sequences).",
        lambda now: now.max_sequences,
    ),
    Gauge(
        "specwire_engine_requests",
        "Requests that run or wait, work ahead included.",
        lambda now: now.engine.status().num_requests,
    ),
    Gauge(
        "specwire_engine_requests_waiting",
        "Requests that the last forward pass left waiting for a later one.",
        lambda now: now.engine.status().num_waiting,
    ),
    Counter(
        "specwire_engine_forward_seconds_total",
        "Time in forward passes, sampling included.",
        lambda now: now.engine.status().step_ns / 1e9,
    ),
    Histogram("specwire_engine_step_sequences", "Sequences in a forward pass: the batch size.", _step_sizes),
    Counter(
        "specwire_engine_tokens_total",
        "Tokens run through the model.",
        lambda now: now.engine.status().num_tokens,
    ),
    Counter(
        "specwire_engine_prefix_cache_hit_tokens_total",
        "Tokens found in the KV cache instead of being run.",
        lambda now: now.engine.status().num_hit_tokens,
    ),
    Counter(
        "specwire_engine_preemptions_total",
        "Sequences that lost their KV cache to another one, and ran their tokens again.",
        lambda now: now.engine.status().num_preemptions,
    ),
    Gauge(
        "specwire_engine_kv_pages",
        "Pages of the KV cache: held by sequences, cached (free, but known by their tokens), or free.",
        _pages,
        ("state",),
    ),
    Gauge(
        "specwire_engine_kv_pages_shared",
        "Of the held pages, those that more than one sequence holds.",
        lambda now: now.runner.pool.num_shared_pages,
    ),
    Gauge(
        "specwire_engine_kv_page_tokens", "Tokens that a page holds.", lambda now: now.runner.pool.page_size
    ),
)


def group(service: ModelService, role: str) -> Group[ModelService]:
    """The metrics of a running service, which is "draft" or "verify"."""
    return Group(TABLE, lambda: service, {"role": role, "model_name": service.info.name})
