"""`specwire demo`: three processes and one prompt, without and with speculation, and the cost of each.

On one machine draft and target share the processors, unlike separate services. So by default the target is
paced (`engine/paced.py`) like a large one on a device of its own; all else is real.

Colours as in figure 1 of Leviathan et al. (2023): accepted green, rejected red and struck through,
recovered and bonus blue.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from specwire.cli.supervisor import Stack
from specwire.client.client import Client
from specwire.completion import Chunk, Completion, Speculation, Stage, Token
from specwire.config.services import StackConfig
from specwire.core import Fate, SamplingParams

PROMPT = '''class Stack:
    """A last-in, first-out stack."""

    def __init__(self'''

_NEXT = "next: specwire up --http-address 127.0.0.1:8080    a page that races both, and OpenAI's API"
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
    """Text with control characters made visible: a model's output must not control the terminal."""
    return text.translate(_CONTROLS)


def run(config: StackConfig, prompt: str | None, params: SamplingParams, *, as_json: bool) -> int:
    """Generate without and with speculation and show both; leaves no process behind.

    Raises:
        SpecwireError: a service did not start, or the generation failed.
    """
    prompt = PROMPT if prompt is None else prompt
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if not as_json:
        print(_paint("starting draft service, verify service and coordinator ...", _DIM, colour), flush=True)
    with Stack(config) as stack, Client(stack.address) as client:
        _warm_up(client, prompt, params)
        if as_json:
            both = _both(lambda params: client.generate(prompt, params), params)
            speculative, plain = (done.to_dict() for done in both)
            shown = speculative | {"without_speculation": plain, "least_pass_ms": config.least_pass_ms}
            print(json.dumps(shown, ensure_ascii=False, indent=2))
        else:
            print(_paint(_pace(config.least_pass_ms), _DIM, colour))
            both = _both(lambda params: _stream(client, prompt, params, colour), params)
            print(_summary(*both, colour))
    return 0


def _warm_up(client: Client, prompt: str, params: SamplingParams) -> None:
    """First passes take longer, and the second generation would find the prompt cached."""
    few = min(16, params.max_tokens or 16)
    client.generate(prompt, SamplingParams(max_tokens=few, num_draft_tokens=params.num_draft_tokens))


def _both(
    generate: Callable[[SamplingParams], Completion], params: SamplingParams
) -> tuple[Completion, Completion]:
    """With speculation, and without, which runs first, so that speculation is seen to be faster."""
    plain = generate(dataclasses.replace(params, num_draft_tokens=0))
    return generate(dataclasses.replace(params, seed=plain.seed, rule=plain.rule)), plain


def _pace(least_pass_ms: float) -> str:
    if not least_pass_ms:
        return "not paced: draft and target share this machine, and a pass takes what it takes here"
    return (
        f"paced: a pass of the target takes at least {least_pass_ms:g} ms, like a large model's "
        "on its own device (--least-pass-ms 0: as it is)"
    )


def _stream(client: Client, prompt: str, params: SamplingParams, colour: bool) -> Completion:
    by_fate = colour and params.num_draft_tokens != 0
    print("\n" + _title(params, by_fate=by_fate, colour=colour))
    print(_paint(printable(prompt), _BOLD, colour), end="", flush=True)
    with client.stream(prompt, params) as stream:
        for chunk in stream:
            _show(chunk, by_fate, sys.stdout)
        print()
        return stream.completion


def _title(params: SamplingParams, *, by_fate: bool, colour: bool) -> str:
    words = "without speculation:" if params.num_draft_tokens == 0 else "with speculation:"
    fates = {"accepted": Fate.ACCEPTED, "rejected": Fate.REJECTED, "recovered or bonus": Fate.BONUS}
    legend = [_paint(words, _COLOURS[fate], True) for words, fate in fates.items()] if by_fate else []
    return " ".join([_paint(words, _DIM, colour), *legend])


def _show(chunk: Chunk, colour: bool, out: TextIO) -> None:
    """Shows a rejected token before the one that replaced it; plain output has only the text."""
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
    speculation = speculative.speculation
    fast, slow = _tokens_per_s(speculative), _tokens_per_s(plain)
    rows = [
        ("without speculation", f"{slow:.0f} tokens/s, {_passes(plain)}"),
        ("with speculation", f"{fast:.0f} tokens/s, {_passes(speculative)}: {fast / slow:.1f} times as fast"),
        ("text", _likeness(speculative, plain)),
        ("acceptance length", f"{speculation.mean_acceptance_length:.2f} tokens a pass"),
        ("acceptance rate", _acceptance(speculation)),
        ("seed", f"{speculative.seed} (another text: --seed N)"),
    ]
    if speculation.draft_unavailable:
        rows.insert(0, ("draft", f"not used: {speculation.draft_unavailable}"))
    figures, stages = _table(rows, colour), _table(_stages(speculative, plain), colour)
    return "\n".join(["", *figures, "", _paint(_NEXT, _DIM, colour), "", *stages])


def _table(rows: Sequence[tuple[str, str]], colour: bool) -> list[str]:
    return [_paint(f"{name:>19}", _DIM, colour) + f"  {value}" for name, value in rows]


def _passes(done: Completion) -> str:
    return f"{done.usage.completion_tokens} tokens in {done.speculation.num_rounds} passes of the target"


def _likeness(speculative: Completion, plain: Completion) -> str:
    same = plain.token_ids == speculative.token_ids
    return "the same, token for token" if same else "another draw from the same distribution"


def _acceptance(speculation: Speculation) -> str:
    drafted, accepted = speculation.drafted_per_position, speculation.accepted_per_position
    rates = [f"{num_kept / num:.2f}" for num_kept, num in zip(accepted, drafted, strict=True)]
    return f"{speculation.draft_acceptance_rate:.2f}, by position {' '.join(rates) or '-'}"


def _stages(speculative: Completion, plain: Completion) -> list[tuple[str, str]]:
    """Where the time of a token went, stage by stage; the last row is the sum of those above it."""
    with_it, without = _per_token(speculative), _per_token(plain)
    rows = [(stage.replace("_", " "), with_it[stage], without[stage]) for stage in Stage]
    rows = [row for row in rows if any(row[1:])]
    rows.append(("sum", sum(with_it.values()), sum(without.values())))
    head = ("ms per token", "with speculation  without")
    return [head, *((name, f"{ours / 100:16.2f}  {other / 100:7.2f}") for name, ours, other in rows)]


def _per_token(done: Completion) -> dict[Stage, int]:
    """Each stage in hundredths of a millisecond; rounded so that they add up to the rounded sum."""
    found, sum_ms, rounded = {}, 0.0, 0
    for stage, spent_ms in done.timing.stages.items():
        sum_ms += spent_ms
        found[stage] = round(100 * sum_ms / max(1, done.usage.completion_tokens)) - rounded
        rounded += found[stage]
    return found


def _tokens_per_s(done: Completion) -> float:
    return done.usage.completion_tokens / done.timing.total_ms * 1e3
