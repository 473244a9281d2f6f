"""Tool calls found in text, whole and at any cut."""

from __future__ import annotations

import json
import random
import timeit
from typing import Any

import pytest

from specwire import embedded
from specwire.http.tools.formats import FORMATS, HERMES, LLAMA3, MISTRAL, Format, detected
from specwire.http.tools.json_scan import JsonScan
from specwire.http.tools.parser import Arguments, CallBegins, Content, Event, ToolParser
from specwire.text import tokenizer

NAMES = {"now", "f"}
NOW = '{"name": "now", "arguments": {"zone": "UTC"}}'
F = '{"name": "f", "parameters": {}}'
CALLED_NOW = [CallBegins("now"), Arguments('{"zone": "UTC"}')]
CALLED_F = [CallBegins("f"), Arguments("{}")]


def parsed(form: Format, *pieces: str) -> list[Event]:
    """Events of a text that arrives in pieces, with adjacent ones of a kind joined."""
    parser = ToolParser(form, NAMES)
    found: list[Event] = []
    for event in [*(each for piece in pieces for each in parser.feed(piece)), *parser.flush()]:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            found[-1] = Arguments(last.text + event.text)
        else:
            found.append(event)
    return found


@pytest.mark.parametrize(
    ("form", "text", "events"),
    [
        (HERMES, f"Look.\n<tool_call>\n{NOW}\n</tool_call>\n", [Content("Look."), *CALLED_NOW]),
        (HERMES, f"<tool_call>{NOW}</tool_call> <tool_call>{F}</tool_call>", [*CALLED_NOW, *CALLED_F]),
        (HERMES, f"<tool_call>{NOW}", CALLED_NOW),
        (HERMES, f"<tool_call>{NOW} so", [*CALLED_NOW, Content("so")]),
        (HERMES, '<tool_call>{"arguments": {"a": "ü"}, "name": "f"}</tool_call>',
         [CallBegins("f"), Arguments('{"a": "ü"}')]),
        (LLAMA3, f" {F}; {NOW}", [*CALLED_F, *CALLED_NOW]),
        (LLAMA3, f"So <|python_tag|>{F}", [Content("So"), *CALLED_F]),
        (LLAMA3, '{"type": "function", "name": "f"}', CALLED_F),
        (MISTRAL, f"[TOOL_CALLS] [{NOW}, {F}] end", [*CALLED_NOW, *CALLED_F, Content("end")]),
        (MISTRAL, f"[TOOL_CALLS[TOOL_CALLS][{F}]", [Content("[TOOL_CALLS"), *CALLED_F]),
    ],
)  # fmt: skip
def test_calls(form: Format, text: str, events: list[Event]) -> None:
    assert parsed(form, text) == events


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "a <tool_c"),
        (HERMES, " \n <tool_call> \n"),
        (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "now", arguments: {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "now", "arguments": "zone"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "now", "why": "x"}</tool_call>'),
        (HERMES, NOW),
        (LLAMA3, '{"names": ["now"]}'),
        (LLAMA3, f"Call {F}"),
        (LLAMA3, "<|python_tag|>print(1)"),
        (MISTRAL, f"[TOOL_CALLS]{NOW}"),
        (MISTRAL, '[TOOL_CALLS][{"name": "now"'),
    ],
)
def test_what_only_looks_like_a_call_is_content(form: Format, text: str) -> None:
    assert parsed(form, text) == [Content(text)]


def test_an_id_may_follow_the_arguments() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, "id": "7"}</tool_call> x'
    assert parsed(HERMES, text) == [CallBegins("f"), Arguments("{}"), Content("x")]
    other = text.replace("id", "why")
    assert parsed(HERMES, other)[2:] == [Content(', "why": "7"}</tool_call> x')]


def test_half_of_a_character_stays_escaped() -> None:
    """It is valid JSON, and no text that could be sent."""
    text = '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "f"}</tool_call>'
    assert parsed(HERMES, text) == [CallBegins("f"), Arguments('{"a": "\\ud83d"}')]
    text = '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>'
    assert parsed(HERMES, text) == [Content(text)]


