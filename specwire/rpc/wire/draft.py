"""Messages of the draft service to nouns and back, all requests or answers of a message at once. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specwire.core import (
    MAX_NUM_DRAFT_TOKENS,
    MAX_NUM_OUTCOMES,
    Preparation,
    Proposal,
    Timings,
)
from specwire.errors import InvalidRequestError
from specwire.rpc.wire import columns, proposals
from specwire.v1 import common_pb2, draft_pb2


class DraftOrder(NamedTuple):
    """A request: commit tokens, and draft what follows them.

    Attributes:
        base_len: length that the sequence is rolled back to, in tokens.
        token_ids: committed after it.
        num_draft_tokens: wanted after these; 0 only commits.
        max_depth: longest path of a tree; 0 for a chain.
        prepare: what to prepare ahead of the next request; None for nothing.
        traceparent: of the span around it; empty if it is not traced.
        num_chains: of so many draft tokens each, drawn independently.
    """

    sequence_id: int
    request_id: int
    base_len: int
    token_ids: Sequence[int]
    num_draft_tokens: int
    max_depth: int = 0
    prepare: Preparation | None = None
    traceparent: str = ""
    num_chains: int = 1

    @property
    def num_wanted(self) -> int:
        """Draft tokens of all chains."""
        return self.num_draft_tokens * self.num_chains


class DraftAnswer(NamedTuple):
    """The answer to a request.

    Attributes:
        proposal: without tokens where none were wanted.
        begun_ahead: it had begun to be prepared before its request arrived.
    """

    sequence_id: int
    request_id: int
    proposal: Proposal
    timings: Timings
    num_cached_tokens: int = 0
    begun_ahead: bool = False


class PreparedAnswer(NamedTuple):
    """A proposal that was prepared ahead of requests.

    Attributes:
        path: tokens between the proposal's `base_len` and the proposal; it is valid once they are committed.
        last_request_id: the last request that had arrived when it was sent.
        last_request_age_ns: the age of that request then.
        forward_ns: the passes that made it.
        traceparent: of the span of its preparation; empty if it is not traced.
    """

    sequence_id: int
    path: Sequence[int]
    proposal: Proposal
    last_request_id: int
    last_request_age_ns: int
    forward_ns: int
    traceparent: str = ""


# --- requests -------------------------------------------------------------------------------------------


def request_to_proto(
    opened: Sequence[common_pb2.OpenSequence], closed: Sequence[int], orders: Sequence[DraftOrder]
) -> draft_pb2.DraftRequest:
    """All that is ready, in one message."""
    if not orders:
        return draft_pb2.DraftRequest(open=opened, close=closed)
    num_chains = [order.num_chains for order in orders]
    return draft_pb2.DraftRequest(
        open=opened,
        close=closed,
        sequence_ids=[order.sequence_id for order in orders],
        request_ids=[order.request_id for order in orders],
        base_lens=[order.base_len for order in orders],
        num_tokens=[len(order.token_ids) for order in orders],
        token_ids=columns.pack(order.token_ids for order in orders),
        num_draft_tokens=[order.num_draft_tokens for order in orders],
        max_depths=[order.max_depth for order in orders],
        prepare=_preparations_to_proto([order.prepare for order in orders]),
        traceparents=columns.traceparents_to([order.traceparent for order in orders]),
        num_chains=num_chains if max(num_chains) > 1 else (),
    )


def _preparations_to_proto(prepare: Sequence[Preparation | None]) -> draft_pb2.Preparations | None:
    if not any(prepare):
        return None
    filled = [each or Preparation(0, 0) for each in prepare]
    return draft_pb2.Preparations(
        num_outcomes=[each.num_outcomes for each in filled],
        num_draft_tokens=[each.num_draft_tokens for each in filled],
        max_depths=[each.max_depth for each in filled],
    )


def orders_from_proto(message: draft_pb2.DraftRequest) -> list[DraftOrder]:
    """The requests of a message. `check_order` checks each by itself.

    Raises:
        InvalidRequestError: columns that do not fit each other; the message cannot be read.
    """
    num = len(message.sequence_ids)
    columns.check_lengths(
        message, num, "request_ids", "base_lens", "num_tokens", "num_draft_tokens", "max_depths"
    )
    num_tokens, num_committed = columns.counts_of("num_tokens", message.num_tokens)
    token_ids = columns.unpack("token_ids", message.token_ids, num_committed).tolist()
    if message.num_chains:
        columns.check_lengths(message, num, "num_chains")
    return list(
        map(
            DraftOrder,
            message.sequence_ids,
            message.request_ids,
            message.base_lens,
            columns.split(token_ids, num_tokens),
            message.num_draft_tokens,
            message.max_depths,
            _preparations_from_proto(message, num),
            columns.traceparents_of(message, num),
            message.num_chains or [1] * num,
        )
    )


def _preparations_from_proto(message: draft_pb2.DraftRequest, num: int) -> Sequence[Preparation | None]:
    if not message.HasField("prepare"):
        return [None] * num
    prepare = message.prepare
    columns.check_lengths(prepare, num, "num_outcomes", "num_draft_tokens", "max_depths")
    return [
        Preparation(*each) if any(each) else None
        for each in zip(prepare.num_outcomes, prepare.num_draft_tokens, prepare.max_depths, strict=True)
    ]


def check_order(order: DraftOrder) -> None:
    """Refuse counts out of range.

    Raises:
        InvalidRequestError: naming the column and the value.
    """
    counts = [("num_draft_tokens", order.num_draft_tokens, 0), ("max_depth", order.max_depth, 0)]
    if order.prepare is not None:
        counts += [
            ("prepare.num_draft_tokens", order.prepare.num_draft_tokens, 1),
            ("prepare.max_depth", order.prepare.max_depth, 0),
        ]
        _check_range("prepare.num_outcomes", order.prepare.num_outcomes, 1, MAX_NUM_OUTCOMES)
    for name, value, least in counts:
        _check_range(name, value, least, MAX_NUM_DRAFT_TOKENS)
    _check_range("num_chains", order.num_chains, 1, MAX_NUM_DRAFT_TOKENS // max(1, order.num_draft_tokens))


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequestError(name, value, f"must lie in [{least}, {most}]")


# --- responses ------------------------------------------------------------------------------------------


def response_to_proto(
    answers: Sequence[DraftAnswer],
    prepared: Sequence[PreparedAnswer],
    errors: Sequence[common_pb2.SequenceError],
    incarnation: str,
    support_len: int,
) -> draft_pb2.DraftResponse:
    """All that is ready, in one message.

    Args:
        support_len: entries that each support is padded to, so that the size does not depend on tokens.
    """
    message = draft_pb2.DraftResponse(incarnation=incarnation, errors=errors)
    if answers:
        message.sequence_ids.extend([answer.sequence_id for answer in answers])
        message.request_ids.extend([answer.request_id for answer in answers])
        message.base_lens.extend([answer.proposal.base_len for answer in answers])
        message.timings.CopyFrom(columns.timings_to_proto([answer.timings for answer in answers]))
        message.num_cached_tokens.extend([answer.num_cached_tokens for answer in answers])
        message.begun_ahead.extend([answer.begun_ahead for answer in answers])
        own = [answer.proposal for answer in answers]
        message.proposals.CopyFrom(proposals.to_proto(own, support_len))
    if prepared:
        message.prepared.CopyFrom(_prepared_to_proto(prepared, support_len))
    return message


def _prepared_to_proto(prepared: Sequence[PreparedAnswer], support_len: int) -> draft_pb2.PreparedProposals:
    return draft_pb2.PreparedProposals(
        sequence_ids=[each.sequence_id for each in prepared],
        base_lens=[each.proposal.base_len for each in prepared],
        last_request_ids=[each.last_request_id for each in prepared],
        last_request_age_ns=[each.last_request_age_ns for each in prepared],
        forward_ns=[each.forward_ns for each in prepared],
        path_lens=[len(each.path) for each in prepared],
        path_token_ids=columns.pack(each.path for each in prepared),
        traceparents=columns.traceparents_to([each.traceparent for each in prepared]),
        proposals=proposals.to_proto([each.proposal for each in prepared], support_len),
    )


def answers_from_proto(
    message: draft_pb2.DraftResponse, vocab_size: int, source: str = ""
) -> list[DraftAnswer]:
    """The answers of a message.

    Args:
        vocab_size: of the target, in tokens.
        source: of the proposals.

    Raises:
        InvalidRequestError: columns that do not fit each other, or proposals that could not be judged.
    """
    num = len(message.sequence_ids)
    columns.check_lengths(message, num, "request_ids", "base_lens", "num_cached_tokens", "begun_ahead")
    return list(
        map(
            DraftAnswer,
            message.sequence_ids,
            message.request_ids,
            proposals.from_proto(message.proposals, message.base_lens, vocab_size, source),
            columns.timings_from_proto(message.timings, num),
            message.num_cached_tokens,
            message.begun_ahead,
        )
    )


def prepared_from_proto(
    message: draft_pb2.PreparedProposals, vocab_size: int, source: str = ""
) -> list[PreparedAnswer]:
    """The prepared proposals of a message; see `answers_from_proto`."""
    num = len(message.sequence_ids)
    columns.check_lengths(
        message, num, "base_lens", "last_request_ids", "last_request_age_ns", "forward_ns", "path_lens"
    )
    paths = proposals.paths_of(message, vocab_size)
    for base_len, path in zip(message.base_lens, paths, strict=True):
        proposals.check_path(base_len, path)
    return list(
        map(
            PreparedAnswer,
            message.sequence_ids,
            paths,
            proposals.from_proto(message.proposals, message.base_lens, vocab_size, source),
            message.last_request_ids,
            message.last_request_age_ns,
            message.forward_ns,
            columns.traceparents_of(message, num),
        )
    )
