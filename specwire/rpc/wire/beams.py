"""Beam search between clients and the coordinator: what is asked for, and the texts found. No I/O."""

from __future__ import annotations

from typing import Any

from specwire.completion import FinishReason, Hypothesis
from specwire.core import SamplingParams
from specwire.errors import InvalidRequestError
from specwire.rpc.wire.model import params_from_proto, params_to_proto
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
    if params.num_beams == 1:
        return None
    stopping = _STOPPING[params.early_stopping]
    return generation_pb2.BeamSearch(
        **params_to_proto(generation_pb2.BeamSearch, params), early_stopping=stopping
    )


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
    return params_from_proto(message) | {
        "early_stopping": _STOPPING_NAMES[message.early_stopping],
        "num_return_sequences": message.num_return_sequences or 1,
    }


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
