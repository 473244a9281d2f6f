"""Calls as OpenAI's API writes them, and responses of `/v1/chat/completions` that may have some. No I/O."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence

from specwire.completion import Chunk, Completion, FinishReason
from specwire.http.answers import ChatAnswer, Json
from specwire.http.bodies.calling import Calling
from specwire.http.bodies.chat import ChatBody
from specwire.http.model import Spell
from specwire.http.tools.parser import CallBegins, Content, Event, ToolParser


def parser_of(body: Calling) -> ToolParser:
    """Of the text that answers a request with tools."""
    names = {function.name for function in body.callable_functions}
    return ToolParser(body.call_format, names, 1 if body.parallel_tool_calls is False else None)


class Calls:
    """Deltas of the text of one choice, and the message that they add up to."""

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

    def message(self, text: str) -> Json:
        delta = self._delta([*self._parser.feed(text), *self._parser.flush()])
        message = {"role": "assistant", "content": delta.get("content"), "refusal": None}
        calls = [{k: v for k, v in call.items() if k != "index"} for call in delta.get("tool_calls", ())]
        return message | ({"tool_calls": calls} if calls else {})

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


class ToolAnswer(ChatAnswer):
    """Log probabilities are those of all tokens, of content and calls alike."""

    first_content = None

    def __init__(self, body: ChatBody, spell: Spell | None) -> None:
        super().__init__(body, spell)
        self._calls = defaultdict[int, Calls](lambda: Calls(parser_of(body)))

    def chunk(self, index: int, chunk: Chunk) -> Json | None:
        piece = super().chunk(index, chunk)
        if piece is None:
            return None
        [choice] = piece["choices"]
        choice["delta"] = self._calls[index].add("".join(token.text for token in chunk.tokens))
        is_empty = not choice["delta"] and choice["logprobs"] is None and not self._body.return_fates
        return None if is_empty else piece

    def finish(self, index: int, completion: Completion) -> Sequence[Json]:
        held = self._calls[index].end()
        last = self._only(index, {}, self._reason(index, completion))
        return [self._piece([each]) for each in ([self._only(index, held)] if held else []) + [last]]

    def _choice(self, index: int, completion: Completion) -> Json:
        choice = super()._choice(index, completion)
        return choice | {"finish_reason": self._reason(index, completion)}

    def _whole_text(self, index: int, text: str) -> Json:
        return {"message": self._calls[index].message(text)}

    def _reason(self, index: int, completion: Completion) -> str:
        is_over = completion.finish_reason is FinishReason.STOP
        return "tool_calls" if is_over and self._calls[index].are_complete else completion.finish_reason.value


def chat_answer(body: ChatBody, spell: Spell | None) -> ChatAnswer:
    """The answer to a conversation with or without tools."""
    return (ToolAnswer if body.active_functions else ChatAnswer)(body, spell)
