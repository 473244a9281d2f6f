"""Answers of `/v1/responses`: a response with one message, and the events of a stream. No I/O."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from specwire.completion import Chunk, Completion, FinishReason
from specwire.http.answers import Json, record
from specwire.http.bodies.responses import ResponsesBody
from specwire.http.model import Spell

_ECHOED = (
    *("instructions", "max_output_tokens", "temperature", "top_p"),
    *("user", "safety_identifier", "prompt_cache_key"),
)
"""Fields of the request that a response repeats."""


class ResponsesAnswer:
    """One response with its id; see `exchange.Answered`.

    created, in_progress, output_item.added, content_part.added,
    output_text.delta ..., output_text.done, content_part.done, output_item.done, completed or incomplete
    """

    end = b""

    def __init__(self, body: ResponsesBody, model: str, _: Spell | None) -> None:
        self._body = body
        self._message_id = "msg_" + secrets.token_hex(16)
        self._num_events = 0
        self._head: Json = {
            "id": "resp_" + secrets.token_hex(16),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "metadata": body.metadata or {},
            "reasoning": {"effort": body.effort, "summary": None},
            "text": {"format": body.format.model_dump(by_alias=True, exclude_none=True)},
            "truncation": "disabled",
        } | {name: getattr(body, name) for name in _ECHOED}

    # --- streamed

    def first(self, index: int) -> Sequence[Json]:
        """The response, its message and the part of it that the text is for, all empty."""
        begun = self._response("in_progress", [])
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
            self._on_text("response.content_part.added", part=_part("")),
        ]

    def chunk(self, index: int, chunk: Chunk) -> Sequence[Json]:
        """New text, if there is some."""
        if not chunk.text:
            return ()
        return [self._on_text("response.output_text.delta", delta=chunk.text, logprobs=[])]

    def finish(self, index: int, completion: Completion) -> Sequence[Json]:
        """What was empty at first, whole."""
        response = self.whole([completion])
        [message] = response["output"]
        return [
            self._on_text("response.output_text.done", text=completion.text, logprobs=[]),
            self._on_text("response.content_part.done", part=_part(completion.text)),
            self._event("response.output_item.done", output_index=0, item=message),
            self._event(f"response.{response['status']}", response=response),
        ]

    def usage(self, completions: Sequence[Completion]) -> Sequence[Json]:
        """Nothing more."""
        return ()

    def error(self, told: Json) -> Json:
        """The event of an error that ends the stream."""
        error = told["error"]
        return self._event("error", **{name: error[name] for name in ("code", "message", "param")})

    # --- at once

    def whole(self, completions: Sequence[Completion]) -> Json:
        """The response; `incomplete` if its length was limited."""
        [done] = completions
        is_cut = done.finish_reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        response = self._response(status, [self._message(status, [_part(done.text)])])
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        return response | {"usage": _usage(done), "specwire": record(done)}

    def _response(self, status: str, output: list[Json]) -> Json:
        return self._head | {"status": status, "output": output, "incomplete_details": None, "usage": None}

    def _message(self, status: str, content: list[Json]) -> Json:
        head = {"id": self._message_id, "type": "message", "role": "assistant"}
        return head | {"status": status, "content": content}

    def _on_text(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1} | fields


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


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
