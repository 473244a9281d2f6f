"""Messages between clients and the coordinator to nouns and back; `model.py` has the others. No I/O."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from specwire.completion import (
    Chunk,
    Completion,
    DraftTree,
    FinishReason,
    Hypothesis,
    ResumeInfo,
    SourceCounts,
    Speculation,
    Timing,
    Token,
    Usage,
)
from specwire.core import MAX_CREDIT_TOKENS, MIN_CREDIT_TOKENS, Fate, Logprobs, SamplingParams
from specwire.errors import InternalError, InvalidRequestError
from specwire.rpc.wire.model import (
    RULE_NAMES,
    RULES,
    fields_of,
    from_message,
    sampling_from_proto,
    sampling_to_proto,
    to_message,
)
from specwire.text.unicode import HALVED, is_whole
from specwire.v1 import generation_pb2

MAX_MESSAGES = 4096


class _Known(dict[int, Any]):
    """Nouns by their numbers in messages. A number of a later version is refused, an InternalError."""

    def __init__(self, name: str, nouns: Mapping[int, Any]) -> None:
        super().__init__(nouns)
        self._name = name

    def __missing__(self, number: int) -> Any:
        raise InternalError(f"{self._name} {number} of the coordinator is not known to this version")


_FATES = {fate: getattr(generation_pb2, f"FATE_{fate.name}") for fate in Fate}
_FATE_NAMES = _Known("fate", {number: fate for fate, number in _FATES.items()})
_FINISH_REASONS = {reason: getattr(generation_pb2, f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_FINISH_REASON_NAMES = _Known("finish_reason", {number: reason for reason, number in _FINISH_REASONS.items()})
_RULE_NAMES = _Known("rule", RULE_NAMES)
_STOPPING: dict[bool | str, generation_pb2.EarlyStopping] = {
    False: generation_pb2.EARLY_STOPPING_HEURISTIC,
    True: generation_pb2.EARLY_STOPPING_AT_ONCE,
    "never": generation_pb2.EARLY_STOPPING_NEVER,
}
_STOPPING_NAMES = {number: name for name, number in _STOPPING.items()} | {
    generation_pb2.EARLY_STOPPING_UNSPECIFIED: False
}


def generate_request(
    prompt: str | None,
    params: SamplingParams,
    prompt_token_ids: Sequence[int] | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    credit_tokens: int = 0,
    report_progress: bool = False,
) -> generation_pb2.GenerateRequest:
    """A client's first request; exactly one of the three prompt forms must be given.

    Args:
        tools: that the chat template describes to the model; with `messages` only.
        chat_template_kwargs: further variables of the chat template; with `messages` only.
        credit_tokens: most tokens that the generation may be ahead of acknowledgements; 0 for no limit.
        report_progress: whether chunks report the round's draft tokens, and speculation and timing so far.
    """
    given = [form is not None for form in (prompt, prompt_token_ids, messages)]
    if sum(given) != 1:
        raise InvalidRequestError(
            "prompt", sum(given), "give exactly one of prompt, prompt_token_ids, messages"
        )
    request = to_message(
        generation_pb2.GenerateRequest,
        params,
        sampling=sampling_to_proto(params),
        stop_conditions=to_message(generation_pb2.StopConditions, params, max_tokens=params.max_tokens or 0),
        keep_special_tokens=not params.skip_special_tokens,
        prompt_only=params.max_tokens == 0,
        credit_tokens=credit_tokens,
        report_progress=report_progress,
        beam_search=_beams_to_proto(params) if params.num_beams > 1 else None,
    )
    if prompt is not None:
        request.text = prompt
    elif prompt_token_ids is not None:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(_checked_ids(prompt_token_ids))
    elif messages is not None:
        request.messages.SetInParent()
        request.messages.messages.extend(_messages(messages))
    if messages is None and tools:
        raise InvalidRequestError("tools", f"{len(tools)} tools", "are only for messages")
    if messages is None and chat_template_kwargs:
        raise InvalidRequestError("chat_template_kwargs", chat_template_kwargs, "are only for messages")
    if tools:
        if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
            raise InvalidRequestError("tools", tools, "must be a list of objects")
        request.messages.tools = _to_json("tools", [*tools], f"{len(tools)} tools")
    if chat_template_kwargs:
        request.messages.template_kwargs = object_to_json("chat_template_kwargs", chat_template_kwargs)
    return request


def resuming_request(
    original: generation_pb2.GenerateRequest, info: ResumeInfo, token_ids: Sequence[int]
) -> generation_pb2.GenerateRequest:
    """The same request for another coordinator, after these tokens."""
    request = generation_pb2.GenerateRequest()
    request.CopyFrom(original)
    request.sampling.seed = info.seed
    request.sampling.rule = RULES[info.rule]
    request.context_digest = info.context_digest
    request.generated_token_ids.extend(token_ids)
    return request


def resume_info_from_proto(message: generation_pb2.ResumeInfo) -> ResumeInfo:
    """The resume info of a stream's first message."""
    return from_message(ResumeInfo, message, rule=_RULE_NAMES[message.rule])


