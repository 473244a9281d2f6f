"""vLLM's names for our metrics, so that what was built for its metrics reads ours (`--metrics-names vllm`).

Names, labels and units are those of vLLM's V1 engine. A metric without an equivalent keeps its own name.
vLLM's label `engine` numbers the engines of a process, of which a service has one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specwire.telemetry.metrics import Group, HistogramData, Metric, Reading, Source


def _finished(requests: Reading) -> Reading:
    """By (status, finish reason) to vLLM's reasons, which include those of requests that did not succeed."""
    assert isinstance(requests, Mapping)
    reasons = {"CANCELLED": "abort", "DEADLINE_EXCEEDED": "abort"}
    counts: Counter[tuple[str, ...]] = Counter()
    for (status, finish_reason), count in requests.items():
        reason = finish_reason or reasons.get(status, "error")
        counts[reason,] += count  # type: ignore[assignment,operator]
    return counts


def _succeeded(durations: Reading) -> Reading:
    """By (status), if it has labels, to those of requests that succeeded, which are all that vLLM counts."""
    return durations.get(("OK",), HistogramData(())) if isinstance(durations, Mapping) else durations


def _usage(pages: Reading) -> Reading:
    """Pages by state to the fraction of them that sequences hold, in [0, 1]."""
    assert isinstance(pages, Mapping)
    counts: Mapping[tuple[str, ...], Any] = pages
    return float(counts["held",] / sum(counts.values()))


@dataclass(frozen=True, slots=True)
class Equivalent:
    """What vLLM calls one of our metrics.

    Attributes:
        ours, theirs: names.
        convert: our reading to theirs, where labels or units differ.
        labels: names of their labels where they differ from ours.
    """

    ours: str
    theirs: str
    convert: Callable[[Reading], Reading] = lambda reading: reading
    labels: tuple[str, ...] | None = None

    def metric(self, ours: Metric[Source]) -> Metric[Source]:
        """Our metric under their name."""
        labels = ours.labels if self.labels is None else self.labels
        return dataclasses.replace(
            ours, name=self.theirs, read=lambda source: self.convert(ours.read(source)), labels=labels
        )


EQUIVALENTS = (
    Equivalent(
        "specwire_requests_total", "vllm:request_success_total", _finished, labels=("finished_reason",)
    ),
    Equivalent("specwire_requests_running", "vllm:num_requests_running"),
    Equivalent("specwire_requests_waiting", "vllm:num_requests_waiting"),
    Equivalent("specwire_request_wait_seconds", "vllm:request_queue_time_seconds"),
    Equivalent(
        "gen_ai_server_request_duration_seconds", "vllm:e2e_request_latency_seconds", _succeeded, labels=()
    ),
    Equivalent("gen_ai_server_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    Equivalent("gen_ai_server_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
    Equivalent("specwire_inter_token_seconds", "vllm:inter_token_latency_seconds"),
    Equivalent("specwire_prompt_tokens_total", "vllm:prompt_tokens_total"),
    Equivalent("specwire_prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    Equivalent("specwire_prefix_cache_hit_tokens_total", "vllm:prefix_cache_hits_total"),
    Equivalent("specwire_generation_tokens_total", "vllm:generation_tokens_total"),
    Equivalent("specwire_spec_decode_num_drafts_total", "vllm:spec_decode_num_drafts_total"),
    Equivalent("specwire_spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    Equivalent(
        "specwire_spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
    ),
    Equivalent(
        "specwire_spec_decode_num_accepted_tokens_per_pos_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ),
    Equivalent("specwire_verify_kv_usage", "vllm:kv_cache_usage_perc"),
    Equivalent("specwire_engine_preemptions_total", "vllm:num_preemptions_total"),
    Equivalent("specwire_engine_kv_pages", "vllm:kv_cache_usage_perc", _usage, labels=()),
)


def renamed(group: Group[Source]) -> Group[Source]:
    """The same metrics under vLLM's names, those that it has."""
    table: list[Metric[Source]] = []
    for metric in group.table:
        table += [each.metric(metric) for each in EQUIVALENTS if each.ours == metric.name] or [metric]
    return dataclasses.replace(group, table=table, fixed={**group.fixed, "engine": "0"})
