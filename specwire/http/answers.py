"""Response bodies: chunks and completions as JSON, in the forms of both APIs. No I/O."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from specwire.completion import Chunk, Completion, FinishReason, Speculation, Token
from specwire.http.bodies.chat import ChatBody
from specwire.http.bodies.completion import CompletionBody
from specwire.http.bodies.generating import Body
from specwire.http.model import Spell
from specwire.http.tools.parser import CallBegins, Content, Event, ToolParser

Json = dict[str, Any]
_RECORD = (
    *("seed", "rule", "reproducible", "why_not_reproducible", "stop_reason"),
    *("speculation", "timing"),
)
_LEAST_LOGPROB = -9999.0
"""Stands for impossible: JSON has no infinity."""


class Answer(ABC):
    """One response of one API, with its id, and the length of each choice's text so far.

    Args:
        spell: text of a token; None if the request asks for no log probabilities.

    Attributes:
        end: of a stream that ends well.
    """

    def __init__(self, body: Body, spell: Spell | None) -> None:
        self._body = body
        self._spell = spell
        self._head = {"id": self.id_prefix + secrets.token_hex(12), "created": int(time.time())}
        self._text_len = Counter[int]()

    id_prefix: str
    object_name: str
    chunk_name: str
    end = b"data: [DONE]\n\n"

    # --- streamed

    def first(self, index: int) -> Json | None:
        """What precedes a choice's first chunk, if anything."""
        return None

    def chunk(self, index: int, chunk: Chunk) -> Json | None:
        """A chunk as it is sent; None for nothing."""
        shown = (*chunk.prompt, *chunk.tokens)
        if not shown and not self._body.return_fates:
            return None
        choice = self._part(index, "".join(token.text for token in shown))
        choice |= {"index": index, "finish_reason": None, "logprobs": self._logprobs(index, shown)}
        if self._body.return_fates:
            choice["specwire"] = fates(chunk)
        return self._piece(choice)

    def finish(self, index: int, completion: Completion) -> Sequence[Json]:
        """The end of a choice."""
        return [self._bare(index, self._part(index, ""), self._reason(index, completion))]

    def usage(self, completions: Sequence[Completion]) -> Json | None:
        """The last chunk of a stream with usage, with the record of every choice."""
        return self._piece() | self._counts(completions) if self._body.includes_usage else None

    def _bare(self, index: int, part: Json, reason: str | None = None) -> Json:
        """A piece without tokens."""
        return self._piece(part | {"index": index, "logprobs": None, "finish_reason": reason})

    def _piece(self, *choices: Json) -> Json:
        piece = self._head | {"object": self.chunk_name, "model": self._body.model, "choices": [*choices]}
        return piece | {"usage": None} if self._body.includes_usage else piece

    def error(self, told: Json) -> Json:
        """The event of an error that ends the stream."""
        return told

    # --- at once

    def whole(self, completions: Sequence[Completion]) -> Json:
        """The response when all choices are complete."""
        choices = [self._choice(i, completion) for i, completion in enumerate(completions)]
        whole = self._head | {"object": self.object_name, "model": self._body.model, "choices": choices}
        return whole | self._counts(completions)

    def _choice(self, index: int, completion: Completion) -> Json:
        echoed = "".join(token.text for token in completion.prompt)
        choice = self._whole_text(index, echoed + completion.text)
        choice |= {"index": index, "finish_reason": self._reason(index, completion)}
        choice["logprobs"] = self._logprobs(index, (*completion.prompt, *completion.tokens))
        if self._body.return_fates:
            choice["specwire"] = {"tokens": [_token(token) for token in completion.tokens]}
        return choice

    def _counts(self, completions: Sequence[Completion]) -> Json:
        return {
            "usage": usage(completions, self._body.num_choices),
            "specwire": [record(completion) for completion in completions],
        }

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> Json | None:
        if self._spell is None:
            return None
        start = self._text_len[index]
        self._text_len[index] += sum(len(token.text) for token in tokens)
        return self._logprobs_from(start, tokens, self._spell)

    # --- by API

    def _reason(self, index: int, completion: Completion) -> str:
        """Why a choice has ended; asked when its text was read."""
        return completion.finish_reason.value

    @abstractmethod
    def _part(self, index: int, text: str) -> Json: ...

    @abstractmethod
    def _whole_text(self, index: int, text: str) -> Json: ...

    @abstractmethod
    def _logprobs_from(self, start: int, tokens: Sequence[Token], spell: Spell) -> Json: ...


def _num_kept(counts: Speculation) -> int:
    """Accepted draft tokens that the output has: not those after the one that ended it."""
    num_cut = counts.num_rounds + counts.num_accepted_tokens - counts.num_tokens
    return counts.num_accepted_tokens - max(0, num_cut - 1)  # one that is cut is the target's own


class CompletionAnswer(Answer):
    """Of `/v1/completions`."""

    _body: CompletionBody
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def first(self, index: int) -> Json | None:
        echoed = self._body.echoed(index)
        return self._bare(index, {"text": echoed}) if echoed else None

    def _part(self, index: int, text: str) -> Json:
        return {"text": text}

    def _whole_text(self, index: int, text: str) -> Json:
        return {"text": self._body.echoed(index) + text}

    def _logprobs_from(self, start: int, tokens: Sequence[Token], spell: Spell) -> Json:
        """Four lists over the tokens; the first token of a prompt has no log probability."""
        lengths = [len(token.text) for token in tokens]
        found = [(token, None if token.logprob is None else _value(token.logprob)) for token in tokens]
        return {
            "tokens": [spell(token.token_id) for token in tokens],
            "token_logprobs": [logprob for _, logprob in found],
            "top_logprobs": [
                None if logprob is None else _alternatives(token, logprob, spell) for token, logprob in found
            ],
            "text_offset": [*accumulate(lengths, initial=start)][:-1],
        }