def _checked_ids(token_ids: Sequence[int]) -> Sequence[int]:
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < 2**31:
        return token_ids  # a long prompt has 100,000 of them
    checked = []
    for i, token_id in enumerate(token_ids):
        try:
            checked.append(operator.index(token_id))  # numpy integers too
        except TypeError:
            raise InvalidRequestError(f"prompt_token_ids[{i}]", token_id, "is not a token id") from None
        if isinstance(token_id, bool) or not 0 <= checked[-1] < 2**31:
            raise InvalidRequestError(f"prompt_token_ids[{i}]", token_id, "is not a token id")
    return checked


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[generation_pb2.Message]:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages", messages, 'must be a list of {"role": ..., "content": ...}')
    out = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise InvalidRequestError(f"messages[{i}]", message, "must have role and content")
        if not all(isinstance(message[name], str) for name in ("role", "content")):
            raise InvalidRequestError(f"messages[{i}]", message, "role and content must be strings")
        for name in ("role", "content"):
            if not is_whole(message[name]):
                raise InvalidRequestError(f"messages[{i}].{name}", message[name], HALVED)
        others = {name: value for name, value in message.items() if name not in ("role", "content")}
        fields = object_to_json(f"messages[{i}]", others) if others else ""
        out.append(
            generation_pb2.Message(role=message["role"], content=message["content"], other_fields=fields)
        )
    return out


def message_from_proto(index: int, message: generation_pb2.Message) -> dict[str, Any]:
    """A message as a chat template sees it."""
    name = f"messages[{index}]"
    others = object_from_json(name, message.other_fields)
    if {"role", "content"} & others.keys():
        raise InvalidRequestError(name, "other_fields", "have a role or content too")
    return {"role": message.role, "content": message.content} | others


def object_to_json(name: str, value: Mapping[str, Any]) -> str:
    """JSON text of an object; `name` is the field of errors, as below."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidRequestError(name, value, "must be an object with names as keys")
    return _to_json(name, dict(value), f"{len(value)} fields")


def _to_json(name: str, value: Any, size: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(name, size, f"cannot be JSON: {error}") from None


def object_from_json(name: str, text: str) -> dict[str, Any]:
    """The object of a JSON text; an empty one for the empty text."""
    value = _from_json(name, text or "{}")
    if not isinstance(value, dict):
        raise InvalidRequestError(name, text[:80], "must be an object")
    return value


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(name, f"{len(text)} characters", f"is not JSON: {error}") from None


def tools_from_json(text: str) -> list[dict[str, Any]]:
    """The tools of a conversation, a list of objects; none for the empty text."""
    tools = _from_json("tools", text or "[]")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequestError("tools", text[:80], "must be a list of objects")
    return tools


def check_prompt_size(request: generation_pb2.GenerateRequest, max_bytes: int) -> None:
    """Check the size of the prompt's text before it is encoded, which takes time that others wait."""
    form = request.WhichOneof("prompt")
    messages = request.messages.messages
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError("messages", len(messages), f"more than {MAX_MESSAGES} messages")
    num_bytes = len(request.text.encode()) if form == "text" else request.messages.ByteSize()
    if num_bytes > max_bytes:
        raise InvalidRequestError(str(form), f"{num_bytes} bytes", f"is over the limit of {max_bytes} bytes")


