"""Beam search between clients and the coordinator: what is asked for, and the texts found. No I/O."""

from __future__ import annotations

from typing import Any

from specwire.completion import FinishReason, Hypothesis
from specwire.core import SamplingParams
from specwire.errors import InvalidRequestError
from specwire.v1 import generation_pb2

_STOPPING: dict[bool | str, generation_pb2.EarlyStopping] = {
    False: generation_pb2.EARLY_STOPPING_HEURISTIC,
    True: generation_pb2.EARLY_STOPPING_AT_ONCE,
    "never": generation_pb2.EARLY_STOPPING_NEVER,
}
_STOPPING_NAMES = {number: name for name, number in _STOPPING.items()} | {
    generation_pb2.EARLY_STOPPING_UNSPECIFIED: False
}


def to_proto(params: SamplingParams) -> generation_pb2.BeamSearch | None:
    """What a request says; None without beam search."""
    _check_together(params)
    if params.num_beams == 1:
        return None
    return generation_pb2.BeamSearch(
        num_beams=params.num_beams,
        length_penalty=params.length_penalty,
        early_stopping=_STOPPING[params.early_stopping],
        num_return_sequences=params.num_return_sequences,
    )


def _check_together(params: SamplingParams) -> None:
    """Raises:
    InvalidRequestError: more texts than beams, or a parameter of beam search without it.
    """
    most = params.num_return_sequences
    if most > params.num_beams:
        raise InvalidRequestError("num_return_sequences", most, f"is over num_beams={params.num_beams}")
    if params.num_beams > 1:
        return
    for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
        value = getattr(params, name)
        if value != default:
            raise InvalidRequestError(name, value, "needs num_beams over 1")


def from_proto(request: generation_pb2.GenerateRequest) -> dict[str, Any]:
    """Arguments of `SamplingParams`; none without beam search.

    Raises:
        InvalidRequestError: fewer than two beams, or an unknown way to stop.
    """
    if not request.HasField("beam_search"):
        return {}
    message = request.beam_search
    if message.num_beams < 2:
        raise InvalidRequestError("num_beams", message.num_beams, "must be at least 2 in beam_search")
    if message.early_stopping not in _STOPPING_NAMES:
        problem = "is not known in this protocol version"
        raise InvalidRequestError("early_stopping", message.early_stopping, problem)
    most = message.num_return_sequences or 1
    if most > message.num_beams:
        raise InvalidRequestError("num_return_sequences", most, f"is over num_beams={message.num_beams}")
    fields: dict[str, Any] = {
        "num_beams": message.num_beams,
        "early_stopping": _STOPPING_NAMES[message.early_stopping],
        "num_return_sequences": most,
    }
    if message.HasField("length_penalty"):
        fields["length_penalty"] = message.length_penalty
    return fields


def hypothesis_to_proto(found: Hypothesis) -> generation_pb2.Hypothesis:
    """One text."""
    stops = found.finish_reason is FinishReason.STOP
    return generation_pb2.Hypothesis(
        token_ids=found.token_ids,
        text=found.text,
        score=found.score,
        finish_reason=generation_pb2.FINISH_REASON_STOP if stops else generation_pb2.FINISH_REASON_LENGTH,
        stop_token_id=found.stop_reason,
    )


def hypothesis_from_proto(message: generation_pb2.Hypothesis) -> Hypothesis:
    """One text."""
    stops = message.finish_reason == generation_pb2.FINISH_REASON_STOP
    return Hypothesis(
        text=message.text,
        token_ids=tuple(message.token_ids),
        score=message.score,
        finish_reason=FinishReason.STOP if stops else FinishReason.LENGTH,
        stop_reason=message.stop_token_id if message.HasField("stop_token_id") else None,
    )
