"""`specwire tune`: what passes and drafts cost here, what is accepted of a text, and how it would be drafted.

Services of its own, real models, real requests: at small numbers of streams automatic and plain requests take
turns and are measured; for larger ones the coordinator says what it would choose by what it has learnt.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specwire.cli.supervisor import Stack
from specwire.cli.terminal import aligned
from specwire.client.client import AsyncClient
from specwire.completion import Completion
from specwire.config import extras
from specwire.config.stack import TuneConfig
from specwire.core import Load, SamplingParams
from specwire.errors import ConfigError
from specwire.v1 import generation_pb2
from tools import files
from tools.bench.metrics import total_speculation
from tools.bench.prompts import BUILT_IN

_NUM_PROMPTS, _PROMPT_CHARACTERS = 16, 512
_PASS_TOKENS = (1, 5, 17, 65)
"""Tokens of a sequence in a pass: plain decoding, a chain of 4, trees of 16 and 64."""
_FIXED_TOKENS = 8
"""Draft tokens a round of the first requests: what is accepted is to be known even where it does not pay."""
_NUM_WAYS = 3
"""Ways that are listed for a number of streams, besides plain decoding."""
_PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens/s of all streams together, automatic over plain, turn by turn; the first turns learn."""

    num_streams: int
    automatic: list[float]
    plain: list[float]

    @property
    def ratio(self) -> float:
        """The median of the later half."""
        later = len(self.automatic) // 2
        return statistics.median(
            ours / theirs for ours, theirs in zip(self.automatic[later:], self.plain[later:], strict=True)
        )


def run(config: TuneConfig, params: SamplingParams) -> int:
    """Measure, print the tables, and draw the picture if one is asked for; leaves no process.

    Raises:
        SpecwireError: a service did not start, or a generation failed.
    """
    prompts = read_prompts(config.text)
    if config.picture:
        _check_picture(Path(config.picture))
    print("starting target, draft and coordinator ...", file=sys.stderr, flush=True)
    with Stack(config) as stack:
        text, status = asyncio.run(_tuned(stack.address, prompts, config, params))
    print(text, flush=True)
    if config.picture:
        _draw(Path(config.picture), status)
    return 0