def check_known(message: Message) -> None:
    """Refuse what a client of another version asks for: protobuf drops a field that it does not know."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    if known.ByteSize() != message.ByteSize():
        name, number = _unknown_field(message, "request")
        problem = "is not known to this version of the coordinator: its client has another one"
        raise InvalidRequestError(name, f"field {number}", problem)


def _unknown_field(message: Message, name: str) -> tuple[str, int]:
    """The first one that is not known, by its number, and the field that has its message; 0 for none."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return name, unknown[0].field_number
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in value if field.is_repeated else (value,):
                if (found := _unknown_field(each, field.name))[1]:
                    return found
    return name, 0


def generate_params(request: generation_pb2.GenerateRequest) -> SamplingParams:
    """All parameters of a client's request."""
    stops = request.stop_conditions
    if ends := request.sampling.end_token_ids:
        problem = "are for model services; use stop_token_ids"
        raise InvalidRequestError("end_token_ids", [*ends], problem)
    fields: dict[str, Any] = {"skip_special_tokens": not request.keep_special_tokens}
    fields |= sampling_from_proto(request.sampling)
    fields |= fields_of(stops, SamplingParams) | fields_of(request, SamplingParams)
    if stops.HasField("max_tokens"):
        fields["max_tokens"] = stops.max_tokens or None
    if request.prompt_only:
        fields["max_tokens"] = 0
    return SamplingParams(**fields, **_beams_from_proto(request))


def _beams_to_proto(params: SamplingParams) -> generation_pb2.BeamSearch:
    return to_message(generation_pb2.BeamSearch, params, early_stopping=_STOPPING[params.early_stopping])


def _beams_from_proto(request: generation_pb2.GenerateRequest) -> dict[str, Any]:
    """Arguments of `SamplingParams` about beam search; none without one."""
    if not request.HasField("beam_search"):
        return {}
    message = request.beam_search
    if message.num_beams < 2:
        raise InvalidRequestError("num_beams", message.num_beams, "must be at least 2 in beam_search")
    if message.early_stopping not in _STOPPING_NAMES:
        problem = "is not known in this protocol version"
        raise InvalidRequestError("early_stopping", message.early_stopping, problem)
    return fields_of(message, SamplingParams) | {
        "early_stopping": _STOPPING_NAMES[message.early_stopping],
        "num_return_sequences": message.num_return_sequences or 1,
    }


def opening_credit(request: generation_pb2.GenerateRequest) -> int:
    """Most tokens that the generation may be ahead of its client; 0 for no limit."""
    credit = request.credit_tokens
    if credit and not MIN_CREDIT_TOKENS <= credit <= MAX_CREDIT_TOKENS:
        problem = f"must be 0 or lie in [{MIN_CREDIT_TOKENS}, {MAX_CREDIT_TOKENS}]"
        raise InvalidRequestError("credit_tokens", credit, problem)
    return credit


def acknowledgement(num_tokens: int) -> generation_pb2.GenerateRequest:
    """A later request of a stream: the client has consumed this many more tokens."""
    return generation_pb2.GenerateRequest(credit_tokens=num_tokens)


def acknowledged_tokens(request: generation_pb2.GenerateRequest) -> int:
    """The number of tokens, at least 1, that a later request of a stream acknowledges, and nothing else."""
    if len(UnknownFieldSet(request)):  # 0.3 us; the whole check takes 2
        check_known(request)
    for field, _ in request.ListFields():
        if field.name != "credit_tokens":
            raise InvalidRequestError(field.name, "set", "only the first request of a stream may set it")
    if request.credit_tokens < 1:
        raise InvalidRequestError("credit_tokens", request.credit_tokens, "must be at least 1")
    return request.credit_tokens


