"""`python -m benchmarks.streams`: 1,000 streams at once through all three services, on emulated devices.

The yardstick is a bare grpc.aio server that sends the very same messages to as many streams, without a
draft, a target or a rule behind them. Both are read by this process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import stats
from benchmarks.bare import BareServer, Streams, read_all
from benchmarks.bars import Bar, Report, machine
from benchmarks.processes import Devices, Usage, difference
from specwire import AsyncClient, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.completion import Chunk, Completion
from specwire.v1.generation_pb2 import GenerateResponse
from specwire.wire import client as client_wire

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
TIMEOUT_S = 300.0
MAX_RATIO = 3.0
MAX_GROWTH_MIB = 200e6 / 2**20
NUM_ALONE = 20
"""Streams that are run once more by themselves, to compare the texts."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    num_streams: int = 1000
    num_tokens: int = 64
    num_repetitions: int = 3
    devices: Devices = field(default_factory=Devices)

    def start(self) -> Stack:
        """Services with room for all streams at once; a pass takes a round of all of them."""
        length = len(PROMPT) + self.num_tokens + self.devices.num_draft_tokens
        return self.devices.stack(
            num_kv_tokens=self.num_streams * (length + 32),
            max_running=self.num_streams,
            max_sequences=self.num_streams + 24,
            max_num_tokens=max(2048, self.num_streams * (len(PROMPT) + 2)),
        )

    def params(self, index: int) -> SamplingParams:
        """Gumbel coupling: the seed alone fixes the text, whatever else runs."""
        return SamplingParams(rule=Rule.GUMBEL, seed=index, max_tokens=self.num_tokens)


@dataclass
class Faults:
    """What must not happen, counted in streams."""

    errors: list[str] = field(default_factory=list)
    num_torn: int = 0
    num_wrong: int = 0


@dataclass
class Measured:
    """One entry a repetition.

    Attributes:
        specwire_s, bare_s: from the first request to the last answer, in seconds.
        cpu_s: processor time by process, in seconds; `reader` and `bare reader` are this process.
        peak_growth_mib: of the coordinator over its idle state.
    """

    specwire_s: list[float] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)
    cpu_s: list[dict[str, float]] = field(default_factory=list)
    peak_growth_mib: list[float] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)


async def generate_all(
    address: str, plan: Plan, faults: Faults, indices: Sequence[int] | None = None
) -> list[list[Chunk | Completion]]:
    """What each stream brought, all at once on one channel; a stream that failed brought nothing."""
    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        await client.get_status()
        wanted = range(plan.num_streams) if indices is None else indices
        return await asyncio.gather(*(_generate(client, plan, faults, index) for index in wanted))


async def _generate(client: AsyncClient, plan: Plan, faults: Faults, index: int) -> list[Chunk | Completion]:
    received: list[Chunk | Completion] = []
    try:
        async with client.stream(params=plan.params(index), prompt_token_ids=PROMPT) as stream:
            async for chunk in stream:
                received.append(chunk)
            received.append(stream.completion)
    except Exception as error:  # whatever it is, it is counted
        faults.errors.append(f"stream {index}: {error!r}")
        return []
    return received


def token_ids(received: Sequence[Chunk | Completion]) -> list[int]:
    """All tokens of the stream, as its chunks brought them."""
    chunks = [event for event in received if isinstance(event, Chunk)]
    return [token.token_id for chunk in chunks for token in chunk.tokens]


def is_whole(received: Sequence[Chunk | Completion], num_tokens: int) -> bool:
    """Each token index came once and in order, and then one completion that counts as many."""
    next_index = 0
    for event in received[:-1]:
        if not isinstance(event, Chunk) or event.first_index != next_index:
            return False
        next_index += len(event.tokens)
    last = received[-1] if received else None
    return isinstance(last, Completion) and next_index == num_tokens == last.usage.completion_tokens


def check(
    found: Sequence[Sequence[Chunk | Completion]], texts: Sequence[list[int]], plan: Plan, faults: Faults
) -> None:
    """Count streams that lost or doubled a token, and whole ones that say something else than expected."""
    for received, expected in zip(found, texts, strict=True):
        whole = is_whole(received, plan.num_tokens)
        faults.num_torn += bool(received) and not whole
        faults.num_wrong += whole and token_ids(received) != expected


def messages(received: Sequence[Chunk | Completion]) -> list[GenerateResponse]:
    """The messages that brought it."""
    return [
        GenerateResponse(chunk=client_wire.chunk_to_proto(event))
        if isinstance(event, Chunk)
        else GenerateResponse(completion=client_wire.completion_to_proto(event))
        for event in received
    ]


