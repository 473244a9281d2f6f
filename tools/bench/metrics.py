"""From records of requests to the figures of a serving benchmark. Pure: no clock, no network, no files.

Names and definitions are those of vLLM's serving benchmark (`vllm bench serve`,
https://github.com/vllm-project/vllm/blob/main/vllm/benchmarks/serve.py), so that results can be compared.
Latencies are in milliseconds, as the client sees them; only completed requests count.

    TTFT     from sending a request to its first chunk with tokens
    E2EL     from sending a request to the end of its answer
    TPOT     (E2EL - TTFT) / (output tokens - 1), one value a request. An output of one token has none; it is
             left out of the mean and the percentiles, and meets any objective. Tokens of the first chunk
             beyond its first count as decoded after it.
    ITL      between consecutive chunks of a request, pooled over all requests. A chunk has the tokens of a
             whole round, so this is the pause that a reader sees rather than the time of one token: about
             TPOT times the acceptance length. No zeros are added for the tokens within a chunk.
    goodput  completed requests that meet every objective, per second (DistServe: Zhong et al. 2024,
             arXiv 2401.09670)

Percentiles interpolate linearly between the two nearest values. Without any value they are None rather
than 0, which would look like a very fast server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from specwire.completion import SourceCounts, Speculation

PERCENTILES = (50, 90, 99)
LATENCY_FIGURES = ("mean", "median", "std", *(f"p{level}" for level in PERCENTILES))
METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token, first excluded",
    "itl": "inter-token latency (between chunks)",
    "e2el": "end-to-end latency",
}
#: Latencies with one value for each request, which can have an objective.
OBJECTIVES = ("ttft", "tpot", "e2el")
OK = "OK"
_FIGURES = (
    *("completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    *("max_concurrent_requests", "max_send_delay_ms"),
)
"""Of a `Summary`, under the same names in JSON."""


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """One request as the client saw it. Times are in seconds since the start of the measurement.

    Attributes:
        start_s: when it was first sent; retries are part of its latency.
        end_s: when its completion or its error arrived.
        scheduled_s: when the schedule demands it; None in a closed loop, which has no schedule.
        chunk_times_s: [num_chunks] arrival of each chunk with tokens.
        chunk_tokens: [num_chunks] tokens of each; where the protocol does not say, 1.
        num_input_tokens, num_output_tokens: as the server counted them; 0 for a failed request.
        status: name of the gRPC status it ended with.
        num_refusals: how often it was refused with RESOURCE_EXHAUSTED, retried or not.
    """

    start_s: float = 0.0
    end_s: float = 0.0
    scheduled_s: float | None = None
    chunk_times_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    status: str = OK
    error: str = ""
    num_refusals: int = 0
    speculation: Speculation = field(default_factory=Speculation)
    text: str = ""

    @property
    def completed(self) -> bool:
        return self.status == OK

    @property
    def ttft_ms(self) -> float:
        """Time to first token; that of the end for an empty output."""
        return ((self.chunk_times_s or [self.end_s])[0] - self.start_s) * 1e3

    @property
    def e2el_ms(self) -> float:
        return (self.end_s - self.start_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        later = self.num_output_tokens - 1
        return (self.e2el_ms - self.ttft_ms) / later if later > 0 else None

    @property
    def itls_ms(self) -> list[float]:
        """[num_chunks - 1] times between chunks."""
        return [(after - before) * 1e3 for before, after in pairwise(self.chunk_times_s)]

    def meets(self, objectives: Mapping[str, float]) -> bool:
        """Whether each latency named is at most its objective, in milliseconds."""
        values = {"ttft": self.ttft_ms, "tpot": self.tpot_ms or 0.0, "e2el": self.e2el_ms}
        return all(values[name] <= limit for name, limit in objectives.items())


def latency_figures(values: Sequence[float]) -> dict[str, float]:
    """`LATENCY_FIGURES` of one latency, in milliseconds; empty without values."""
    if not values:
        return {}
    levels = (float(level) for level in np.percentile(values, PERCENTILES))
    found = {"mean": float(np.mean(values)), "median": float(np.median(values)), "std": float(np.std(values))}
    return found | dict(zip(LATENCY_FIGURES[3:], levels, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The figures of a measurement.

    Attributes:
        duration_s: from the first request's time to the last answer.
        completed, failed: requests.
        num_good: completed requests that met every objective; None without objectives.
        request_throughput, request_goodput: completed and good requests per second.
        output_throughput, total_token_throughput: output tokens, and all tokens, per second.
        total_input_tokens, total_output_tokens: of completed requests.
        latencies: by name, as in `METRICS`, the figures of each.
        speculation: sums over completed requests.
        errors: failed requests by gRPC status.
        num_refusals: answers RESOURCE_EXHAUSTED, including those followed by a successful retry.
        max_output_tokens_per_s: most tokens that arrived within one whole second of the measurement.
        max_concurrent_requests: most completed requests that ran at a time.
        max_send_delay_ms: largest delay of the sender against its schedule; unless it is small compared to
            the latencies, the sender could not keep up. None in a closed loop.
    """

    duration_s: float
    completed: int
    failed: int
    num_good: int | None
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    total_input_tokens: int
    total_output_tokens: int
    latencies: Mapping[str, Mapping[str, float]]
    speculation: Speculation
    errors: Mapping[str, int]
    num_refusals: int
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    max_send_delay_ms: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, under the names of `vllm bench serve`."""
        found: dict[str, Any] = {
            "duration": self.duration_s,
            **{name: getattr(self, name) for name in _FIGURES},
            "errors_by_status": dict(self.errors),
            "refused": self.num_refusals,
        }
        for name, of in self.latencies.items():
            found |= {f"{figure}_{name}_ms": of.get(figure) for figure in LATENCY_FIGURES}
        return found | _speculation_fields(self.speculation)


def summarize(
    records: Sequence[RequestRecord], duration_s: float, objectives: Mapping[str, float] | None = None
) -> Summary:
    """The figures of a measurement.

    Args:
        records: of all requests that ended, in any order.
        duration_s: of the measurement, in seconds.
        objectives: `OBJECTIVES` to milliseconds, for goodput.
    """
    done = [record for record in records if record.completed]
    delays_ms = [(r.start_s - r.scheduled_s) * 1e3 for r in records if r.scheduled_s is not None]
    num_good = sum(record.meets(objectives) for record in done) if objectives else None
    num_in = sum(record.num_input_tokens for record in done)
    num_out = sum(record.num_output_tokens for record in done)
    elapsed_s = duration_s if duration_s > 0 else math.inf
    return Summary(
        duration_s=duration_s,
        completed=len(done),
        failed=len(records) - len(done),
        num_good=num_good,
        request_throughput=len(done) / elapsed_s,
        request_goodput=None if num_good is None else num_good / elapsed_s,
        output_throughput=num_out / elapsed_s,
        total_token_throughput=(num_in + num_out) / elapsed_s,
        total_input_tokens=num_in,
        total_output_tokens=num_out,
        latencies={name: latency_figures(latencies_ms(done, name)) for name in METRICS},
        speculation=total_speculation(record.speculation for record in done),
        errors=dict(Counter(record.status for record in records if not record.completed)),
        num_refusals=sum(record.num_refusals for record in records),
        max_output_tokens_per_s=float(max(output_rate(done, 1.0), default=0.0)),
        max_concurrent_requests=max((count for _, count in running_requests(done)), default=0),
        max_send_delay_ms=max(delays_ms, default=None),
    )


def latencies_ms(done: Iterable[RequestRecord], name: str) -> list[float]:
    """All values of one of `METRICS` in completed requests, in milliseconds."""
    if name == "itl":
        return [value for record in done for value in record.itls_ms]
    values = (getattr(record, f"{name}_ms") for record in done)
    return [value for value in values if value is not None]


def output_rate(done: Iterable[RequestRecord], bin_s: float) -> npt.NDArray[np.float64]:
    """Tokens per second [num_bins] that arrived in each bin of `bin_s` seconds, from 0 on."""
    arrivals = [pair for r in done for pair in zip(r.chunk_times_s, r.chunk_tokens, strict=True)]
    if not arrivals:
        return np.zeros(0)
    times_s, tokens = np.array(arrivals).T
    return np.bincount((times_s / bin_s).astype(np.int64), weights=tokens) / bin_s


def running_requests(done: Iterable[RequestRecord]) -> list[tuple[float, int]]:
    """(time in seconds, requests running from then on), in order; ends before starts."""
    changes = sorted(change for r in done for change in ((r.start_s, 1), (r.end_s, -1)))
    counts = accumulate(step for _, step in changes)
    return [(time_s, count) for (time_s, _), count in zip(changes, counts, strict=True)]


def total_speculation(parts: Iterable[Speculation]) -> Speculation:
    """The sums of counts and histograms."""
    all_parts = list(parts)
    by_source: dict[str, SourceCounts] = {}
    for each in (each for part in all_parts for each in part.by_source):
        before = by_source.get(each.source) or SourceCounts(source=each.source)
        by_source[each.source] = before.plus(each.num_draft_tokens, each.num_accepted_tokens, each.num_drafts)
    return Speculation(
        num_rounds=sum(part.num_rounds for part in all_parts),
        num_tokens=sum(part.num_tokens for part in all_parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in all_parts),
        num_accepted_tokens=sum(part.num_accepted_tokens for part in all_parts),
        acceptance_histogram=_summed(part.acceptance_histogram for part in all_parts),
        drafted_per_position=_summed(part.drafted_per_position for part in all_parts),
        accepted_per_position=_summed(part.accepted_per_position for part in all_parts),
        draft_unavailable=next((p.draft_unavailable for p in all_parts if p.draft_unavailable), ""),
        num_prepared=sum(part.num_prepared for part in all_parts),
        by_source=tuple(by_source.values()),
        why_plain=next((part.why_plain for part in all_parts if part.why_plain), ""),
    )


def _summed(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))


def _speculation_fields(total: Speculation) -> dict[str, Any]:
    """As in vLLM: the rate in percent, that of a position as a fraction of all drafts, however short."""
    num_drafts = sum(total.acceptance_histogram)
    if not num_drafts:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * total.draft_acceptance_rate,
        "spec_decode_acceptance_length": total.mean_acceptance_length,
        "spec_decode_num_drafts": num_drafts,
        "spec_decode_draft_tokens": total.num_draft_tokens,
        "spec_decode_accepted_tokens": total.num_accepted_tokens,
        "spec_decode_per_position_acceptance_rates": [n / num_drafts for n in total.accepted_per_position],
    }