def _token_from_proto(message: generation_pb2.Token, sources: Mapping[int, str]) -> Token:
    return Token(
        token_id=message.id,
        text=message.text,
        fate=_FATE_NAMES[message.fate],
        source=sources[message.source],
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((top.token_id, top.logprob) for top in message.top_logprobs),
    )


class OpenChunk:
    """The next message of a stream, while rounds add to it: one, or several where the client is slower.

    The first message has the resume info.

    Attributes:
        num_tokens: of the output so far, with those of this message.
    """

    def __init__(self, info: ResumeInfo) -> None:
        self.num_tokens = 0
        self._sources = {"": 0}
        self._open()
        sent = self._response.resume_info
        sent.seed, sent.rule, sent.context_digest = info.seed, RULES[info.rule], info.context_digest

    def _open(self) -> None:
        self._response = generation_pb2.GenerateResponse()
        self._chunk = self._response.chunk
        self._chunk.first_index = self.num_tokens
        self._num_named = 0

    def skip(self, num_tokens: int) -> None:
        """An earlier stream has sent so many tokens."""
        self._chunk.first_index = self.num_tokens = self.num_tokens + num_tokens

    def item(self, token_id: int, fate: Fate, source: str, logprobs: Logprobs | None) -> dict[str, Any]:
        """A token without its text, as the other methods take it."""
        token: dict[str, Any] = {"id": token_id, "fate": _FATES[fate]}
        if source:
            token["source"] = self._number(source)
        return token | _reported(token_id, logprobs)

    def add(self, item: Mapping[str, Any], text: str) -> None:
        """A token whose text is certain."""
        self._name_source(item.get("source", 0))
        self._chunk.tokens.add(**item, text=text)
        self.num_tokens += 1

    def add_round(self, token_ids: Sequence[int], last_fate: Fate, source: str) -> None:
        """Tokens of a round without text: all but the last are accepted ones."""
        add, number, accepted = self._chunk.tokens.add, self._number(source), _FATES[Fate.ACCEPTED]
        *first, last = token_ids
        if first:
            self._name_source(number)
        for token_id in first:
            add(id=token_id, fate=accepted, source=number)
        add(id=last, fate=_FATES[last_fate])
        self.num_tokens += len(token_ids)

    def reject(self, token_id: int, source: str, text: str) -> None:
        """A draft token that was rejected."""
        number = self._number(source)
        self._name_source(number)
        self._chunk.rejected.add(id=token_id, text=text, fate=_FATES[Fate.REJECTED], source=number)

    def _number(self, source: str) -> int:
        """Of a source, in all messages of the stream."""
        return self._sources.setdefault(source, len(self._sources))

    def _name_source(self, number: int) -> None:
        """A message names the sources up to the largest number in it."""
        if self._num_named < number:
            self._chunk.sources.extend([*self._sources][self._num_named + 1 : number + 1])
            self._num_named = number

    def take(
        self,
        held: Iterable[Mapping[str, Any]],
        speculation: Speculation | None = None,
        timing: Timing | None = None,
        tree: DraftTree | None = None,
    ) -> generation_pb2.GenerateResponse:
        """The message; what is added from now on is in the next one. For the fields see `Chunk`."""
        response, chunk = self._response, self._chunk
        for item in held:
            self._name_source(item.get("source", 0))
            chunk.held.add(**item)
        if speculation is not None:
            chunk.speculation.CopyFrom(_speculation_to_proto(speculation))
        if timing is not None:
            chunk.timing.CopyFrom(to_message(generation_pb2.GenerationTiming, timing))
        if tree is not None:
            chunk.tree.CopyFrom(to_message(generation_pb2.DraftTree, tree))
        self._open()
        return response


