"""What the front counts in JSON before it parses it, and how many errors are made of it."""

from __future__ import annotations

import json
import random
from typing import Any

import pydantic
import pytest

from specwire.errors import InvalidRequestError
from specwire.http import entry
from specwire.http.bodies.chat import ChatBody
from specwire.http.bodies.completion import CompletionBody
from specwire.http.entry import Scan
from specwire.http.errors import ApiError

CONTEXT_LEN = 100
TEXT_BYTES = 1000


def counts(value: Any) -> tuple[int, int, int]:
    """Values (as commas and containers), containers and keys of parsed JSON."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counts(part) for part in (value if isinstance(value, list) else value.values())]
    num_values, num_containers, num_keys = (sum(part[i] for part in inner) for i in range(3))
    own_keys = len(value) if isinstance(value, dict) else 0
    return num_values + 1 + max(0, len(value) - 1), num_containers + 1, num_keys + own_keys


def any_text(rng: random.Random) -> str:
    return "".join(rng.choices('ab"\\[{,:}]é\n\u4e2d', k=rng.randrange(12)))


def any_json(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 4 else 3)
    if kind == 0:
        return rng.randrange(99)
    if kind <= 2:
        return any_text(rng)
    if kind <= 4:
        return [any_json(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {any_text(rng) + str(i): any_json(rng, depth + 1) for i in range(rng.randrange(4))}


def test_it_counts_what_a_parser_finds_however_the_text_is_cut() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        value = any_json(rng)
        data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        found = Scan(CONTEXT_LEN, TEXT_BYTES)
        while data:
            size = rng.randrange(1, 8)
            found.feed(data[:size])
            data = data[size:]
        assert tuple(found._counts.values()) == counts(value), value


@pytest.mark.parametrize(
    ("unit", "most", "what"),
    [
        (b"1,", entry._MAX_VALUES + CONTEXT_LEN, "values"),
        (b'"a",', entry._MAX_VALUES + CONTEXT_LEN, "values"),
        (b"{},", entry._MAX_CONTAINERS, "lists and objects"),
        (b"[", entry._MAX_CONTAINERS, "lists and objects"),
        (b'"a":', entry._MAX_KEYS, "keys"),
        (b'"a', 3 * TEXT_BYTES, "a string"),
        (b'"\\u00e9', TEXT_BYTES // 2, "a string"),
        (b'"\\\\', 3 * TEXT_BYTES // 2, "a string"),
    ],
)
def test_the_limits(unit: bytes, most: int, what: str) -> None:
    """As many as are allowed, and one more; a unit that opens a string is repeated within it."""
    found = Scan(CONTEXT_LEN, TEXT_BYTES)
    start, repeated = (b'"', unit[1:]) if unit.count(b'"') == 1 else (b"", unit)
    data = start + repeated * most
    for i in range(0, len(data), 1000):
        found.feed(data[i : i + 1000])
    with pytest.raises(ApiError, match=what) as refused:
        found.feed(repeated)
    assert refused.value.status == 413


def body(fields: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m"} | fields).encode()


def said(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


UNKNOWN_KEYS = {f"k{i}": 1 for i in range(30_000)}
WITHIN_LIMITS: dict[str, tuple[type[CompletionBody | ChatBody], dict[str, Any]]] = {
    "objects": (CompletionBody, {"prompt": [{}] * 16_000}),
    "tokens of a wrong type": (CompletionBody, {"prompt": [[1.5] * 100_000]}),
    "unknown keys": (CompletionBody, {"prompt": "x"} | UNKNOWN_KEYS),
    "unknown keys of a message": (ChatBody, {"messages": [said("x") | UNKNOWN_KEYS]}),
    "messages": (ChatBody, {"messages": [{}] * 16_000}),
    "parts": (ChatBody, {"messages": [said([{}] * 16_000)]}),
    "stop strings": (CompletionBody, {"prompt": "x", "stop": [1] * 100_000}),
    "stop tokens": (CompletionBody, {"prompt": "x", "stop_token_ids": ["a"] * 100_000}),
}


@pytest.mark.parametrize("name", WITHIN_LIMITS)
def test_few_errors_are_made_of_a_body_that_is_wrong_all_over(name: str) -> None:
    kind, fields = WITHIN_LIMITS[name]
    data = body(fields)
    with pytest.raises(pydantic.ValidationError) as found:
        kind.model_validate_json(data)
    assert found.value.error_count() < 10
    with pytest.raises(ApiError):
        entry.read(kind, data)


def test_biases_are_counted_before_they_are_looked_at() -> None:
    biases = {str(i): "a" for i in range(30_000)}
    found = entry.read(CompletionBody, body({"prompt": "x", "logit_bias": biases}))
    with pytest.raises(InvalidRequestError, match="more than 4096 ids"):
        found.params()


TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages[2].content[1].type", {"messages": [said("a"), said([TEXT]), said([TEXT, {}])]}),
        ("messages[0].content[0].why", {"messages": [said([TEXT | {"why": 1}])]}),
        ("stop[1]", {"messages": [said("a")], "stop": ["a", 5]}),
        ("messages[1].k0", {"messages": [said("a"), said("b") | {f"k{i}": 1 for i in range(20)}]}),
        ("stop_token_ids[1]", {"messages": [said("a")], "stop_token_ids": [1, "a", "b"]}),
    ],
)
def test_the_first_error_is_named(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        entry.read(ChatBody, body(fields))
    assert refused.value.param == param
