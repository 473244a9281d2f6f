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
    check_token_ids,
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

_REQUEST = {
    "sequence_ids": "sequence_id",
    "request_ids": "request_id",
    "base_lens": "base_len",
    "num_draft_tokens": "num_draft_tokens",
    "max_depths": "max_depth",
    "traceparents": "traceparent",
    "num_chains": "num_chains",
}
"""Columns of a message, and the attribute that each has; as those below."""
_USUAL = {"traceparents": "", "num_chains": 1}
"""Entries of columns that stay empty where all are these."""
_PREPARATION = {
    "num_outcomes": "num_outcomes",
    "num_draft_tokens": "num_draft_tokens",
    "max_depths": "max_depth",
}


def request_to_proto(
    opened: Sequence[common_pb2.OpenSequence], closed: Sequence[int], orders: Sequence[DraftOrder]
) -> draft_pb2.DraftRequest:
    """All that is ready, in one message."""
    message = draft_pb2.DraftRequest(open=opened, close=closed)
    if not orders:
        return message
    columns.add(message, orders, _REQUEST, _USUAL)
    columns.add_lists(message, "num_tokens", "token_ids", [order.token_ids for order in orders], "<u4")
    if any(order.prepare for order in orders):
        columns.add(message.prepare, [order.prepare or Preparation(0, 0) for order in orders], _PREPARATION)
    return message


def orders_from_proto(message: draft_pb2.DraftRequest) -> list[DraftOrder]:
    """The requests of a message. `check_order` checks each by itself."""
    num = len(message.sequence_ids)
    found = columns.read(message, num, _REQUEST, _USUAL)
    sequence_ids, request_ids, base_lens, num_draft_tokens, max_depths, traceparents, num_chains = found
    num_tokens, token_ids = columns.read_lists(message, num, "num_tokens", "token_ids", "<u4")
    prepare: Sequence[Preparation | None] = [None] * num
    if message.HasField("prepare"):
        each = zip(*columns.read(message.prepare, num, _PREPARATION), strict=True)
        prepare = [Preparation(*counts) if any(counts) else None for counts in each]
    return list(
        map(
            DraftOrder,
            sequence_ids,
            request_ids,
            base_lens,
            columns.split(token_ids.tolist(), num_tokens),
            num_draft_tokens,
            max_depths,
            prepare,
            columns.checked_traceparents(traceparents),
            num_chains,
        )
    )


def check_order(order: DraftOrder) -> None:
    """Refuse counts out of range."""
    prepare, most = order.prepare, MAX_NUM_DRAFT_TOKENS
    if prepare is not None:
        _check_range("prepare.num_outcomes", prepare.num_outcomes, 1, MAX_NUM_OUTCOMES)
    _check_range("num_draft_tokens", order.num_draft_tokens, 0, most)
    _check_range("max_depth", order.max_depth, 0, most)
    if prepare is not None:
        _check_range("prepare.num_draft_tokens", prepare.num_draft_tokens, 1, most)
        _check_range("prepare.max_depth", prepare.max_depth, 0, most)
    _check_range("num_chains", order.num_chains, 1, MAX_NUM_DRAFT_TOKENS // max(1, order.num_draft_tokens))


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequestError(name, value, f"must lie in [{least}, {most}]")


# --- responses ------------------------------------------------------------------------------------------

_ANSWER = {
    "sequence_ids": "sequence_id",
    "request_ids": "request_id",
    "base_lens": "proposal.base_len",
    "num_cached_tokens": "num_cached_tokens",
    "begun_ahead": "begun_ahead",
}
_PREPARED = {
    "sequence_ids": "sequence_id",
    "base_lens": "proposal.base_len",
    "last_request_ids": "last_request_id",
    "last_request_age_ns": "last_request_age_ns",
    "forward_ns": "forward_ns",
    "traceparents": "traceparent",
}


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
        columns.add(message, answers, _ANSWER)
        message.timings.CopyFrom(columns.timings_to_proto([answer.timings for answer in answers]))
        own = [answer.proposal for answer in answers]
        message.proposals.CopyFrom(proposals.to_proto(own, support_len))
    if prepared:
        ahead = message.prepared
        columns.add(ahead, prepared, _PREPARED, _USUAL)
        columns.add_lists(ahead, "path_lens", "path_token_ids", [each.path for each in prepared], "<u4")
        ahead.proposals.CopyFrom(proposals.to_proto([each.proposal for each in prepared], support_len))
    return message


def answers_from_proto(
    message: draft_pb2.DraftResponse, vocab_size: int, source: str = ""
) -> list[DraftAnswer]:
    """The answers of a message; `vocab_size` is the target's, `source` that of the proposals."""
    num = len(message.sequence_ids)
    sequence_ids, request_ids, base_lens, *others = columns.read(message, num, _ANSWER)
    found = proposals.from_proto(message.proposals, base_lens, vocab_size, source)
    timings = columns.timings_from_proto(message.timings, num)
    return list(map(DraftAnswer, sequence_ids, request_ids, found, timings, *others))


def prepared_from_proto(
    message: draft_pb2.PreparedProposals, vocab_size: int, source: str = ""
) -> list[PreparedAnswer]:
    """The prepared proposals of a message; see `answers_from_proto`."""
    num = len(message.sequence_ids)
    sequence_ids, base_lens, *others, traceparents = columns.read(message, num, _PREPARED, _USUAL)
    path_lens, token_ids = columns.read_lists(message, num, "path_lens", "path_token_ids", "<u4")
    check_token_ids("path_token_ids", token_ids, vocab_size)
    paths = columns.split(token_ids.tolist(), path_lens)
    for base_len, path in zip(base_lens, paths, strict=True):
        proposals.check_path(base_len, path)
    found = proposals.from_proto(message.proposals, base_lens, vocab_size, source)
    columns.checked_traceparents(traceparents)
    return list(map(PreparedAnswer, sequence_ids, paths, found, *others, traceparents))