class Calls:
    """What the text of one choice is in the form of a chat: content, and calls of tools."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._num_begun = 0

    @property
    def are_complete(self) -> bool:
        """Whether there are calls, and the arguments of all are complete."""
        return self._num_begun > 0 and self._parser.is_complete

    def add(self, text: str) -> Json:
        """The delta of more text; empty while nothing is certain."""
        return self._delta(self._parser.feed(text))

    def end(self) -> Json:
        """The delta of what was held back at the end."""
        return self._delta(self._parser.flush())

    def whole(self, text: str) -> Json:
        """The fields of a message with this text."""
        message = self._delta([*self._parser.feed(text), *self._parser.flush()])
        for call in message.get("tool_calls", ()):
            del call["index"]
        return message

    def _delta(self, events: Iterable[Event]) -> Json:
        content, calls = "", list[Json]()
        for event in events:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallBegins):
                call_id, function = "call_" + secrets.token_hex(12), {"name": event.name, "arguments": ""}
                index, self._num_begun = self._num_begun, self._num_begun + 1
                calls.append({"index": index, "id": call_id, "type": "function", "function": function})
            else:
                index = self._num_begun - 1
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += event.text
        return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})


class ChatAnswer(Answer):
    """Of `/v1/chat/completions`. Log probabilities are those of all tokens, of content and calls alike."""

    _body: ChatBody
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, body: ChatBody, spell: Spell | None) -> None:
        super().__init__(body, spell)
        self._calls = defaultdict[int, Calls](lambda: Calls(body.parser()))
        self._no_content = None if body.active_functions else ""

    def first(self, index: int) -> Json:
        return self._bare(index, {"delta": {"role": "assistant", "content": self._no_content}})

    def chunk(self, index: int, chunk: Chunk) -> Json | None:
        """None with tools too, while it is not certain what the text is and nothing else is asked for."""
        piece = super().chunk(index, chunk)
        if piece and self._body.active_functions and not self._body.return_fates:
            [choice] = piece["choices"]
            return piece if choice["delta"] or choice["logprobs"] else None
        return piece

    def finish(self, index: int, completion: Completion) -> Sequence[Json]:
        held = self._calls[index].end()
        last = self._bare(index, {"delta": {}}, self._reason(index, completion))
        return [self._bare(index, {"delta": held}), last] if held else [last]

    def _reason(self, index: int, completion: Completion) -> str:
        is_over = completion.finish_reason is FinishReason.STOP
        called = is_over and self._calls[index].are_complete
        return "tool_calls" if called else super()._reason(index, completion)

    def _part(self, index: int, text: str) -> Json:
        return {"delta": self._calls[index].add(text)}

    def _whole_text(self, index: int, text: str) -> Json:
        message = {"role": "assistant", "content": self._no_content, "refusal": None}
        return {"message": message | self._calls[index].whole(text)}

    def _logprobs_from(self, start: int, tokens: Sequence[Token], spell: Spell) -> Json:
        """One entry for each token, with the requested number of alternatives."""
        content = []
        for token in tokens:
            top = [_entry(spell(token_id), logprob) for token_id, logprob in token.top_logprobs]
            content.append(_entry(spell(token.token_id), token.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}


def _alternatives(token: Token, logprob: float, spell: Spell) -> dict[str, float]:
    """By text, where the likelier of two tokens with the same text wins; includes the emitted token."""
    found: dict[str, float] = {}
    for token_id, each in (*token.top_logprobs, (token.token_id, logprob)):
        found.setdefault(spell(token_id), _value(each))
    return found


def _entry(text: str, logprob: float | None) -> Json:
    """`bytes` is null if the token is only a part of a character."""
    data = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _value(logprob), "bytes": data}


def _value(logprob: float | None) -> float:
    return _LEAST_LOGPROB if logprob is None else max(_LEAST_LOGPROB, logprob)


def fates(chunk: Chunk) -> Json:
    """The extension of a streamed choice: the fate of each token, the round's tree, and progress so far."""
    timing = asdict(chunk.timing) if chunk.timing else None
    return {
        "first_index": chunk.first_index,
        "tokens": [_token(token) for token in chunk.tokens],
        "rejected": [_token(token) for token in chunk.rejected],
        "tree": asdict(chunk.tree) if chunk.tree else None,
        "speculation": chunk.speculation.to_dict() if chunk.speculation else None,
        "timing": timing and {name: round(value, 3) for name, value in timing.items()},
    }


def _token(token: Token) -> Json:
    return {"id": token.token_id, "text": token.text, "fate": token.fate.value, "source": token.source}


def record(completion: Completion) -> Json:
    """The extension of a response: the record of one choice."""
    whole = completion.to_dict()
    score = {"score": completion.hypotheses[0].score} if completion.hypotheses else {}
    return {name: whole[name] for name in _RECORD} | score


def usage(completions: Sequence[Completion], num_choices_per_prompt: int) -> Json:
    """Counts over all choices; a prompt with several choices counts once.

    Draft tokens that were rejected are not part of `completion_tokens`.
    """
    prompts = [completion.usage for completion in completions[::num_choices_per_prompt]]
    num_prompt = sum(counts.prompt_tokens for counts in prompts)
    num_cached = sum(min(counts.cached_tokens, counts.prompt_tokens) for counts in prompts)
    num_completion = sum(completion.usage.completion_tokens for completion in completions)
    speculation = [completion.speculation for completion in completions]
    num_accepted = sum(map(_num_kept, speculation))
    num_drafted = sum(counts.num_draft_tokens for counts in speculation)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafted - num_accepted,
        },
    }
