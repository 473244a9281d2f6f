"""Messages of the verify service to nouns and back, all requests or answers of a message at once. No I/O."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from specwire.core import (
    NO_TOKEN,
    Continuation,
    Load,
    Logprobs,
    Outcome,
    Proposal,
    Timings,
    Verdict,
    Wanted,
    check_token_ids,
)
from specwire.errors import InternalError, InvalidRequestError
from specwire.rpc.wire import columns, proposals
from specwire.rpc.wire import model as wire
from specwire.support import FloatArray, IntArray
from specwire.v1 import common_pb2, verify_pb2

Value = TypeVar("Value")

MAX_AHEAD_OF_MESSAGE = 1 << 16
"""Proposals ahead, of all sequences."""
WANTED_COLUMNS = {
    "num_next_draft_tokens": "wanted.num_draft_tokens",
    "next_max_depths": "wanted.max_depth",
    "num_plain_ahead": "wanted.num_plain",
}
_NO_PROBS: FloatArray = np.empty(0, np.float32)
_NO_ACCOUNT = Continuation(0, Outcome((), 0))

_REQUEST = {
    "sequence_ids": "sequence_id",
    "request_ids": "request_id",
    "base_lens": "base_len",
    "traceparents": "traceparent",
    "ahead_ids": "ahead_id",
    **WANTED_COLUMNS,
}
"""Columns of a message, and the attribute that each has; as those below."""
_USUAL = {"traceparents": "", "ahead_ids": 0} | dict.fromkeys(WANTED_COLUMNS, 0)
"""Entries of columns that stay empty where all are these."""
_AHEAD = {"sequence_ids": "sequence_id", "ahead_ids": "ahead_id", "base_lens": "proposal.base_len"}
_ANSWER = {
    "sequence_ids": "sequence_id",
    "request_ids": "request_id",
    "base_lens": "verdict.base_len",
    "num_cached_tokens": "num_cached_tokens",
    "ahead_ids": "ahead_id",
}
_CONTINUATION = {"ahead_ids": "ahead_id", "next_token_ids": "outcome.next_token"}


class VerifyOrder(NamedTuple):
    """A request: commit tokens, and judge a proposal after them. What a `DraftOrder` has too is the same.

    Attributes:
        proposal: what to judge after these; empty if the receiver has announced that it went on with it.
        ahead_id: of the proposal that the receiver has announced; else 0.
        wanted: of the receiver after the verdict.
        needs_probs: the receiver may apply the rule itself, so draft probabilities are sent.
        problem: why the proposal of a request that was received cannot be judged; None if it can.
    """

    sequence_id: int
    request_id: int
    base_len: int
    token_ids: Sequence[int]
    proposal: Proposal = Proposal(0)
    traceparent: str = ""
    ahead_id: int = 0
    wanted: Wanted = Wanted()
    needs_probs: bool = False
    problem: InvalidRequestError | None = None


class AheadOrder(NamedTuple):
    """A proposal ahead of the verdict that it depends on.

    Attributes:
        path: tokens between the proposal's `base_len` and the proposal; it is valid once they are committed.
        problem: why one that was received cannot be judged; None if it can.
    """

    sequence_id: int
    ahead_id: int
    path: Sequence[int]
    proposal: Proposal
    problem: InvalidRequestError | None = None


class VerifyAnswer(NamedTuple):
    """The answer to a request.

    Attributes:
        num_cached_tokens: found in the prefix cache instead of being computed.
        ahead_id: of the proposal that it is about, where the service went on by itself; else 0.
        continuation: how the service goes on by itself; None if it does not, and proposes nothing.
        load: of the service, as it reports it.
        proposal: of the service's own, after the outcome of the continuation; None if it has none.
    """

    sequence_id: int
    request_id: int
    verdict: Verdict
    timings: Timings
    num_cached_tokens: int
    ahead_id: int = 0
    continuation: Continuation | None = None
    load: Load = Load()
    proposal: Proposal | None = None


def request_to_proto(
    opened: Sequence[common_pb2.OpenSequence],
    closed: Sequence[int],
    orders: Sequence[VerifyOrder | AheadOrder],
) -> verify_pb2.VerifyRequest:
    """All that is ready, in one message."""
    message = verify_pb2.VerifyRequest(open=opened, close=closed)
    if requests := [order for order in orders if isinstance(order, VerifyOrder)]:
        columns.add(message, requests, _REQUEST, _USUAL)
        columns.add_lists(message, "num_tokens", "token_ids", [order.token_ids for order in requests], "<u4")
        found = [order.proposal for order in requests]
        with_probs = any(order.needs_probs for order in requests)
        message.proposals.CopyFrom(proposals.to_proto(found, with_probs=with_probs))
    if ahead := [order for order in orders if isinstance(order, AheadOrder)]:
        found = [order.proposal for order in ahead]
        support_len = max(proposal.support_len for proposal in found)
        columns.add(message.ahead, ahead, _AHEAD)
        paths = [order.path for order in ahead]
        columns.add_lists(message.ahead, "path_lens", "path_token_ids", paths, "<u4")
        message.ahead.proposals.CopyFrom(proposals.to_proto(found, support_len))
    return message


def ahead_from_proto(message: verify_pb2.AheadProposals, vocab_size: int) -> list[AheadOrder]:
    """The proposals ahead of a message. `check_ahead` checks each by itself."""
    num = len(message.sequence_ids)
    if num > MAX_AHEAD_OF_MESSAGE:
        raise InvalidRequestError("sequence_ids", num, f"over {MAX_AHEAD_OF_MESSAGE} proposals in a message")
    sequence_ids, ahead_ids, base_lens = columns.read(message, num, _AHEAD)
    path_lens, token_ids = columns.read_lists(message, num, "path_lens", "path_token_ids", "<u4")
    paths = columns.split(token_ids.tolist(), path_lens)
    found = proposals.each_from_proto(message.proposals, base_lens, vocab_size)
    is_sound = int(token_ids.max(initial=0)) < vocab_size
    orders = list[AheadOrder]()
    for sequence_id, ahead_id, path, each in zip(sequence_ids, ahead_ids, paths, found, strict=True):
        try:
            if not is_sound:
                check_token_ids("path_token_ids", path, vocab_size)
            if isinstance(each, InvalidRequestError):
                raise each
            orders.append(AheadOrder(sequence_id, ahead_id, path, each))
        except InvalidRequestError as error:
            orders.append(AheadOrder(sequence_id, ahead_id, path, Proposal(0), error))
    return orders


def check_ahead(order: AheadOrder, last_id: int, context_len: int) -> None:
    """Refuse a proposal ahead that its sequence cannot have.

    Args:
        last_id: of its proposals so far; 0 before the first one.
        context_len: of the target, in tokens.
    """
    if order.problem is not None:
        raise order.problem
    if order.ahead_id <= last_id:
        raise InvalidRequestError("ahead_ids", order.ahead_id, f"must be over {last_id}, the last one")
    proposal = order.proposal
    proposals.check_path(proposal.base_len, order.path)
    if proposal.base_len > context_len:
        raise InvalidRequestError("base_lens", proposal.base_len, f"over the context of {context_len}")
    if not proposal.token_ids:
        raise InvalidRequestError("num_tokens", 0, "must be over 0 for a proposal ahead")
    if proposal.leaves:
        raise InvalidRequestError("num_chains", len(proposal.leaves), "must be 1 for a proposal ahead")


def orders_from_proto(message: verify_pb2.VerifyRequest, vocab_size: int) -> list[VerifyOrder]:
    """The requests of a message; `vocab_size` is the target's, in tokens."""
    num = len(message.sequence_ids)
    found = columns.read(message, num, _REQUEST, _USUAL)
    sequence_ids, request_ids, base_lens, traceparents, ahead_ids, *wanted = found
    num_tokens, token_ids = columns.read_lists(message, num, "num_tokens", "token_ids", "<u4")
    committed_lens = [*map(operator.add, base_lens, num_tokens)]
    orders = map(
        VerifyOrder,
        sequence_ids,
        request_ids,
        base_lens,
        columns.split(token_ids.tolist(), num_tokens),
        proposals.each_from_proto(message.proposals, committed_lens, vocab_size, with_probs=False),
        columns.checked_traceparents(traceparents),
        ahead_ids,
        map(Wanted, *wanted),
    )
    return [
        order._replace(proposal=Proposal(0), problem=order.proposal)
        if isinstance(order.proposal, InvalidRequestError)
        else order
        for order in orders
    ]


