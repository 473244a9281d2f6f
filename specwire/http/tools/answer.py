"""Responses of `/v1/chat/completions` whose text may have tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from specwire.completion import Chunk, Completion, FinishReason
from specwire.http.answers import ChatAnswer, Json
from specwire.http.bodies.chat import ChatBody
from specwire.http.model import Spell
from specwire.http.tools.calls import Calls, parser_of


class ToolAnswer(ChatAnswer):
    """Log probabilities are those of all tokens, of content and calls alike."""

    _body: ChatBody
    first_content = None

    def __init__(self, body: ChatBody, model: str, spell: Spell | None) -> None:
        super().__init__(body, model, spell)
        self._calls: dict[int, Calls] = {}

    def chunk(self, index: int, chunk: Chunk) -> Json | None:
        piece = super().chunk(index, chunk)
        if piece is None:
            return None
        [choice] = piece["choices"]
        choice["delta"] = self._calls_of(index).add("".join(token.text for token in chunk.tokens))
        is_empty = not choice["delta"] and choice["logprobs"] is None and not self._body.return_fates
        return None if is_empty else piece

    def finish(self, index: int, completion: Completion) -> Sequence[Json]:
        held = self._calls_of(index).end()
        last = self._only(index, {}, self._reason(index, completion))
        return [self._piece([each]) for each in ([self._only(index, held)] if held else []) + [last]]

    def _choice(self, index: int, completion: Completion) -> Json:
        choice = super()._choice(index, completion)
        return choice | {"finish_reason": self._reason(index, completion)}

    def _whole_text(self, index: int, text: str) -> Json:
        return {"message": self._calls_of(index).message(text)}

    def _reason(self, index: int, completion: Completion) -> str:
        is_over = completion.finish_reason is FinishReason.STOP
        return "tool_calls" if is_over and self._calls[index].are_complete else completion.finish_reason.value

    def _calls_of(self, index: int) -> Calls:
        if index not in self._calls:
            self._calls[index] = Calls(parser_of(self._body))
        return self._calls[index]


def chat_answer(body: ChatBody, model: str, spell: Spell | None) -> ChatAnswer:
    """The answer to a conversation with or without tools."""
    return (ToolAnswer if body.active_functions else ChatAnswer)(body, model, spell)
