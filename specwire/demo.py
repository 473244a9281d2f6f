"""`specwire demo`: three processes, one prompt, every token coloured by its fate, and what it cost.

Colours as in figure 1 of Leviathan et al. (2023): accepted green, rejected red and struck through,
recovered and bonus blue.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TextIO

from specwire.client import Client
from specwire.config import StackConfig
from specwire.core import Chunk, Completion, Fate, SamplingParams, Token
from specwire.supervisor import Stack

PROMPT = '''class Stack:
    """A last-in, first-out stack."""

    def __init__(self'''

_COLOURS = {
    Fate.ACCEPTED: "\x1b[32m",
    Fate.REJECTED: "\x1b[31;9m",
    Fate.RECOVERED: "\x1b[34m",
    Fate.BONUS: "\x1b[34m",
}
_DIM, _BOLD, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """Text with control characters made visible: what a model writes must not steer the terminal."""
    return text.translate(_CONTROLS)


def run(config: StackConfig, prompt: str | None, params: SamplingParams, *, as_json: bool) -> int:
    """Generate with and without speculation and show both; no process is left behind.

    Raises:
        SpecwireError: a service did not come up, or the generation failed.
    """
    prompt = PROMPT if prompt is None else prompt
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if not as_json:
        print(_paint("starting draft service, verify service and coordinator ...", _DIM, colour), flush=True)
    with Stack(config) as stack, Client(stack.address) as client:
        warm_up = SamplingParams(
            max_tokens=min(16, params.max_tokens), num_draft_tokens=params.num_draft_tokens
        )
        client.generate(prompt, warm_up)
        speculative = client.generate(prompt, params) if as_json else _stream(client, prompt, params, colour)
        plain = client.generate(prompt, _without_speculation(params, speculative))
    if as_json:
        both = speculative.to_dict() | {"without_speculation": plain.to_dict()}
        print(json.dumps(both, ensure_ascii=False, indent=2))
    else:
        print(_summary(speculative, plain, colour))
    return 0


def _without_speculation(params: SamplingParams, done: Completion) -> SamplingParams:
    values = {name: getattr(params, name) for name in params.__dataclass_fields__}
    return SamplingParams(**values | {"num_draft_tokens": 0, "seed": done.seed, "rule": done.rule})


def _stream(client: Client, prompt: str, params: SamplingParams, colour: bool) -> Completion:
    print(_paint("accepted", _COLOURS[Fate.ACCEPTED], colour), end=" ")
    print(_paint("rejected", _COLOURS[Fate.REJECTED], colour), end=" ")
    print(_paint("recovered or bonus", _COLOURS[Fate.BONUS], colour), end="\n\n")
    print(_paint(printable(prompt), _BOLD, colour), end="", flush=True)
    with client.stream(prompt, params) as stream:
        for chunk in stream:
            _show(chunk, colour, sys.stdout)
        print("\n")
        return stream.completion


def _show(chunk: Chunk, colour: bool, out: TextIO) -> None:
    """The refused token stands before the one that replaced it; plain output has only the text."""
    if not colour:
        out.write(printable(chunk.text))
    else:
        recovered = [i for i, token in enumerate(chunk.tokens) if token.fate is Fate.RECOVERED]
        split = recovered[-1] if recovered else len(chunk.tokens)  # it may be held back until it is certain
        for token in (*chunk.tokens[:split], *chunk.rejected, *chunk.tokens[split:]):
            out.write(_painted(token))
    out.flush()


def _painted(token: Token) -> str:
    text = printable(token.text)
    if token.fate is Fate.REJECTED:  # a struck-out line break must not break the line
        text = text.replace("\n", "⏎")
    return _paint(text, _COLOURS[token.fate], True)


def _paint(text: str, code: str, colour: bool) -> str:
    return f"{code}{text}{_RESET}" if colour and text else text


def _summary(speculative: Completion, plain: Completion, colour: bool) -> str:
    speculation, timing = speculative.speculation, speculative.timing
    rates = [
        f"{accepted / drafted:.2f}"
        for accepted, drafted in zip(
            speculation.accepted_per_position, speculation.drafted_per_position, strict=True
        )
    ]
    stages = {
        "draft": timing.draft_ms,
        "verify": timing.verify_ms,
        "rule": timing.rule_ms,
        "network": timing.network_ms,
        "queue": timing.queue_ms,
    }
    rows = [
        ("tokens", f"{speculative.usage.completion_tokens} in {speculation.num_rounds} rounds"),
        ("acceptance length", f"{speculation.mean_acceptance_length:.2f} tokens a round"),
        ("acceptance rate", f"{speculation.draft_acceptance_rate:.2f}, by position {' '.join(rates) or '-'}"),
        ("time", _shares(stages, timing.total_ms)),
        ("with speculation", f"{_tokens_per_s(speculative):.0f} tokens/s"),
        ("without", f"{_tokens_per_s(plain):.0f} tokens/s, same prompt, same verify service"),
        ("seed", str(speculative.seed)),
    ]
    if speculation.draft_unavailable:
        rows.insert(0, ("draft", f"not used: {speculation.draft_unavailable}"))
    lines = [_paint(f"{name:>18}", _DIM, colour) + f"  {value}" for name, value in rows]
    return "\n".join([*lines, "", *_beside(speculative, plain, colour)])


def _shares(stages: dict[str, float], total_ms: float) -> str:
    parts = [f"{name} {ms:.0f} ms" for name, ms in stages.items()]
    return f"{total_ms:.0f} ms: " + ", ".join(parts)


def _tokens_per_s(done: Completion) -> float:
    return done.usage.completion_tokens / done.timing.total_ms * 1e3


def _beside(speculative: Completion, plain: Completion, colour: bool) -> list[str]:
    """The text without speculation, for comparison."""
    if plain.text == speculative.text:
        return [_paint("without speculation: the same text, token for token", _DIM, colour)]
    title = "without speculation (another draw from the same distribution):"
    return [_paint(title, _DIM, colour), printable(plain.text)]
