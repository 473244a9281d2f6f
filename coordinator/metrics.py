"""The metrics of a coordinator: its requests, its peers, and what it chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordinator.drafts.methods import MAX_BYTES
from specwire.completion import Speculation
from specwire.telemetry.metrics import Counter, Gauge, Histogram, Labelled, Metric

if TYPE_CHECKING:
    from coordinator.servicer import GenerationServicer


def _by_position(counts: Sequence[int]) -> Labelled:
    return {(str(position),): count for position, count in enumerate(counts)}


def _by_source(now: GenerationServicer, name: str) -> Labelled:
    return {(each.source,): getattr(each, name) for each in _speculation(now).by_source}


def _speculation(now: GenerationServicer) -> Speculation:
    return now.totals.tally.speculation()


def _replicas(now: GenerationServicer) -> Labelled:
    return {
        (pool.role, state): len(pool.available) if there else len(pool.replicas) - len(pool.available)
        for pool in (now.verify, now.draft)
        for state, there in (("available", True), ("unavailable", False))
    }


def _kv_usage(now: GenerationServicer) -> float:
    replicas = now.verify.available
    return sum(each.num_held_pages for each in replicas) / max(1, sum(each.num_pages for each in replicas))


TABLE: tuple[Metric[GenerationServicer], ...] = (
    # requests
    Counter(
        "specwire_requests_total",
        "Requests that have ended, by gRPC status; finish_reason is empty unless the status is OK.",
        lambda now: now.totals.requests,
        ("status", "finish_reason"),
    ),
    Gauge("specwire_requests_running", "Requests that generate now.", lambda now: now.admission.num_running),
    Gauge(
        "specwire_requests_running_limit",
        "Most requests that may generate at a time (--max-running).",
        lambda now: now.config.max_running,
    ),
    Gauge(
        "specwire_requests_waiting", "Requests that wait for a place.", lambda now: now.admission.num_waiting
    ),
    Gauge(
        "specwire_requests_paused",
        "Requests without a place, whose clients have read nothing for a second.",
        lambda now: now.admission.num_paused,
    ),
    Histogram(
        "specwire_request_wait_seconds",
        "Time that requests waited for a slot.",
        lambda now: now.totals.wait_s,
    ),
    Histogram(
        "gen_ai_server_request_duration_seconds",
        "Time of requests from their arrival to the end, by gRPC status.",
        lambda now: now.totals.duration_s,
        ("status",),
    ),
    Histogram(
        "gen_ai_server_time_to_first_token_seconds",
        "Time from a request's arrival to its first token.",
        lambda now: now.totals.first_token_s,
    ),
    Histogram(
        "gen_ai_server_time_per_output_token_seconds",
        "Mean time between tokens after the first, of each request that ended well.",
        lambda now: now.totals.per_token_s,
    ),
    Histogram(
        "specwire_inter_token_seconds",
        "Time between tokens after the first; the tokens of a round share the time since the round before.",
        lambda now: now.totals.inter_token_s,
    ),
    Histogram(
        "specwire_request_stage_seconds",
        "Time of each request by stage; the stages of a request add up to its duration.",
        lambda now: now.totals.request_stage_s,
        ("stage",),
    ),
    # tokens
    Counter("specwire_prompt_tokens_total", "Tokens of prompts.", lambda now: now.totals.prompt_tokens),
    Counter(
        "specwire_generation_tokens_total", "Tokens sent to clients.", lambda now: now.totals.output_tokens
    ),
    Counter(
        "specwire_prefix_cache_hit_tokens_total",
        "Tokens that the verify service found in its KV cache instead of running them.",
        lambda now: now.totals.tally.num_cached_tokens,
    ),
    # rounds
    Counter(
        "specwire_rounds_total",
        "Rounds, plain ones included; each takes one verify call.",
        lambda now: now.totals.tally.num_rounds,
    ),
    Counter(
        "specwire_spec_decode_num_drafts_total",
        "Rounds that had draft tokens.",
        lambda now: _speculation(now).num_drafts,
    ),
    Counter(
        "specwire_spec_decode_num_draft_tokens_total",
        "Draft tokens that were verified.",
        lambda now: _speculation(now).num_draft_tokens,
    ),
    Counter(
        "specwire_spec_decode_num_accepted_tokens_total",
        "Draft tokens that were accepted.",
        lambda now: _speculation(now).num_accepted_tokens,
    ),
    Counter(
        "specwire_spec_decode_num_draft_tokens_per_pos_total",
        "Draft tokens that were verified, by their position in the round, from 0.",
        lambda now: _by_position(_speculation(now).drafted_per_position),
        ("position",),
    ),
    Counter(
        "specwire_spec_decode_num_accepted_tokens_per_pos_total",
        "Draft tokens that were accepted, by their position in the round, from 0.",
        lambda now: _by_position(_speculation(now).accepted_per_position),
        ("position",),
    ),
    Counter(
        "specwire_spec_decode_num_draft_tokens_per_source_total",
        "Draft tokens that were verified, by what made them: a draft model's name, or a method.",
        lambda now: _by_source(now, "num_draft_tokens"),
        ("source",),
    ),
    Counter(
        "specwire_spec_decode_num_accepted_tokens_per_source_total",
        "Draft tokens that were accepted, by what made them: a draft model's name, or a method.",
        lambda now: _by_source(now, "num_accepted_tokens"),
        ("source",),
    ),
    Counter(
        "specwire_prepared_rounds_total",
        "Rounds whose proposal was there before it was asked for.",
        lambda now: now.totals.tally.num_prepared,
    ),
    Counter(
        "specwire_begun_rounds_total",
        "Rounds that the verify service began by itself (--verify-ahead).",
        lambda now: now.totals.tally.num_begun,
    ),
    Counter(
        "specwire_stage_seconds_total",
        "Time of requests by stage; each moment belongs to one.",
        lambda now: {(stage.value,): ns / 1e9 for stage, ns in now.totals.stage_ns.items()},
        ("stage",),
    ),
    # choices
    Gauge(
        "specwire_chosen_draft_tokens",
        "Draft tokens in the latest rounds that had any, on the average.",
        lambda now: now.assembly.choice.costs.mean_drafted,
    ),
    Gauge(
        "specwire_chosen_tree_nodes",
        "Nodes of token trees whose size the coordinator chooses; 0 for chains. With trees, the other "
        "choices are those of their depth.",
        lambda now: now.assembly.choice.chosen.num_nodes,
    ),
    Gauge(
        "specwire_chosen_draft_tokens_cap",
        "Most draft tokens in a round whose number the coordinator chooses; 0 decodes plainly.",
        lambda now: now.assembly.choice.longest,
    ),
    Gauge(
        "specwire_chosen_outcomes",
        "Outcomes of a round that the draft prepares for.",
        lambda now: now.assembly.choice.num_outcomes,
    ),
    Gauge(
        "specwire_expected_tokens_per_second",
        "Tokens a second of a stream that are expected of each way to draft, with as many streams as now.",
        lambda now: {(str(each.way),): each.expected_rate for each in now.assembly.choice.compared()},
        ("way",),
    ),
    Gauge(
        "specwire_measured_tokens_per_second",
        "Tokens a second of a stream as last measured of each way to draft; 0 if it never ran.",
        lambda now: {(str(each.way),): each.measured_rate for each in now.assembly.choice.compared()},
        ("way",),
    ),
    Counter(
        "specwire_trials_total",
        "Trials of another way to draft, by cap, outcomes and shape of proposals, that have begun.",
        lambda now: now.assembly.choice.num_trials,
    ),
    Gauge(
        "specwire_earlier_output_bytes",
        f"Memory of earlier outputs that drafts are made from, at most {MAX_BYTES >> 20} MiB.",
        lambda now: now.assembly.texts.earlier.num_bytes,
    ),
    # peers
    Gauge(
        "specwire_replicas",
        "Draft and verify services that new streams may go to, or may not.",
        _replicas,
        ("role", "state"),
    ),
    Gauge(
        "specwire_verify_kv_usage",
        "Fraction of the verify services' KV caches that sequences hold, as last reported, once a second.",
        _kv_usage,
    ),
    Counter(
        "specwire_disagreements_total",
        "Rounds where the verify service, going on by itself, came to another outcome than the coordinator, "
        "which keeps its own. Any is a defect.",
        lambda now: now.verify.num_disagreements,
    ),
    Counter(
        "specwire_requests_without_draft_total",
        "Requests that had to do without a draft service, for a while at least.",
        lambda now: now.totals.without_draft,
    ),
)
