"""The API as an OpenAPI document, made from the models that check the bodies, and as a page. No I/O."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from html import escape
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.types import ASGIApp

from specwire import __version__
from specwire.http.bodies import part

Json = dict[str, Any]
_REF = "#/components/schemas/"
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; }
code { font-family: ui-monospace, monospace; }
summary { cursor: pointer; padding: .4rem 0; }
td { padding: .1rem 1rem .1rem 0; vertical-align: top; overflow-wrap: anywhere; }
"""


class Operation(NamedTuple):
    """One method of one path.

    Attributes:
        handler: its docstring is the summary.
        body: what it reads; None without one.
        answer: the fields that its JSON always has, with their types; None if it answers with something else.
        content: the media type of that.
        is_open: whether it needs no token.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[ASGIApp]]
    body: type[part.RequestBody] | None = None
    answer: Json | None = None
    content: str = "application/json"
    is_open: bool = False


def described(operations: Sequence[Operation], model: str) -> Json:
    """The document, with the name of the model that is served."""
    bodies = [operation.body for operation in operations if operation.body is not None]
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF + "{model}")
    components = schemas["$defs"]
    for body in bodies:
        components[body.__name__]["properties"]["model"] = {"type": "string", "enum": [model]}
    components["Error"] = _object({"error": _object(dict.fromkeys(("message", "type"), _STRING))})
    paths: dict[str, Json] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "specwire", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


_ABOUT = "OpenAI's API with vLLM's extensions. Unknown parameters are refused by name."
_STRING: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}
_NUMBER: Json = {"type": "number"}
_LIST: Json = {"type": "array"}
_NAME_OR_NULL: Json = {"type": ["string", "null"]}


def _object(fields: Json) -> Json:
    return {"type": "object", "properties": fields, "required": [*fields]}


COMPLETION = {"id": _STRING, "object": _STRING, "created": _INTEGER, "model": _STRING}
COMPLETION |= {"choices": _LIST, "usage": {"type": "object"}, "specwire": _LIST}
RESPONSE = {"id": _STRING, "object": _STRING, "created_at": _INTEGER, "model": _STRING}
RESPONSE |= {"status": _STRING, "output": _LIST, "usage": {"type": "object"}}
MODEL = {"id": _STRING, "object": _STRING, "created": _INTEGER, "owned_by": _STRING}
MODEL |= {"max_model_len": _INTEGER, "specwire": {"type": "object"}, "parent": _NAME_OR_NULL}
MODELS = {"object": _STRING, "data": _LIST | {"items": _object(MODEL)}}
TOKENS = {"count": _INTEGER, "max_model_len": _INTEGER, "tokens": _LIST | {"items": _INTEGER}}
TEXT = {"prompt": _STRING}
WAY = {"name": _STRING, "is_chosen": {"type": "boolean"}}
WAY |= {"expected_tokens_per_s": _NUMBER, "measured_tokens_per_s": _NUMBER}
WAYS = {"why_plain": _STRING, "num_workers": _INTEGER, "ways": _LIST | {"items": _object(WAY)}}
VERSION = {"version": _STRING}
HEALTH = {"status": _STRING}
DOCUMENT = {"openapi": _STRING, "paths": {"type": "object"}}


def _operation(operation: Operation) -> Json:
    schema = _STRING if operation.answer is None else _object(operation.answer)
    answers = {operation.content: {"schema": schema}}
    if operation.body is not None and "stream" in operation.body.model_fields:
        answers["text/event-stream"] = {"schema": _STRING}
    error = {"description": "an error", "content": {"application/json": {"schema": {"$ref": _REF + "Error"}}}}
    told: Json = {
        "summary": inspect.getdoc(operation.handler),
        "operationId": operation.handler.__name__,
        "responses": {"200": {"description": "the answer", "content": answers}, "default": error},
    }
    if operation.body is not None:
        content = {"application/json": {"schema": {"$ref": _REF + operation.body.__name__}}}
        told["requestBody"] = {"required": True, "content": content}
    if "{" in operation.path:
        told["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _STRING}]
    return told if operation.is_open else told | {"security": [{}, {"bearer": []}]}


def page(document: Json) -> str:
    """The document as HTML, without script or anything from elsewhere."""
    info, schemas = document["info"], document["components"]["schemas"]
    sections = "".join(
        _section(method, path, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{escape(info['description'])} "
        f"<a href=openapi.json>openapi.json</a></p>{sections}</html>"
    )


def _section(method: str, path: str, operation: Json, schemas: Json) -> str:
    head = f"<code><b>{method.upper()}</b> {escape(path)}</code> {escape(operation['summary'])}"
    body = operation.get("requestBody")
    if body is None:
        return f"<p>{head}</p>"
    schema = schemas[body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]
    rows = ""
    for name, field in schema["properties"].items():
        note = " (required)" if name in schema.get("required", ()) else ""
        rows += f"<tr><td><code>{escape(name)}</code>{note}<td><code>{escape(_kind(field))}</code>"
    return f"<details><summary>{head}</summary><table>{rows}</table></details>"


def _kind(field: Json) -> str:
    """What a field takes, in short.

    >>> _kind({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]})
    'list of integer'
    """
    if "anyOf" in field:
        kinds = [_kind(each) for each in field["anyOf"] if each.get("type") != "null"]
        return " | ".join(kinds) or "null"
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "const" in field or "enum" in field:
        return " | ".join(map(json.dumps, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    bounds = {"minimum": "from", "maximum": "to"}
    limits = [f" {word} {field[name]}" for name, word in bounds.items() if name in field]
    return str(field.get("type", "any")) + "".join(limits)
