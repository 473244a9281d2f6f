"""The page at `/docs`: the OpenAPI document as HTML, without script and without anything from elsewhere."""

from __future__ import annotations

import json
from html import escape
from typing import Any

Json = dict[str, Any]

HEADERS = {
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


def page(document: Json) -> str:
    """The whole document, an operation each a section that opens."""
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