class Bench:
    """One stack, one bare server, and what was measured on them."""

    def __init__(self, plan: Plan, stack: Stack) -> None:
        self.measured = Measured()
        self.streams: Streams = []
        self._plan = plan
        self._stack = stack
        self._services = Usage.of(stack)
        self._own = Usage({"reader": os.getpid()})
        self._idle_mib = 0.0
        self._texts: list[list[int]] = []

    async def warm_up(self) -> None:
        """Run a few streams alone, then all together once; learns what every stream is to bring."""
        faults = self.measured.faults
        alone = [await self._generate([index]) for index in range(NUM_ALONE)]
        self._idle_mib = self._services.rss_mib()["coordinator"]
        found = await self._generate()
        self._texts = [token_ids(received) for received in found]
        self.streams = [messages(received) for received in found]
        check(found, self._texts, self._plan, faults)
        check([one for [one] in alone], self._texts[:NUM_ALONE], self._plan, faults)

    async def repeat(self, bare: BareServer) -> None:
        """Both once."""
        measured, before = self.measured, self._services.cpu_s() | self._own.cpu_s()
        started_s = time.perf_counter()
        with self._services.peak_rss_mib() as peak:
            found = await self._generate()
            measured.specwire_s.append(time.perf_counter() - started_s)
        cpu_s = difference(self._services.cpu_s() | self._own.cpu_s(), before)
        measured.peak_growth_mib.append(peak["coordinator"] - self._idle_mib)
        check(found, self._texts, self._plan, measured.faults)
        between = bare.usage.cpu_s() | self._own.cpu_s()
        measured.bare_s.append(await read_all(bare.address, self.streams))
        bare_cpu_s = difference(bare.usage.cpu_s() | self._own.cpu_s(), between)
        measured.cpu_s.append(
            cpu_s | {"bare server": bare_cpu_s["bare server"], "bare reader": bare_cpu_s["reader"]}
        )

    async def _generate(self, indices: Sequence[int] | None = None) -> list[list[Chunk | Completion]]:
        return await generate_all(self._stack.address, self._plan, self.measured.faults, indices)


async def measure(plan: Plan) -> Bench:
    """Start everything, run all repetitions."""
    with plan.start() as stack, tempfile.TemporaryDirectory() as folder:
        bench = Bench(plan, stack)
        _say("warming up")
        await bench.warm_up()
        with BareServer(bench.streams, Path(folder) / "messages.json") as bare:
            await read_all(bare.address, bench.streams)
            for repetition in range(plan.num_repetitions):
                await bench.repeat(bare)
                times = (
                    f"specwire {bench.measured.specwire_s[-1]:.2f} s, bare {bench.measured.bare_s[-1]:.2f} s"
                )
                _say(f"repetition {repetition + 1} of {plan.num_repetitions}: {times}")
    return bench


def bars(measured: Measured) -> list[Bar]:
    """The promises about many streams."""
    faults, ratios = measured.faults, stats.ratios(measured.specwire_s, measured.bare_s)
    return [
        Bar(what="streams that failed", measured=len(faults.errors), limit=0),
        Bar(what="streams that lost or doubled a token", measured=faults.num_torn, limit=0),
        Bar(what="streams with another text than alone or before", measured=faults.num_wrong, limit=0),
        Bar(
            what="coordinator's memory over idle, peak",
            measured=max(measured.peak_growth_mib),
            limit=MAX_GROWTH_MIB,
            unit="MiB",
        ),
        Bar(what="time against the bare server, median", measured=statistics.median(ratios), limit=MAX_RATIO),
    ]


def details(measured: Measured, num_rounds: int) -> str:
    """Times, and where the processor time of a round goes."""
    ratios = stats.ratios(measured.specwire_s, measured.bare_s)
    lines = [
        f"specwire {stats.summarise(measured.specwire_s).text(2)} s, "
        f"bare server {stats.summarise(measured.bare_s).text(2)} s, "
        f"ratio {stats.summarise(ratios).text(2)}; {num_rounds} rounds in all.",
        "",
        "| process | processor time a round (ms) |",
        "|---|---|",
    ]
    for name in measured.cpu_s[0]:
        per_round_ms = [cpu_s[name] / num_rounds * 1e3 for cpu_s in measured.cpu_s]
        lines.append(f"| {name} | {stats.summarise(per_round_ms).text(3)} |")
    return "\n".join([*lines, *(f"\n{error}" for error in measured.faults.errors[:5])])


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, write the files; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=Plan.num_streams, help="at once (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=Plan.num_tokens, help="of each (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=Plan.num_repetitions, help="(default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args(argv)
    facts = machine()
    plan = Plan(num_streams=args.streams, num_tokens=args.tokens, num_repetitions=args.repetitions)
    bench = asyncio.run(measure(plan))
    measured = bench.measured
    num_rounds = sum(len(stream) - 1 for stream in bench.streams)
    found = Report(
        name="streams",
        title=f"{plan.num_streams:,} streams of {plan.num_tokens} tokens at once",
        machine=facts,
        about=_about(plan),
        bars=bars(measured),
        details=details(measured, num_rounds),
        data={"plan": asdict(plan), "num_rounds": num_rounds, "measured": asdict(measured)},
    )
    print(found.write(args.out))
    return int(not all(bar.passed for bar in found.bars))


def _about(plan: Plan) -> str:
    devices = plan.devices
    return (
        f"Emulated devices whose passes cost time but no processor: target {devices.target_ms:g} ms, draft "
        f"{devices.draft_ms:g} ms, acceptance {devices.alpha:g}, {devices.num_draft_tokens} draft tokens a "
        f"round, Gumbel coupling. Three services, the bare server and the reader are processes of one "
        f"machine. {plan.num_repetitions} interleaved repetitions after a warm-up; medians (least to "
        f"greatest). Limits raised for it: max_running {plan.num_streams}, and max_num_tokens so that one "
        f"pass takes a round of all streams. The bare server sends the same messages to as many streams of "
        f"one bare client, as fast as it can."
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