def response_to_proto(
    answers: Sequence[VerifyAnswer], errors: Sequence[common_pb2.SequenceError], load: Load, incarnation: str
) -> verify_pb2.VerifyResponse:
    """All answers of a pass, in one message."""
    message = verify_pb2.VerifyResponse(incarnation=incarnation, load=wire.load_to_proto(load), errors=errors)
    if not answers:
        return message
    verdicts = [answer.verdict for answer in answers]
    columns.add(message, answers, _ANSWER, _USUAL)
    message.timings.CopyFrom(columns.timings_to_proto([answer.timings for answer in answers]))
    rows = [verdict.target_token_ids for verdict in verdicts]
    columns.add_lists(message, "num_rows", "target_token_ids", rows, "<i4")
    if any(verdict.target_probs for verdict in verdicts):
        _add_probs(message, verdicts)
    if any(verdict.logprobs for verdict in verdicts):
        message.has_logprobs.extend(bool(verdict.logprobs) for verdict in verdicts)
    for verdict in verdicts:
        message.logprobs.extend(map(_logprobs_to_proto, verdict.logprobs))
    if any(answer.continuation for answer in answers):
        accounts = [answer.continuation or _NO_ACCOUNT for answer in answers]
        columns.add(message.continuations, accounts, _CONTINUATION)
        paths = [each.outcome.path for each in accounts]
        columns.add_lists(message.continuations, "num_accepted", "path", paths, "<i1")
    if any(answer.proposal for answer in answers):
        own = [answer.proposal or Proposal(0) for answer in answers]
        support_len = max(1, *(each.support_len for each in own))  # 1 where drafts are certain
        message.next.CopyFrom(proposals.to_proto(own, support_len))
    return message