def test_arguments_that_stop_being_json() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1, b}}'
    assert parsed(HERMES, text) == [CallBegins("f"), Arguments('{"a": 1, '), Content("b}}")]
    parser = ToolParser(HERMES, NAMES)
    parser.feed(text)
    assert not parser.is_complete


def test_arguments_are_passed_on_as_they_arrive() -> None:
    parser = ToolParser(HERMES, NAMES)
    assert parser.feed('<tool_call>{"name": "f", "arguments"') == []
    assert parser.feed(': {"a": "so') == [CallBegins("f"), Arguments('{"a": "so')]
    assert not parser.is_complete
    assert parser.feed(' long"}') == [Arguments(' long"}')]
    assert parser.is_complete


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_no_cut_changes_what_is_found_and_nothing_is_lost(form: Format) -> None:
    rng = random.Random(form.name)
    pieces = [form.marker, form.marker[:4], form.end, form.start, form.separator, NOW, F, NOW[:25], "{", "}"]
    pieces += [form.marker + form.start + NOW, form.marker + form.start + F]
    pieces += [" ", "\n", "x", '"', "<", "[", ",", "é"]
    num_called = 0
    for _ in range(400):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 9)))
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
        cut = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        events = parsed(form, text)
        assert events == parsed(form, *cut)
        if not any(isinstance(each, CallBegins) for each in events):
            assert "".join(each.text for each in events if isinstance(each, Content)) == text
        position = 0
        for each in events:  # all is in the text, in its order, and nothing is there twice
            name = each.name if isinstance(each, CallBegins) else each.text
            position = text.index(name, position) + len(name)
        num_called += any(isinstance(each, CallBegins) for each in events)
    assert 20 < num_called < 380


def test_json_is_followed_as_json_reads_it() -> None:
    rng = random.Random(0)
    valid = '{"a": [1, -2.5e3, {"b\\n": null}], "c": "\\u00e9", "d": {}, "e": [], "f": [true, false]}'
    for _ in range(2000):
        text = list(valid)
        for _ in range(rng.randrange(3)):
            text[rng.randrange(1, len(text))] = rng.choice('{}[]",:\\ 01-.etu')
        scan, is_over = JsonScan(), 0
        for num_read, char in enumerate(text, 1):
            if not scan.feed(char):
                break
            if scan.depth == 0:
                is_over = num_read
                break
        try:
            _, end = json.JSONDecoder(parse_constant=lambda name: 1 / 0).raw_decode("".join(text))
        except (ValueError, ZeroDivisionError):
            end = 0
        assert is_over == end, "".join(text)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>{{ x }}</tool_call>", HERMES),
        ('[TOOL_CALLS][{"name"', MISTRAL),
        ('{"name": "f", "parameters": {}}', LLAMA3),
        ("<tool_call><function=f>", None),
        ("[TOOL_CALLS]f[ARGS]{}", None),
        ("{{ tools | tojson }}", None),
    ],
)
def test_the_format_that_a_template_teaches(template: str, form: Format | None) -> None:
    assert detected(template) == form


def test_the_embedded_pair_knows_tools() -> None:
    known = tokenizer.load(embedded.TARGET_DIR)
    assert known is not None
    assert detected(known.tool_template) == HERMES
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    said.append({"role": "tool", "content": "12:00", "tool_call_id": "call_1"})
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    text = known.decode(known.apply_chat_template(said, tools=tools))
    for part in ('# function: {"name": "now"', f"# <tool_call>{NOW}</tool_call>", "# 12:00"):
        assert part in text


@pytest.mark.parametrize("before", ["", "<tool_call>", f"<tool_call>{NOW}"])
def test_long_white_space_is_cheap(before: str) -> None:
    parser = ToolParser(HERMES, NAMES)
    parser.feed(before)
    took_s = timeit.timeit(lambda: parser.feed(" " * 64), number=2000)
    assert took_s < 1  # 2 and more where all of it is read at each character