def read_prompts(path: str) -> list[str]:
    """Windows of a file, evenly spread; the built-in ones without a file.

    Raises:
        ConfigError: it cannot be read, or is too short.
    """
    if not path:
        return [*BUILT_IN]
    text = files.read_text("--text", path)
    if len(text) < _PROMPT_CHARACTERS:
        raise ConfigError(f"--text {path}: has {len(text)} characters, under {_PROMPT_CHARACTERS}")
    step = max(1, (len(text) - _PROMPT_CHARACTERS) // (_NUM_PROMPTS - 1))
    starts = range(0, len(text) - _PROMPT_CHARACTERS + 1, step)
    return [text[start : start + _PROMPT_CHARACTERS] for start in starts[:_NUM_PROMPTS]]


async def _tuned(
    address: str, prompts: list[str], config: TuneConfig, params: SamplingParams
) -> tuple[str, generation_pb2.GetStatusResponse]:
    async with AsyncClient(address, timeout_s=600.0) as client:
        target, draft = await client.get_model_info()
        drafted = replace(params, num_draft_tokens=_FIXED_TOKENS)
        done = [await client.generate(prompt, replace(drafted, seed=n)) for n, prompt in enumerate(prompts)]
        found = [
            await _measure(client, prompts, params, num, config)
            for num in config.num_streams
            if num <= config.measured_streams
        ]
        status = await client.get_status(if_num_streams=config.num_streams)
    parts = [_costs(target.costs) if target.costs else "passes were not measured"]
    parts += [_costs(draft.costs, " of the draft")] if draft and draft.costs else []
    parts += [_acceptance(done), _choices(status, {each.num_streams: each for each in found})]
    return "\n\n".join(parts), status


async def _measure(
    client: AsyncClient,
    prompts: Sequence[str],
    params: SamplingParams,
    num_streams: int,
    config: TuneConfig,
) -> Measured:
    """Automatic and plain requests in turns, none of which finds its prompt in a cache."""
    found = Measured(num_streams, [], [])
    for turn in range(config.turns):
        for rates, changes in ((found.automatic, {}), (found.plain, {"num_draft_tokens": 0})):
            salt, began_s = str(time.monotonic_ns()), time.monotonic()
            asked = replace(params, cache_salt=salt, **changes)  # type: ignore[arg-type]
            numbers = range(turn * num_streams, (turn + 1) * num_streams)
            answers = await asyncio.gather(
                *(client.generate(prompts[n % len(prompts)], replace(asked, seed=n)) for n in numbers)
            )
            rates.append(sum(len(each.token_ids) for each in answers) / (time.monotonic() - began_s))
        print(f"{num_streams} streams: turn {turn + 1} of {config.turns}", file=sys.stderr, flush=True)
    return found


def _costs(load: Load, whose: str = "") -> str:
    """Milliseconds of passes, as the model's service measured them when it was loaded."""
    rows = [[f"ms a pass{whose}", *(f"{num} tokens each" for num in _PASS_TOKENS)]]
    for num in (1, 4, 16, 64):
        passes = (load.pass_ns(num, num * tokens) / 1e6 for tokens in _PASS_TOKENS)
        rows.append([f"{num} sequences", *(f"{each:.1f}" for each in passes)])
    if load.draft_pass_ns:
        drafts = (load.own_draft_ns(1, num) / 1e6 for num in (1, 4, 16, 64))
        words = ", ".join(f"{each:.2f}" for each in drafts)
        hosted = f"; of trees {load.draft_hosted_ns / 1e6:.2f} ms more" if load.draft_hosted_ns else ""
        return f"{aligned(rows)}\na pass of the draft for 1, 4, 16, 64 sequences: {words} ms{hosted}"
    return aligned(rows)


def _acceptance(done: Sequence[Completion]) -> str:
    """Of draft tokens by their place, in requests that fix their number."""
    total = total_speculation(each.speculation for each in done)
    counts = zip(total.accepted_per_position, total.drafted_per_position, strict=True)
    rates = [f"{kept / num:.2f}" for kept, num in counts if num]
    return f"accepted of this text, by place in the proposal: {' '.join(rates) or 'nothing was drafted'}"


def _choices(status: generation_pb2.GetStatusResponse, measured: dict[int, Measured]) -> str:
    rows = [["streams", "would draft", "expected / plain", "measured / plain", "next best"]]
    for choice in status.choices:
        plain = next((way.expected_tokens_per_s for way in choice.ways if way.name == _PLAIN), 0.0)
        if not plain:
            continue
        ways = [(way.name, f"{way.expected_tokens_per_s / plain:.2f}") for way in choice.ways]
        others = ", ".join(f"{name} {ratio}" for name, ratio in ways[1 : 1 + _NUM_WAYS])
        seen = measured.get(choice.num_streams)
        ratio = f"{seen.ratio:.2f}" if seen else "-"
        rows.append([str(choice.num_streams), *ways[0], ratio, others])
    return aligned(rows) if len(rows) > 1 else "nothing is known of the costs of drafting: is there a draft?"


def _check_picture(path: Path) -> None:
    """Before anything is measured. Raises ConfigError."""
    files.check_place("--picture", path)
    extras.require("--picture", "bench")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"--picture {path}: does not end in one of {', '.join(known)}")


def _draw(path: Path, status: generation_pb2.GetStatusResponse) -> None:
    """Expected tokens/s of all streams over plain decoding, by way and number of streams; ConfigError of a
    file that cannot be written."""
    from matplotlib.figure import Figure

    series: dict[str, list[tuple[int, float]]] = {}
    for choice in (each for each in status.choices if each.ways):  # none where nothing is known
        plain = next(way.expected_tokens_per_s for way in choice.ways if way.name == _PLAIN)
        for place, way in enumerate(choice.ways):
            if place < _NUM_WAYS or way.name == _PLAIN or way.name in series:
                point = choice.num_streams, way.expected_tokens_per_s / plain
                series.setdefault(way.name, []).append(point)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", xlabel="streams", ylabel="tokens/s over plain decoding, expected")
    axes.set_xticks([choice.num_streams for choice in status.choices])
    axes.get_xaxis().set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    if series:
        axes.legend(fontsize="small")
    files.write("--picture", path, figure.savefig)
