"""Answers of `/v1/responses`: a response, and the events of a stream. No I/O."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from specwire.completion import Chunk, Completion, FinishReason
from specwire.http.answers import Json, record
from specwire.http.bodies.responses import ResponsesBody
from specwire.http.model import Spell
from specwire.http.output import Output
from specwire.http.tools.calls import parser_of

_ECHOED = (
    *("instructions", "max_output_tokens", "temperature", "top_p"),
    *("user", "safety_identifier", "prompt_cache_key"),
)
"""Fields of the request that a response repeats."""
_OF_ERROR = ("code", "message", "param")


class ResponsesAnswer:
    """One response with its id, with the methods of `answers.Answer`.

    created, in_progress, items, completed or incomplete. An item is one of
    output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done,
    output_item.done
    output_item.added, function_call_arguments.delta ..., function_call_arguments.done, output_item.done
    """

    end = b""

    def __init__(self, body: ResponsesBody, _: Spell | None) -> None:
        self._body = body
        self._output = Output(parser_of(body) if body.active_functions else None)
        self._num_events = 0
        choice = body.tool_choice or "auto"
        self._head: Json = {
            "id": "resp_" + secrets.token_hex(16),
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model,
            "error": None,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.functions],
            "metadata": body.metadata or {},
            "reasoning": {"effort": body.effort, "summary": None},
            "text": {"format": body.format.model_dump(by_alias=True, exclude_none=True)},
            "truncation": "disabled",
        } | {name: getattr(body, name) for name in _ECHOED}

    # --- streamed

    def first(self, index: int) -> Sequence[Json]:
        """The response, without output, and the message that the text is for, where there are no tools."""
        begun = self._response("in_progress", [])
        about = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
        return self._numbered([*about, *self._output.begin()])

    def chunk(self, index: int, chunk: Chunk) -> Sequence[Json]:
        """New text or arguments, if there are some."""
        return self._numbered(self._output.add(chunk.text))

    def finish(self, index: int, completion: Completion) -> Sequence[Json]:
        """What was held back, the ends of what has begun, and the response."""
        ends, response = self._ended(completion)
        return self._numbered([*ends, {"type": f"response.{response['status']}", "response": response}])

    def usage(self, completions: Sequence[Completion]) -> Sequence[Json]:
        """Nothing more."""
        return ()

    def error(self, told: Json) -> Json:
        """The event of an error that ends the stream."""
        error = told["error"]
        [event] = self._numbered([{"type": "error"} | {name: error[name] for name in _OF_ERROR}])
        return event

    # --- at once

    def whole(self, completions: Sequence[Completion]) -> Json:
        """The response; `incomplete` if its length was limited."""
        [done] = completions
        self._output.add(done.text)
        return self._ended(done)[1]

    def _ended(self, done: Completion) -> tuple[list[Json], Json]:
        is_cut = done.finish_reason is FinishReason.LENGTH
        ends = self._output.end(is_cut=is_cut)
        response = self._response("incomplete" if is_cut else "completed", self._output.items)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        return ends, response | {"usage": _usage(done), "specwire": record(done)}

    def _response(self, status: str, output: list[Json]) -> Json:
        return self._head | {"status": status, "output": output, "incomplete_details": None, "usage": None}

    def _numbered(self, events: Sequence[Json]) -> Sequence[Json]:
        first, self._num_events = self._num_events, self._num_events + len(events)
        return [{"type": each["type"], "sequence_number": i} | each for i, each in enumerate(events, first)]


def _usage(done: Completion) -> Json:
    num_input, num_output = done.usage.prompt_tokens, done.usage.completion_tokens
    return {
        "input_tokens": num_input,
        "input_tokens_details": {
            "cached_tokens": min(done.usage.cached_tokens, num_input),
            "cache_write_tokens": 0,
        },
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
    }