def chunk_from_proto(message: generation_pb2.Chunk) -> Chunk:
    """A chunk as a client sees it."""
    sources = _Known("source", dict(enumerate(["", *message.sources])))
    tokens = tuple(_token_from_proto(token, sources) for token in message.tokens)
    return Chunk(
        text="".join(token.text for token in tokens),
        tokens=tokens,
        rejected=tuple(_token_from_proto(token, sources) for token in message.rejected),
        first_index=message.first_index,
        speculation=_speculation_from_proto(message.speculation) if message.HasField("speculation") else None,
        timing=from_message(Timing, message.timing) if message.HasField("timing") else None,
        held=tuple(_token_from_proto(token, sources) for token in message.held),
        tree=from_message(DraftTree, message.tree) if message.HasField("tree") else None,
        prompt=tuple(_token_from_proto(token, sources) for token in message.prompt),
    )


def prompt_chunk(
    first_index: int, tokens: Iterable[tuple[int, str, Logprobs | None]]
) -> generation_pb2.GenerateResponse:
    """The message with tokens of the prompt from this index on: each with its text and log probabilities."""
    chunk = generation_pb2.Chunk(
        first_prompt_index=first_index,
        prompt=[
            generation_pb2.Token(
                id=token_id, text=text, fate=_FATES[Fate.GIVEN], **_reported(token_id, logprobs)
            )
            for token_id, text, logprobs in tokens
        ],
    )
    return generation_pb2.GenerateResponse(chunk=chunk)


def _reported(token_id: int, logprobs: Logprobs | None) -> dict[str, Any]:
    if logprobs is None:
        return {}
    top = [{"token_id": t, "logprob": v} for t, v in logprobs.top()]
    return {"logprob": logprobs.of(token_id), "top_logprobs": top}


def completion_to_proto(completion: Completion) -> generation_pb2.Completion:
    """The end of a stream; its chunks have text and token ids."""
    reason = completion.stop_reason
    return to_message(
        generation_pb2.Completion,
        completion,
        finish_reason=_FINISH_REASONS[completion.finish_reason],
        stop_string=reason if isinstance(reason, str) else None,
        stop_token_id=reason if isinstance(reason, int) else None,
        rule=RULES[completion.rule],
        usage=to_message(generation_pb2.Usage, completion.usage),
        speculation=_speculation_to_proto(completion.speculation),
        timing=to_message(generation_pb2.GenerationTiming, completion.timing),
        hypotheses=[
            to_message(
                generation_pb2.Hypothesis,
                found,
                finish_reason=_FINISH_REASONS[found.finish_reason],
                stop_token_id=found.stop_reason,
            )
            for found in completion.hypotheses
        ],
    )


def completion_from_proto(
    message: generation_pb2.Completion, tokens: Sequence[Token], num_resumes: int = 0
) -> Completion:
    """The completion of a generation with these tokens, which was resumed `num_resumes` times."""
    which = message.WhichOneof("stop_reason")
    return from_message(
        Completion,
        message,
        text="".join(token.text for token in tokens),
        token_ids=tuple(token.token_id for token in tokens),
        tokens=tuple(tokens),
        num_resumes=num_resumes,
        finish_reason=_FINISH_REASON_NAMES[message.finish_reason],
        stop_reason=getattr(message, which) if which else None,
        rule=_RULE_NAMES[message.rule],
        usage=from_message(Usage, message.usage),
        speculation=_speculation_from_proto(message.speculation),
        timing=from_message(Timing, message.timing),
        hypotheses=tuple(
            from_message(
                Hypothesis,
                found,
                finish_reason=_FINISH_REASON_NAMES[found.finish_reason],
                stop_reason=found.stop_token_id if found.HasField("stop_token_id") else None,
            )
            for found in message.hypotheses
        ),
    )


def _speculation_to_proto(speculation: Speculation) -> generation_pb2.Speculation:
    by_source = [to_message(generation_pb2.SourceCounts, counts) for counts in speculation.by_source]
    return to_message(generation_pb2.Speculation, speculation, by_source=by_source)


def _speculation_from_proto(message: generation_pb2.Speculation) -> Speculation:
    by_source = tuple(from_message(SourceCounts, counts) for counts in message.by_source)
    return from_message(Speculation, message, by_source=by_source)
