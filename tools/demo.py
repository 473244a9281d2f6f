"""`specwire demo`: services of its own and one prompt, without and with speculation, and the cost of each.

By default the target is paced (`emulated.pace`) like a large one on a device of its own; all else is real.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from specwire.cli.supervisor import Stack
from specwire.cli.terminal import dim, passes, stream, table
from specwire.client.client import Client
from specwire.completion import Completion, Stage
from specwire.config.stack import DemoConfig, StackConfig
from specwire.core import SamplingParams
from tools import compare
from tools.compare import likeness, tokens_per_s

PROMPT = '''class Stack:
    """A last-in, first-out stack."""

    def __init__(self'''

_PAGE_ADDRESS = "127.0.0.1:8080"


def run(
    config: StackConfig, prompt: str | None, params: SamplingParams, *, as_json: bool, compares: bool
) -> int:
    """Generate without and with speculation, or with each kind of draft, and show it; leaves no process.

    Raises:
        SpecwireError: a service did not start, or a generation failed.
    """
    text = PROMPT if prompt is None else prompt
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if not as_json:
        print(dim("starting target, draft and coordinator ...", colour), flush=True)
    with Stack(config) as stack, Client(stack.address) as client:

        def generate(title: str, params: SamplingParams) -> Completion:
            # First passes take longer, and later generations find the prompt cached.
            client.generate(text, dataclasses.replace(params, max_tokens=min(16, params.max_tokens or 16)))
            if as_json:
                return client.generate(text, params)
            return stream(client, text, params, title, colour)

        if not as_json:
            print(dim(_pace(config.least_pass_ms), colour))
        if compares:
            compared = list(compare.results(client, params, generate))
            figures, words = compare.to_dict(compared), compare.summary(compared, colour)
        else:
            # Plain decoding runs first, so that speculation is seen to be faster.
            plain = generate("without speculation:", dataclasses.replace(params, num_draft_tokens=0))
            again = dataclasses.replace(params, seed=plain.seed, rule=plain.rule)
            done = generate("with speculation:", again)
            figures = done.to_dict() | {"without_speculation": plain.to_dict()}
            words = _summary(done, plain, _next(config), colour)
        figures["least_pass_ms"] = config.least_pass_ms
    print(json.dumps(figures, ensure_ascii=False, indent=2) if as_json else words)
    return 0


def _pace(least_pass_ms: float) -> str:
    if not least_pass_ms:
        return "not paced: draft and target share this machine, and a pass takes what it takes here"
    return (
        f"paced: a pass of the target takes at least {least_pass_ms:g} ms, like a large model's "
        "on its own device (--least-pass-ms 0: as it is)"
    )


def _next(config: StackConfig) -> str:
    """The command that serves the same models at a pace that shows the gain, as it can be called here."""
    defaults = DemoConfig()
    given = {"least_pass_ms": f"{config.least_pass_ms or defaults.least_pass_ms:g}"}
    names = ("target", "draft", "speculative_config", "device", "draft_device")
    given |= {
        name: getattr(config, name) for name in names if getattr(config, name) != getattr(defaults, name)
    }
    flags = [f"--{name.replace('_', '-')} {shlex.quote(value)}" for name, value in given.items()]
    return " ".join([_called(), "up --http-address", _PAGE_ADDRESS, *flags])


def _called() -> str:
    """This command: by its name, or by its path where the shell would not find it."""
    if shutil.which("specwire"):
        return "specwire"
    beside = Path(sys.executable).with_name("specwire")
    path = os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)
    return shlex.quote(path) if beside.exists() else f"{shlex.quote(sys.executable)} -m specwire.cli"


def _summary(speculative: Completion, plain: Completion, following: str, colour: bool) -> str:
    speculation = speculative.speculation
    fast, slow = tokens_per_s(speculative), tokens_per_s(plain)
    counts = zip(speculation.accepted_per_position, speculation.drafted_per_position, strict=True)
    rates = [f"{num_kept / num:.2f}" for num_kept, num in counts]
    rows = [
        ("without speculation", f"{slow:.0f} tokens/s, {passes(plain.speculation)}"),
        ("with speculation", f"{fast:.0f} tokens/s, {fast / slow:.1f} times as fast"),
        ("passes", passes(speculation)),
        ("text", likeness(speculative, plain)),
        ("acceptance rate", f"{speculation.draft_acceptance_rate:.2f}, by position {' '.join(rates) or '-'}"),
        ("seed", f"{speculative.seed} (another text: --seed N)"),
    ]
    if speculation.why_plain:
        rows.insert(0, ("decoded plainly", speculation.why_plain))
    figures, stages = table(rows, colour), table(_stages(speculative, plain), colour)
    about = dim("next, a page that races both, and OpenAI's API:", colour)
    return "\n".join(["", *figures, "", about, f"  {following}", "", *stages])


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