def _continuations_from_proto(message: verify_pb2.VerifyResponse, num: int) -> Sequence[Continuation]:
    """Those of all answers; none if there is none for any, and no proposal after one."""
    if not (message.HasField("continuations") or message.HasField("next")):
        return []
    ahead_ids, next_token_ids = columns.read(message.continuations, num, _CONTINUATION)
    counts, path = columns.read_lists(message.continuations, num, "num_accepted", "path", "<i1")
    outcomes = map(Outcome, columns.split(path.tolist(), counts), next_token_ids)
    return list(map(Continuation, ahead_ids, outcomes))


def _next_from_proto(
    message: verify_pb2.VerifyResponse, continuations: Sequence[Continuation], vocab_size: int
) -> Sequence[Proposal | None]:
    """What the service proposes by itself after each answer; None where it proposes nothing."""
    if not message.HasField("next"):
        return [None] * len(message.sequence_ids)
    base_lens = [
        base_len + each.outcome.num_accepted + 1
        for base_len, each in zip(message.base_lens, continuations, strict=True)
    ]
    found = proposals.from_proto(message.next, base_lens, vocab_size)
    return [each if each.token_ids else None for each in found]


def _add_probs(message: verify_pb2.VerifyResponse, verdicts: Sequence[Verdict]) -> None:
    probs = [row for verdict in verdicts for row in _padded(verdict.target_probs, verdict, _NO_PROBS)]
    message.support_lens = columns.pack([[*map(len, probs)]])
    message.target_probs = columns.join(probs, "<f4")
    masses = [mass for verdict in verdicts for mass in _padded(verdict.tail_mass, verdict, 0.0)]
    message.tail_mass = np.array(masses, "<f8").tobytes()


def _padded(values: Sequence[Value], verdict: Verdict, missing: Value) -> list[Value]:
    """One for each row."""
    return [*values, *[missing] * (len(verdict.target_token_ids) - len(values))]


def answers_from_proto(message: verify_pb2.VerifyResponse, vocab_size: int) -> list[VerifyAnswer]:
    """The answers of a message.

    Raises:
        InternalError: probabilities that no target has.
    """
    num = len(message.sequence_ids)
    found = columns.read(message, num, _ANSWER, _USUAL)
    sequence_ids, request_ids, base_lens, num_cached, ahead_ids = found
    if min(num_cached, default=0) < 0:
        raise InvalidRequestError("num_cached_tokens", min(num_cached), "must be at least 0")
    num_rows, token_ids = columns.read_lists(message, num, "num_rows", "target_token_ids", "<i4")
    accounts = _continuations_from_proto(message, num)
    own = _next_from_proto(message, accounts, vocab_size)
    continuations = (
        account if account.ahead_id or proposal else None
        for account, proposal in zip(accounts or [_NO_ACCOUNT] * num, own, strict=True)
    )
    verdicts = map(
        Verdict,
        base_lens,
        columns.split(token_ids.tolist(), num_rows),
        *_probs_from_proto(message, token_ids, num_rows, vocab_size),
        _split_logprobs(message, token_ids, num_rows, vocab_size),
    )
    return list(
        map(
            VerifyAnswer,
            sequence_ids,
            request_ids,
            verdicts,
            columns.timings_from_proto(message.timings, num),
            num_cached,
            ahead_ids,
            continuations,
            repeat(wire.load_from_proto(message.load)),
            own,
        )
    )


