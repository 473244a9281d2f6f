"""What does not combine with beam search, refused by name. Pure."""

from __future__ import annotations

from coordinator.drafts.choice import DraftChoice
from specwire.core import MAX_LOGPROBS, PARAMETERS, ModelInfo, SamplingParams
from specwire.errors import UnsupportedError
from specwire.rule.beam_search import BeamRules
from specwire.v1 import generation_pb2

_ALLOWED = {
    *("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "max_tokens"),
    *("stop_token_ids", "ignore_eos", "skip_special_tokens", "num_draft_tokens", "max_depth", "draft"),
    *("cache_salt", "temperature", "seed", "adapter"),
}
"""It ranks texts by the target's own log probabilities, which no other parameter may change."""


def check_beams(
    message: generation_pb2.GenerateRequest,
    params: SamplingParams,
    target: ModelInfo,
    choice: DraftChoice,
) -> DraftChoice:
    """Refuse a beam search with what does not combine with it.

    Args:
        params: as the client gave them.
        choice: what proposes for requests of this kind.

    Returns:
        What proposes for this one: the draft model, where the choice has it, or nothing.

    Raises:
        UnsupportedError: naming the field.
    """
    resumes = bool(message.context_digest)
    neutral = SamplingParams(temperature=0)
    for name in ("temperature", *(name for name in PARAMETERS if name not in _ALLOWED)):
        value, only = getattr(params, name), getattr(neutral, name)
        if value != only and not (resumes and name == "rule"):
            raise UnsupportedError(name, value, f"beam search is without: it must be {only!r}")
    if params.seed is not None and not resumes:
        raise UnsupportedError("seed", params.seed, "beam search draws no random numbers")
    num_given = len(message.generated_token_ids)
    if num_given and not resumes:
        raise UnsupportedError("generated_token_ids", num_given, "beam search begins at the prompt")
    if message.report_progress:
        raise UnsupportedError("report_progress", True, "beam search has nothing to report before its end")
    is_named = params.draft is not None
    if is_named and (choice.method or choice.uses_own):
        raise UnsupportedError("draft", params.draft, "beam search drafts by a model, or not at all")
    num_ends, most = len(end_ids(params, target)), min(MAX_LOGPROBS, target.vocab_size)
    if params.num_beams + num_ends > most:
        raise UnsupportedError("num_beams", params.num_beams, f"with {num_ends} end tokens is over {most}")
    return DraftChoice(uses_model=choice.uses_model)


def end_ids(params: SamplingParams, target: ModelInfo) -> frozenset[int]:
    """Tokens that end a text."""
    own = () if params.ignore_eos else target.eos_token_ids
    return frozenset((*params.stop_token_ids, *own))


def rules_of(params: SamplingParams, target: ModelInfo) -> BeamRules | None:
    """The search that a request with `max_tokens` asks for; None without one."""
    if params.num_beams == 1:
        return None
    assert params.max_tokens is not None
    return BeamRules(
        num_beams=params.num_beams,
        max_tokens=params.max_tokens,
        end_ids=end_ids(params, target),
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
