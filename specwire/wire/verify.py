"""Messages of the verify service to nouns and back, all requests or answers of a message at once. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import NamedTuple, TypeVar

import numpy as np

from specwire.core import FloatArray, IntArray, Load, Logprobs, Timings, Verdict
from specwire.errors import InvalidRequestError
from specwire.v1 import common_pb2, verify_pb2
from specwire.wire import columns
from specwire.wire import model as wire

Value = TypeVar("Value")

_NO_IDS: IntArray = np.empty(0, np.int64)
_NO_PROBS: FloatArray = np.empty(0, np.float32)


class VerifyOrder(NamedTuple):
    """A request: commit tokens, and judge draft tokens after them.

    Attributes:
        base_len: length that the sequence is rolled back to, in tokens.
        token_ids: committed after it.
        parents: of the draft tokens; empty for a chain.
        supports: int64, one for each draft token, under rejection; empty where tokens are matched.
        traceparent: of the span around it; empty if it is not traced.
    """

    sequence_id: int
    request_id: int
    base_len: int
    token_ids: Sequence[int]
    draft_token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    supports: Sequence[IntArray] = ()
    traceparent: str = ""


class VerifyAnswer(NamedTuple):
    """The answer to a request.

    Attributes:
        num_cached_tokens: found in the prefix cache instead of being computed.
        load: of the service, as it reports it.
    """

    sequence_id: int
    request_id: int
    verdict: Verdict
    timings: Timings
    num_cached_tokens: int
    load: Load = Load()


def request_to_proto(
    opened: Sequence[common_pb2.OpenSequence], closed: Sequence[int], orders: Sequence[VerifyOrder]
) -> verify_pb2.VerifyRequest:
    """All that is ready, in one message."""
    if not orders:
        return verify_pb2.VerifyRequest(open=opened, close=closed)
    sequence_ids, request_ids, base_lens, token_ids, drafts, parents, supports, traces = zip(
        *orders, strict=True
    )
    num_draft_tokens = [*map(len, drafts)]
    lens, ids = _pack_supports(supports, num_draft_tokens)
    return verify_pb2.VerifyRequest(
        open=opened,
        close=closed,
        sequence_ids=sequence_ids,
        request_ids=request_ids,
        base_lens=base_lens,
        num_tokens=[*map(len, token_ids)],
        token_ids=columns.pack(token_ids),
        num_draft_tokens=num_draft_tokens,
        draft_token_ids=columns.pack(drafts),
        parent_indices=columns.pack_parents(parents, num_draft_tokens),
        support_lens=lens,
        support_token_ids=ids,
        traceparents=columns.traceparents_to(traces),
    )


def _pack_supports(
    supports: Sequence[Sequence[IntArray]], num_draft_tokens: Sequence[int]
) -> tuple[bytes, bytes]:
    """Their lengths, one for each draft token, and their ids; both empty if there are none."""
    if not any(supports):
        return b"", b""
    filled = [
        support
        for own, num in zip(supports, num_draft_tokens, strict=True)
        for support in (own or [_NO_IDS] * num)
    ]
    return columns.pack([[*map(len, filled)]]), columns.join(filled, "<u4")


def orders_from_proto(message: verify_pb2.VerifyRequest) -> list[VerifyOrder]:
    """The requests of a message.

    Raises:
        InvalidRequestError: columns that do not fit each other; the message cannot be read.
    """
    num = len(message.sequence_ids)
    columns.check_lengths(message, num, "request_ids", "base_lens", "num_tokens", "num_draft_tokens")
    num_tokens, num_committed = columns.counts_of("num_tokens", message.num_tokens)
    num_draft_tokens, num_drafted = columns.counts_of("num_draft_tokens", message.num_draft_tokens)
    token_ids = columns.unpack("token_ids", message.token_ids, num_committed).tolist()
    drafts = columns.unpack("draft_token_ids", message.draft_token_ids, num_drafted).tolist()
    return list(
        map(
            VerifyOrder,
            message.sequence_ids,
            message.request_ids,
            message.base_lens,
            columns.split(token_ids, num_tokens),
            columns.split(drafts, num_draft_tokens),
            columns.split_parents(message.parent_indices, num_draft_tokens),
            _split_supports(message, num_draft_tokens),
            columns.traceparents_of(message, num),
        )
    )


def _split_supports(
    message: verify_pb2.VerifyRequest, num_draft_tokens: Sequence[int]
) -> Sequence[Sequence[IntArray]]:
    """Of each request; none where all of its supports are empty."""
    if not message.support_lens:
        return [()] * len(num_draft_tokens)
    lens = columns.unpack("support_lens", message.support_lens, sum(num_draft_tokens)).tolist()
    ids = columns.ids_of("support_token_ids", message.support_token_ids, sum(lens))
    supports: list[IntArray] = columns.split(ids, lens)  # type: ignore[arg-type, assignment]
    owns = columns.split(supports, num_draft_tokens)
    return [own if any(map(len, own)) else () for own in owns]


def response_to_proto(
    answers: Sequence[VerifyAnswer], errors: Sequence[common_pb2.SequenceError], load: Load, incarnation: str
) -> verify_pb2.VerifyResponse:
    """All answers of a pass, in one message."""
    message = verify_pb2.VerifyResponse(incarnation=incarnation, load=wire.load_to_proto(load), errors=errors)
    if not answers:
        return message
    verdicts = [answer.verdict for answer in answers]
    message.sequence_ids.extend([answer.sequence_id for answer in answers])
    message.request_ids.extend([answer.request_id for answer in answers])
    message.base_lens.extend([verdict.base_len for verdict in verdicts])
    message.timings.CopyFrom(columns.timings_to_proto([answer.timings for answer in answers]))
    message.num_cached_tokens.extend([answer.num_cached_tokens for answer in answers])
    message.num_rows.extend([len(verdict.target_token_ids) for verdict in verdicts])
    message.target_token_ids = columns.pack((verdict.target_token_ids for verdict in verdicts), "<i4")
    if any(verdict.target_probs for verdict in verdicts):
        _add_probs(message, verdicts)
    if any(verdict.logprobs for verdict in verdicts):
        message.has_logprobs.extend([bool(verdict.logprobs) for verdict in verdicts])
        rows = chain.from_iterable(verdict.logprobs for verdict in verdicts)
        message.logprobs.extend(map(_logprobs_to_proto, rows))
    return message


def _add_probs(message: verify_pb2.VerifyResponse, verdicts: Sequence[Verdict]) -> None:
    probs = [row for verdict in verdicts for row in _padded(verdict.target_probs, verdict, _NO_PROBS)]
    message.support_lens = columns.pack([[*map(len, probs)]])
    message.target_probs = columns.join(probs, "<f4")
    masses = [mass for verdict in verdicts for mass in _padded(verdict.tail_mass, verdict, 0.0)]
    message.tail_mass = np.array(masses, "<f8").tobytes()


def _padded(values: Sequence[Value], verdict: Verdict, missing: Value) -> list[Value]:
    """One for each row."""
    return [*values, *[missing] * (len(verdict.target_token_ids) - len(values))]


class Rows(NamedTuple):
    """The rows of all answers of a message, before they are split; probabilities are float32.

    Attributes:
        num_rows: of each answer.
        target_token_ids: int32, for each row.
        support_lens: uint32, for each row; empty without probabilities.
        target_probs: on all supports.
        tail_mass: float64, for each row; empty without probabilities.
    """

    num_rows: list[int]
    target_token_ids: IntArray
    support_lens: IntArray
    target_probs: FloatArray
    tail_mass: FloatArray


def rows_from_proto(message: verify_pb2.VerifyResponse) -> Rows:
    """Raises:
    InvalidRequestError: columns that do not fit each other.
    """
    num_rows, num = columns.counts_of("num_rows", message.num_rows)
    has_probs = bool(message.support_lens)
    lens = columns.unpack("support_lens", message.support_lens, num if has_probs else 0)
    return Rows(
        num_rows,
        columns.unpack("target_token_ids", message.target_token_ids, num, "<i4"),
        lens,
        columns.unpack("target_probs", message.target_probs, int(lens.sum(dtype=np.int64)), "<f4"),
        columns.unpack("tail_mass", message.tail_mass, num if has_probs else 0, "<f8"),
    )


def answers_from_proto(message: verify_pb2.VerifyResponse, rows: Rows) -> list[VerifyAnswer]:
    """The answers of a message.

    Raises:
        InvalidRequestError: columns that do not fit each other.
    """
    num = len(message.sequence_ids)
    columns.check_lengths(message, num, "request_ids", "base_lens", "num_cached_tokens", "num_rows")
    verdicts = map(
        Verdict,
        message.base_lens,
        columns.split(rows.target_token_ids.tolist(), rows.num_rows),
        *_split_probs(rows),
        _split_logprobs(message, rows.num_rows),
    )
    return list(
        map(
            VerifyAnswer,
            message.sequence_ids,
            message.request_ids,
            verdicts,
            columns.timings_from_proto(message.timings, num),
            message.num_cached_tokens,
            repeat(wire.load_from_proto(message.load)),
        )
    )


def _split_probs(rows: Rows) -> tuple[Sequence[Sequence[FloatArray]], Sequence[Sequence[float]]]:
    """Probabilities and tail masses of each answer's draft positions; none where it has no supports."""
    nothing: list[Sequence[FloatArray]] = [()] * len(rows.num_rows)
    if not len(rows.support_lens):
        return nothing, [()] * len(rows.num_rows)
    lens = rows.support_lens.tolist()
    probs: list[FloatArray] = columns.split(rows.target_probs, lens)  # type: ignore[arg-type, assignment]
    owns = [own[:-1] for own in columns.split(probs, rows.num_rows)]
    masses = [own[:-1] for own in columns.split(rows.tail_mass.tolist(), rows.num_rows)]
    has_probs = [any(map(len, own)) for own in owns]
    return (
        [own if has else () for own, has in zip(owns, has_probs, strict=True)],
        [own if has else () for own, has in zip(masses, has_probs, strict=True)],
    )


def _split_logprobs(
    message: verify_pb2.VerifyResponse, num_rows: Sequence[int]
) -> Sequence[Sequence[Logprobs]]:
    if not message.has_logprobs:
        return [()] * len(num_rows)
    columns.check_lengths(message, len(num_rows), "has_logprobs")
    counts = [num if has else 0 for num, has in zip(num_rows, message.has_logprobs, strict=True)]
    columns.check_lengths(message, sum(counts), "logprobs")
    return columns.split([*map(_logprobs_from_proto, message.logprobs)], counts)


def _logprobs_to_proto(entry: Logprobs) -> verify_pb2.PositionLogprobs:
    return verify_pb2.PositionLogprobs(
        token_ids=wire.ids_to_bytes(entry.token_ids),
        values=wire.floats_to_bytes(entry.values),
        num_top=entry.num_top,
    )


def _logprobs_from_proto(message: verify_pb2.PositionLogprobs) -> Logprobs:
    ids = wire.ids_from_bytes(message.token_ids, "logprobs.token_ids")
    values = wire.floats_from_bytes(message.values, "logprobs.values")
    if len(ids) != len(values):
        raise InvalidRequestError("logprobs.values", len(values), "must be one for each token id")
    return Logprobs(ids, values, message.num_top)
