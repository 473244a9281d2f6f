"""Bytes a round: measured on the embedded pair from its traces, and computed for a large vocabulary."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from google.protobuf.message import Message

from benchmarks.measure import Plan
from specwire import Client, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.config.services import DraftConfig
from specwire.config.stack import UpConfig
from specwire.core import Load, Proposal, Rule, Timings, Verdict
from specwire.rule import sampling
from specwire.support import Support
from specwire.telemetry import semantics as names
from specwire.wire import client as client_wire
from specwire.wire import draft as draft_wire
from specwire.wire import verify as verify_wire
from specwire.wire.draft import DraftAnswer, DraftOrder
from specwire.wire.verify import VerifyAnswer, VerifyOrder
from tools.timeline.receiver import Receiver
from tools.timeline.spans import RecordedSpan

MODES: dict[str, dict[str, Any]] = {
    "rejection, temperature 1": {"temperature": 1.0, "rule": Rule.REJECTION},
    "Gumbel, temperature 1": {"temperature": 1.0, "rule": Rule.GUMBEL},
    "greedy": {"temperature": 0.0},
}
LARGE_VOCABULARY = 151_936
NUM_DRAFT_TOKENS = 5
ZIPF_EXPONENTS = (1.2, 1.5, 2.0, 2.5, 3.0)
"""Laws of five draft positions, from undecided (cut at the largest support) to nearly certain."""
_COMMITTED_LEN = 1000
_SEQUENCE_ID, _REQUEST_ID = 70_000, 300


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Means over rounds.

    Attributes:
        model_bytes: draft and verify link together, both directions; without the first round of each
            generation, which carries the prompt.
        client_bytes: what a round sends to the client.
        num_draft_tokens: proposed a round.
    """

    model_bytes: float
    client_bytes: float
    num_draft_tokens: float


def measure(config: UpConfig, plan: Plan) -> dict[str, Volume]:
    """Each rule of `MODES` through real services, which report the size of every message they exchange.

    Tracing itself adds a traceparent of 55 characters to each request.
    """
    with Receiver() as receiver:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with Stack(config, environ) as stack, Client(stack.address) as client:
            chunks = {mode: _generate(client, mode, plan) for mode in MODES}
        spans = receiver.spans  # services export what is left when they end
    return {mode: _volume(spans, _traces(mode, plan), chunks[mode]) for mode in MODES}


def _traces(mode: str, plan: Plan) -> dict[str, int]:
    """The trace id of each prompt's generation, and the prompt's length."""
    first = 1 + list(MODES).index(mode) * len(plan.prompts)
    return {f"{first + i:032x}": len(prompt) for i, prompt in enumerate(plan.prompts)}


def _generate(client: Client, mode: str, plan: Plan) -> list[int]:
    """Run all prompts; returns the sizes of the chunks in bytes."""
    sizes = []
    for trace_id, prompt in zip(_traces(mode, plan), plan.prompts, strict=True):
        params = SamplingParams(max_tokens=plan.num_tokens, ignore_eos=True, seed=0, **MODES[mode])
        traceparent = f"00-{trace_id}-{1:016x}-01"
        with client.stream(prompt_token_ids=prompt, params=params, traceparent=traceparent) as stream:
            sizes += [client_wire.chunk_to_proto(chunk).ByteSize() for chunk in stream]
    return sizes


def _volume(spans: Sequence[RecordedSpan], traces: dict[str, int], chunk_bytes: Sequence[int]) -> Volume:
    later = [
        span
        for span in spans
        if span.name in ("draft", "verify")
        and names.BASE_LEN in span.attributes
        and _count(span, names.BASE_LEN) > traces.get(span.trace_id, LARGE_VOCABULARY)
    ]
    verifies = [span for span in later if span.name == "verify"]
    num_bytes = sum(
        _count(span, name) for span in later for name in (names.REQUEST_BYTES, names.RESPONSE_BYTES)
    )
    return Volume(
        model_bytes=num_bytes / len(verifies),
        client_bytes=statistics.mean(chunk_bytes),
        num_draft_tokens=statistics.mean(_count(span, names.NUM_DRAFT_TOKENS) for span in verifies),
    )


def _count(span: RecordedSpan, name: str) -> int:
    value = span.attributes[name]
    assert isinstance(value, int)
    return value


def synthetic() -> dict[str, int]:
    """Bytes of one round of the real messages with a vocabulary of 151,936 and 5 draft tokens.

    Supports are cut by the draft's own code and defaults from Zipf laws, and filled up by its own code; the
    last entry has every support at its largest, which is the most a round can take.
    """
    laws = [_zipf(exponent) for exponent in ZIPF_EXPONENTS]
    return {
        "rejection": round_bytes([_cut(law) for law in laws]),
        "rejection, all supports at their limit": round_bytes([_cut(_zipf(1.0))] * NUM_DRAFT_TOKENS),
        "Gumbel or greedy": round_bytes([]),
    }


def _zipf(exponent: float) -> torch.Tensor:
    """float32 [1, vocabulary]: probability ∝ rank**-exponent, ids in an arbitrary order."""
    ranks = 1 + np.random.default_rng(0).permutation(LARGE_VOCABULARY)
    weights = ranks.astype(np.float64) ** -exponent
    return torch.from_numpy((weights / weights.sum()).astype(np.float32))[None]


def _cut(law: torch.Tensor) -> Support:
    defaults = DraftConfig()
    ids, probs, lengths = sampling.truncate_support(law, defaults.support_mass, defaults.max_support)
    size = int(lengths[0])
    return Support(ids[0, :size].numpy(), probs[0, :size].numpy())


def round_bytes(supports: Sequence[Support]) -> int:
    """All four messages of a lone stream's round in the middle of a generation.

    Without supports tokens are matched. Of a message that carries rounds of several streams, each takes less.
    """
    token_ids = [LARGE_VOCABULARY - 1 - i for i in range(NUM_DRAFT_TOKENS)]
    committed = token_ids[:3]
    proposal = Proposal(_COMMITTED_LEN, token_ids, supports)
    verdict = Verdict(
        _COMMITTED_LEN,
        [*token_ids, 1],
        [support.probs for support in supports],
        [0.01 for _ in supports],
    )
    ids, incarnation, support_len = (_SEQUENCE_ID, _REQUEST_ID), "0" * 12, DraftConfig().max_support
    spent = Timings(queue_ns=50_000, forward_ns=10_000_000)
    drafted = DraftAnswer(*ids, proposal, spent)
    ids_of_supports = [support.token_ids for support in supports]
    judged = VerifyOrder(*ids, _COMMITTED_LEN, committed[:1], token_ids, (), ids_of_supports)
    messages: tuple[Message, ...] = (
        draft_wire.request_to_proto((), (), [DraftOrder(*ids, _COMMITTED_LEN, committed, NUM_DRAFT_TOKENS)]),
        draft_wire.response_to_proto([drafted], (), (), incarnation, support_len),
        verify_wire.request_to_proto((), (), [judged]),
        verify_wire.response_to_proto([VerifyAnswer(*ids, verdict, spent, 0)], (), Load(), incarnation),
    )
    return sum(message.ByteSize() for message in messages)
