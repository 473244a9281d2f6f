"""Answers of `/v1/responses`: a response, item by item, and the events of a stream that build it. No I/O."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence

from specwire.completion import Chunk, Completion, FinishReason
from specwire.http.answers import Json, record, usage
from specwire.http.bodies.responses import ResponsesBody
from specwire.http.model import Spell
from specwire.http.tools.parser import CallBegins, Content, Event, ToolParser

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
        self._output = Output(body.parser())
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
        """The response, without output."""
        begun = self._response("in_progress", [])
        kinds = ("created", "in_progress")
        return self._numbered([{"type": f"response.{kind}", "response": begun} for kind in kinds])

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
    """As chats have it, under other names."""
    counts = usage([done], 1)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }


class _Message:
    """Text; its events and its JSON."""

    def __init__(self, index: int) -> None:
        self._at: Json = {"item_id": "msg_" + secrets.token_hex(16), "output_index": index}
        self._text = ""

    def begin(self) -> Iterator[Json]:
        yield _item("added", self._at, self._json("in_progress", []))
        yield {"type": "response.content_part.added", **self._at, "content_index": 0, "part": _part("")}

    def add(self, text: str) -> Json:
        self._text += text
        kind = {"type": "response.output_text.delta", "content_index": 0}
        return kind | self._at | {"delta": text, "logprobs": []}

    def end(self, *, is_cut: bool) -> tuple[list[Json], Json]:
        part, at = _part(self._text), self._at | {"content_index": 0}
        item = self._json("incomplete" if is_cut else "completed", [part])
        events: list[Json] = [
            {"type": "response.output_text.done", **at, "text": self._text, "logprobs": []},
            {"type": "response.content_part.done", **at, "part": part},
        ]
        return [*events, _item("done", self._at, item)], item

    def _json(self, status: str, content: list[Json]) -> Json:
        head = {"id": self._at["item_id"], "type": "message", "role": "assistant"}
        return head | {"status": status, "content": content}


class _Call:
    """A call of a function; its events and its JSON."""

    def __init__(self, index: int, name: str) -> None:
        self._at: Json = {"item_id": "fc_" + secrets.token_hex(16), "output_index": index}
        self._call_id = "call_" + secrets.token_hex(12)
        self._name = name
        self._arguments = ""

    def begin(self) -> Iterator[Json]:
        yield _item("added", self._at, self._json("in_progress"))

    def add(self, text: str) -> Json:
        self._arguments += text
        return {"type": "response.function_call_arguments.delta", **self._at, "delta": text}

    def end(self, *, is_cut: bool) -> tuple[list[Json], Json]:
        """It is complete if its arguments are, whatever follows them."""
        item = self._json("completed" if _is_json(self._arguments) else "incomplete")
        told = {"arguments": self._arguments, "name": self._name}
        done = {"type": "response.function_call_arguments.done", **self._at, **told}
        return [done, _item("done", self._at, item)], item

    def _json(self, status: str) -> Json:
        head = {"id": self._at["item_id"], "type": "function_call", "status": status}
        return head | {"call_id": self._call_id, "name": self._name, "arguments": self._arguments}


class Output:
    """Items in the order of the text: a message wherever it is content, and each call.

    Attributes:
        items: those that have ended, as JSON.
    """

    def __init__(self, parser: ToolParser) -> None:
        self.items: list[Json] = []
        self._parser = parser
        self._open: _Message | _Call | None = None

    def add(self, text: str) -> list[Json]:
        """The events of more text, which begin and end items."""
        return [*self._told(self._parser.feed(text))]

    def end(self, *, is_cut: bool) -> list[Json]:
        """The last events, of a text that may be cut at its limit; one without text is one empty message."""
        events = [*self._told(self._parser.flush())]
        if not self.items and self._open is None:
            events += self._next(_Message(0))
        return [*events, *self._close(is_cut=is_cut)]

    def _told(self, found: Iterable[Event]) -> Iterator[Json]:
        for each in found:
            if isinstance(each, CallBegins):
                yield from self._next(_Call(self._next_index, each.name))
                continue
            if isinstance(each, Content) and not isinstance(self._open, _Message):
                yield from self._next(_Message(self._next_index))
            assert self._open is not None
            yield self._open.add(each.text)

    @property
    def _next_index(self) -> int:
        return len(self.items) + (self._open is not None)

    def _next(self, item: _Message | _Call) -> Iterator[Json]:
        yield from self._close(is_cut=False)
        self._open = item
        yield from item.begin()

    def _close(self, *, is_cut: bool) -> list[Json]:
        if self._open is None:
            return []
        events, item = self._open.end(is_cut=is_cut)
        self._open = None
        self.items.append(item)
        return events


def _item(what: str, at: Json, item: Json) -> Json:
    return {"type": f"response.output_item.{what}", "output_index": at["output_index"], "item": item}


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