def _probs_from_proto(
    message: verify_pb2.VerifyResponse, token_ids: IntArray, num_rows: Sequence[int], vocab_size: int
) -> tuple[Sequence[Sequence[FloatArray]], Sequence[Sequence[float]]]:
    """Probabilities and tail masses of each answer's draft positions; none where it has no supports."""
    is_there = token_ids != NO_TOKEN
    if not (message.support_lens or message.target_probs or message.tail_mass):
        check_token_ids("target_token_ids", token_ids[is_there], vocab_size)
        return [()] * len(num_rows), [()] * len(num_rows)
    num = len(token_ids)
    lens = columns.unpack("support_lens", message.support_lens, num).astype(np.int64)
    probs = columns.unpack("target_probs", message.target_probs, int(lens.sum()), "<f4")
    tail_mass = columns.unpack("tail_mass", message.tail_mass, num, "<f8")
    may_be_missing = (lens > 0) & (tail_mass == 0)
    check_token_ids("target_token_ids", token_ids[is_there & ~may_be_missing], vocab_size)
    _check_probs(probs, lens[lens > 0], tail_mass[lens > 0], is_there[lens > 0])
    of_rows: list[FloatArray] = columns.split(probs, lens.tolist())  # type: ignore[assignment]
    rows = columns.split(of_rows, num_rows)
    masses = columns.split(tail_mass.tolist(), num_rows)
    has_probs = [any(map(len, own)) for own in rows]
    return (
        [own[:-1] if has else () for own, has in zip(rows, has_probs, strict=True)],
        [own[:-1] if has else () for own, has in zip(masses, has_probs, strict=True)],
    )


def _check_probs(
    probs: FloatArray, lens: IntArray, masses: npt.NDArray[np.float64], is_there: npt.NDArray[np.bool_]
) -> None:
    """Refuse what is no distribution on a support and its tail, but for rows whose token is not there."""
    if not len(lens):
        return
    sums = np.add.reduceat(probs, np.cumsum(lens) - lens, dtype=np.float64) + masses
    is_fit = (np.abs(sums - 1) < proposals.SUM_TOLERANCE) | ~is_there
    if (probs < 0).any() or (masses < 0).any() or not is_fit.all():
        raise InternalError(f"target probabilities that add up to {sums.tolist()}")


def _split_logprobs(
    message: verify_pb2.VerifyResponse, token_ids: IntArray, num_rows: Sequence[int], vocab_size: int
) -> Sequence[Sequence[Logprobs]]:
    if not message.has_logprobs:
        return [()] * len(num_rows)
    [has_logprobs] = columns.read(message, len(num_rows), ["has_logprobs"])
    counts = [num if has else 0 for num, has in zip(num_rows, has_logprobs, strict=True)]
    [found] = columns.read(message, sum(counts), ["logprobs"])
    entries = [*map(_logprobs_from_proto, found)]
    is_there = (token_ids != NO_TOKEN)[np.repeat(np.array(counts) > 0, num_rows)]
    _check_logprobs([each for each, has in zip(entries, is_there, strict=True) if has], vocab_size)
    return columns.split(entries, counts)


def _check_logprobs(entries: Sequence[Logprobs], vocab_size: int) -> None:
    """Refuse what would reach a client as log probabilities, and are none."""
    if not entries:
        return
    check_token_ids("logprobs.token_ids", np.concatenate([each.token_ids for each in entries]), vocab_size)
    values = np.concatenate([each.values for each in entries])
    if not (values < proposals.SUM_TOLERANCE).all():
        raise InvalidRequestError("logprobs.values", float(values.max()), "must be at most 0")


def _logprobs_to_proto(entry: Logprobs) -> verify_pb2.PositionLogprobs:
    return verify_pb2.PositionLogprobs(
        token_ids=columns.join([entry.token_ids], "<u4"),
        values=columns.join([entry.values], "<f4"),
        num_top=entry.num_top,
    )


def _logprobs_from_proto(message: verify_pb2.PositionLogprobs) -> Logprobs:
    ids = columns.unpack("logprobs.token_ids", message.token_ids, None).astype(np.int64)
    values = columns.unpack("logprobs.values", message.values, None, "<f4")
    if len(ids) != len(values):
        raise InvalidRequestError("logprobs.values", len(values), "must be one for each token id")
    return Logprobs(ids, values, message.num_top)
