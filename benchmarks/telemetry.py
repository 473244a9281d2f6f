"""`python -m benchmarks.telemetry`: what tracing costs with a collector that works, refuses, or stays silent.

Four stacks of service processes on emulated devices, alike but for their collector, take turns at the same
seeded requests, without outcomes prepared ahead: else stacks would differ in what they found to pay.
Passes of the devices cost time and no processor, so that what tracing costs the processor is seen in full,
and what it costs a client is seen in tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.bars import Bar, Report, machine
from benchmarks.processes import Devices, Usage
from benchmarks.stats import ratios, summarise
from specwire import AsyncClient, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from tools.timeline.receiver import Receiver

OFF, LIVE, REFUSES, SILENT = "no tracing", "collector works", "collector refuses", "collector is silent"
MIN_RATIO = 0.98
MAX_GROWTH_MIB = 32.0
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    num_streams: int = 8
    num_tokens: int = 128
    num_repetitions: int = 7
    devices: Devices = field(default_factory=lambda: Devices(num_outcomes="0"))


@dataclass
class Found:
    """Of one stack, one entry a repetition.

    Attributes:
        tokens_per_s: of all streams together.
        cpu_ms: processor time of the three services for 1,000 tokens.
        rss_mib: of the three services afterwards.
    """

    tokens_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)


@contextlib.contextmanager
def collectors() -> Iterator[dict[str, str]]:
    """Endpoint by name; empty for none."""
    with socket.socket() as refuses, socket.create_server(("127.0.0.1", 0)) as silent, Receiver() as live:
        refuses.bind(("127.0.0.1", 0))  # and does not listen
        yield {
            OFF: "",
            LIVE: live.endpoint,
            REFUSES: f"http://127.0.0.1:{refuses.getsockname()[1]}",
            SILENT: f"http://127.0.0.1:{silent.getsockname()[1]}",
        }


async def one_turn(address: str, plan: Plan) -> float:
    """Tokens a second of all streams together."""
    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as client:
        await client.get_status()
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for seed in range(plan.num_streams):
                params = SamplingParams(rule=Rule.GUMBEL, seed=seed, max_tokens=plan.num_tokens)
                group.create_task(client.generate(params=params, prompt_token_ids=PROMPT))
        return plan.num_streams * plan.num_tokens / (time.perf_counter() - started_s)


def measure(plan: Plan) -> dict[str, Found]:
    """All stacks by turns; the first turn of each is not counted."""
    found: dict[str, Found] = {}
    with contextlib.ExitStack() as exits:
        endpoints = exits.enter_context(collectors())
        stacks = {
            name: exits.enter_context(_start(plan.devices, endpoint)) for name, endpoint in endpoints.items()
        }
        for stack in stacks.values():
            asyncio.run(one_turn(stack.address, plan))
        for repetition in range(plan.num_repetitions):
            names = list(stacks) if repetition % 2 else list(reversed(stacks))
            for name in names:
                _take_turn(stacks[name], plan, found.setdefault(name, Found()))
    return {name: found[name] for name in stacks}


def _start(devices: Devices, endpoint: str) -> Stack:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_TRACES_EXPORTER": "" if endpoint else "none"}
    return devices.stack(num_kv_tokens=1 << 16, environ=environ)


def _take_turn(stack: Stack, plan: Plan, found: Found) -> None:
    usage = Usage.of(stack)
    before_s = sum(usage.cpu_s().values())
    found.tokens_per_s.append(asyncio.run(one_turn(stack.address, plan)))
    used_s = sum(usage.cpu_s().values()) - before_s
    found.cpu_ms.append(used_s * 1e6 / (plan.num_streams * plan.num_tokens))
    found.rss_mib.append(sum(usage.rss_mib().values()))


def bars(found: dict[str, Found]) -> list[Bar]:
    """The promises about a collector that is dead or stalled."""
    off = found[OFF].tokens_per_s
    speeds = [
        Bar(
            what=f"tokens/s, {name}, over {OFF}",
            measured=summarise(ratios(found[name].tokens_per_s, off)).median,
            limit=MIN_RATIO,
            at_least=True,
        )
        for name in (REFUSES, SILENT)
    ]
    growth = [
        Bar(what=f"memory gained, {name}", measured=_growth(found[name]), limit=MAX_GROWTH_MIB, unit="MiB")
        for name in (REFUSES, SILENT)
    ]
    return speeds + growth


def _growth(found: Found) -> float:
    return found.rss_mib[-1] - found.rss_mib[0]


def details(found: dict[str, Found]) -> str:
    """All figures: median (least to greatest)."""
    off = found[OFF]
    lines = ["| | tokens/s | over no tracing | processor, ms for 1,000 tokens | memory gained, MiB |"]
    lines.append("|---|---|---|---|---|")
    for name, each in found.items():
        ratio = summarise(ratios(each.tokens_per_s, off.tokens_per_s)).text(3)
        speed, used = summarise(each.tokens_per_s).text(0), summarise(each.cpu_ms).text(0)
        lines.append(f"| {name} | {speed} | {ratio} | {used} | {_growth(each):.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write the files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=Plan.num_repetitions)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts, plan = machine(), Plan(num_repetitions=args.repetitions)
    found = measure(plan)
    devices = plan.devices
    result = Report(
        name="telemetry",
        title="What tracing costs",
        machine=facts,
        about=f"Emulated devices (target {devices.target_ms:g} ms, draft {devices.draft_ms:g} ms, acceptance "
        f"{devices.alpha:g}), {plan.num_streams} streams of {plan.num_tokens} tokens, Gumbel coupling with "
        f"equal seeds, {plan.num_repetitions} interleaved repetitions. The collector that works runs beside "
        "the client, on the same cores. Median (least to greatest).",
        bars=bars(found),
        details=details(found),
        data={"plan": asdict(plan), "found": {name: asdict(each) for name, each in found.items()}},
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
