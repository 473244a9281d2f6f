"""Bytes of a round, computed for a large vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from google.protobuf.message import Message

from specwire.config.services import DraftConfig
from specwire.core import Load, Proposal, Timings, Verdict
from specwire.rpc.wire import draft as draft_wire
from specwire.rpc.wire import verify as verify_wire
from specwire.rpc.wire.draft import DraftAnswer, DraftOrder
from specwire.rpc.wire.verify import VerifyAnswer, VerifyOrder
from specwire.rule import sampling
from specwire.support import Support

LARGE_VOCABULARY = 151_936
NUM_DRAFT_TOKENS = 5
ZIPF_EXPONENTS = (1.2, 1.5, 2.0, 2.5, 3.0)
"""Laws of five draft positions, from undecided (cut at the largest support) to nearly certain."""
_COMMITTED_LEN = 1000
_SEQUENCE_ID, _REQUEST_ID = 70_000, 300


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
    judged = VerifyOrder(*ids, _COMMITTED_LEN, committed[:1], proposal)
    messages: tuple[Message, ...] = (
        draft_wire.request_to_proto((), (), [DraftOrder(*ids, _COMMITTED_LEN, committed, NUM_DRAFT_TOKENS)]),
        draft_wire.response_to_proto([drafted], (), (), incarnation, support_len),
        verify_wire.request_to_proto((), (), [judged]),
        verify_wire.response_to_proto([VerifyAnswer(*ids, verdict, spent, 0)], (), Load(), incarnation),
    )
    return sum(message.ByteSize() for message in messages)
