"""`python -m benchmarks.rounds`: what a round costs around the devices, and how many a host can serve.

Emulated devices, whose passes cost time but next to no processor. The yardstick is *bare*: the processor time
of both ends for one message there and one back, on as many grpc.aio streams as there are generations. With
`--against PATH` the services of another checkout take part in the same run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.bars import Bar, Report, machine
from benchmarks.checkouts import HERE, PROCESSES, SERVICES, Checkout, Load
from benchmarks.echo import EchoPair
from benchmarks.processes import GRPC, LOOP, THREADS, Devices
from benchmarks.stats import ratios, summarise

THIS, OTHER = "this version", "the other"
ONE, SOME, MANY = 1, 64, 256
DEVICES = Devices(target_ms=15.0, num_outcomes="0")
HIT_DEVICES = Devices(target_ms=30.0, num_outcomes="32", runner_up=0.55)
MESSAGE_BYTES = 128
"""About a request or an answer of one sequence, under greedy."""
MAX_HIT = {0.0: 1.03, 5.0: 1.04}
"""Round over pass where the proposal was prepared, by the round trip between coordinator and verify in ms."""
NUM_CORES = 16
MAX_LOAD = 0.8
"""Share of a core that a process may use before messages queue in front of it."""
_KINDS = {name: THREADS if name in ("verify", "draft") else (LOOP, GRPC) for name in PROCESSES}
PASSES_MS, STREAMS = (5.0, 15.0, 30.0), (64, 256, 1024)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        num_tokens: of each stream, by the number of streams at once.
        num_messages: of each bare stream, the same.
        num_hit_tokens: of the single streams that measure hits; 0 for none.
    """

    num_repetitions: int = 5
    num_tokens: Mapping[int, int] = field(default_factory=lambda: {ONE: 400, SOME: 256, MANY: 128})
    num_messages: Mapping[int, int] = field(default_factory=lambda: {ONE: 2000, SOME: 50, MANY: 20})
    num_hit_tokens: int = 250


@dataclass
class Measured:
    """One entry a repetition in every list.

    Attributes:
        bare_ms: processor time of a bare exchange, by the number of streams.
        loads: by version, then by the number of streams.
        hits: by version, then by the round trip between coordinator and verify in milliseconds.
    """

    bare_ms: dict[int, list[float]]
    loads: dict[str, dict[int, list[Load]]]
    hits: dict[str, dict[float, list[Load]]]

    @classmethod
    def empty(cls, plan: Plan, names: Sequence[str]) -> Measured:
        """Nothing yet, of all that is to come."""
        return cls(
            bare_ms={count: [] for count in plan.num_tokens},
            loads={name: {count: [] for count in plan.num_tokens} for name in names},
            hits={name: {rtt_ms: [] for rtt_ms in MAX_HIT} for name in names} if plan.num_hit_tokens else {},
        )

    def cpu_ms(self, version: str, num_streams: int) -> dict[str, float]:
        """Processor time a round by process, in milliseconds: medians."""
        loads = self.loads[version][num_streams]
        return {name: statistics.median(load.cpu_ms[name] for load in loads) for name in PROCESSES}

    def over_bare(self, version: str, num_streams: int) -> list[float]:
        """Processor time a round of the three services over bare on as many streams."""
        services_ms = [load.services_ms for load in self.loads[version][num_streams]]
        return ratios(services_ms, self.bare_ms[num_streams])

    def over_other(self, num_streams: int, figure: Callable[[Load], float]) -> list[float]:
        """A figure of this version over the same of the other one."""
        ours, theirs = ([figure(load) for load in self.loads[name][num_streams]] for name in (THIS, OTHER))
        return ratios(ours, theirs)

    def hit_over_pass(self, version: str, rtt_ms: float) -> list[float]:
        """The usual round of one stream, a hit, over a pass."""
        return [load.usual_round_ms / HIT_DEVICES.target_ms for load in self.hits[version][rtt_ms]]


# --- measuring ------------------------------------------------------------------------------------


def measure(plan: Plan, versions: Mapping[str, Path]) -> Measured:
    """All of it; `versions` are checkouts by name."""
    measured = Measured.empty(plan, list(versions))
    _measure_costs(plan, versions, measured)
    if measured.hits:
        _measure_hits(plan, versions, measured)
    return measured


def _measure_costs(plan: Plan, versions: Mapping[str, Path], measured: Measured) -> None:
    most = max(plan.num_tokens)
    room = max(n * (num_tokens + 64) for n, num_tokens in plan.num_tokens.items())
    with ExitStack() as stack:
        echo = stack.enter_context(EchoPair())
        started = {
            name: stack.enter_context(Checkout(path, DEVICES, max_streams=most, num_kv_tokens=room))
            for name, path in versions.items()
        }
        for checkout in started.values():  # allocators, caches and whatever the services learn
            checkout.run(most, 32)
        for repetition in range(plan.num_repetitions):
            for num_streams, num_tokens in plan.num_tokens.items():
                bare_ms = echo.cpu_ms(plan.num_messages[num_streams], num_streams, MESSAGE_BYTES)
                measured.bare_ms[num_streams].append(bare_ms)
                for name in _in_turn(versions, repetition):
                    load = started[name].run(num_streams, num_tokens)
                    measured.loads[name][num_streams].append(load)
                    cost = f"{load.services_ms:.3f} ms a round, bare {bare_ms:.3f} ms"
                    _say(f"{num_streams} streams, {name}: {cost}, {load.tokens_per_s:,.0f} tokens/s")


def _measure_hits(plan: Plan, versions: Mapping[str, Path], measured: Measured) -> None:
    with ExitStack() as stack:
        started = {
            (name, rtt_ms): stack.enter_context(
                Checkout(path, HIT_DEVICES, max_streams=4, num_kv_tokens=65536, verify_rtt_ms=rtt_ms)
            )
            for name, path in versions.items()
            for rtt_ms in MAX_HIT
        }
        for checkout in started.values():
            checkout.run(ONE, plan.num_hit_tokens)
        for repetition in range(plan.num_repetitions):
            for rtt_ms in MAX_HIT:
                for name in _in_turn(versions, repetition):
                    load = started[name, rtt_ms].run(ONE, plan.num_hit_tokens)
                    measured.hits[name][rtt_ms].append(load)
                    round_ms = f"{load.usual_round_ms:.2f} ms a round, {load.hit_rate:.0%} hits"
                    _say(f"verify {rtt_ms:g} ms away, {name}: {round_ms}")


def _in_turn(versions: Mapping[str, Path], repetition: int) -> list[str]:
    """Each version goes first in every other repetition."""
    names = list(versions)
    return names[::-1] if repetition % 2 else names


# --- how many a host can serve --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Need:
    """What keeps the target busy with a round of every stream in each of its passes.

    Attributes:
        num_processes: of each service, none of them busier than `MAX_LOAD`.
        num_cores: that all of them together keep busy.
    """

    pass_ms: float
    num_streams: int
    rounds_per_s: float
    num_processes: Mapping[str, int]
    num_cores: float

    @property
    def share(self) -> float:
        """Of these rounds, how much `NUM_CORES` cores can serve: 1 if they are enough."""
        return min(1.0, NUM_CORES * MAX_LOAD / self.num_cores)


def served_per_s(cost_ms: float) -> float:
    """Rounds a second that one process serves, whose threads share an interpreter and so a core."""
    return MAX_LOAD * 1e3 / cost_ms


def need(cost_ms: Mapping[str, float], pass_ms: float, num_streams: int) -> Need:
    """`cost_ms` is the processor time a round of each service, in milliseconds."""
    rounds_per_s = num_streams / pass_ms * 1e3
    return Need(
        pass_ms=pass_ms,
        num_streams=num_streams,
        rounds_per_s=rounds_per_s,
        num_processes={name: math.ceil(rounds_per_s / served_per_s(cost_ms[name])) for name in SERVICES},
        num_cores=rounds_per_s * sum(cost_ms[name] for name in SERVICES) / 1e3,
    )


def needs(measured: Measured, version: str) -> list[Need]:
    """Of every pass and number of streams."""
    found = []
    for pass_ms in PASSES_MS:
        for num_streams in STREAMS:
            nearest = max(n for n in measured.bare_ms if n <= num_streams)
            found.append(need(measured.cpu_ms(version, nearest), pass_ms, num_streams))
    return found


# --- the report -----------------------------------------------------------------------------------


def bars(measured: Measured) -> list[Bar]:
    """The promises about a round; some compare with another version, if there is one."""
    found = [
        Bar(
            what=f"{num_streams} streams: three services over bare",
            measured=statistics.median(measured.over_bare(THIS, num_streams)),
            limit=limit,
        )
        for num_streams, limit in ((MANY, 1.5), (SOME, 2.0))
    ]
    if OTHER in measured.loads:
        cost = statistics.median(measured.over_other(ONE, lambda load: load.services_ms))
        rate = statistics.median(measured.over_other(MANY, lambda load: load.tokens_per_s))
        found += [
            Bar(what="1 stream: three services over the other version", measured=cost, limit=0.5),
            Bar(what=f"{MANY} streams: tokens/s over the other", measured=rate, limit=6.0, at_least=True),
        ]
    return found + [
        Bar(
            what=f"1 stream, hits, {_where(rtt_ms)}: round over pass",
            measured=statistics.median(measured.hit_over_pass(THIS, rtt_ms)),
            limit=limit,
        )
        for rtt_ms, limit in MAX_HIT.items()
        if measured.hits
    ]


def details(measured: Measured) -> str:
    """All tables."""
    parts = ["## Processor time a round (ms)", _costs(measured)]
    parts += ["## By thread (ms a round)", _threads(measured)]
    if OTHER in measured.loads:
        parts += ["## This version over the other", _ratios(measured)]
    if measured.hits:
        parts += ["## Hits of one stream", _hits(measured)]
    for name in measured.loads:
        parts += [f"## What {NUM_CORES} cores serve: {name}", _capacity(measured, name)]
    return "\n\n".join(parts)


def _costs(measured: Measured) -> str:
    rows = []
    for num_streams in measured.bare_ms:
        for name, of_version in measured.loads.items():
            loads, cpu_ms = of_version[num_streams], measured.cpu_ms(name, num_streams)
            rows.append(
                [
                    num_streams,
                    name,
                    *(f"{cpu_ms[process]:.3f}" for process in PROCESSES),
                    summarise([load.services_ms for load in loads]).text(3),
                    summarise(measured.over_bare(name, num_streams)).text(2),
                    f"{statistics.median(load.rounds_per_s for load in loads):,.0f}",
                    f"{statistics.median(load.tokens_per_s for load in loads):,.0f}",
                    f"{_of_devices(num_streams, loads):,.0f}",
                ]
            )
    head = ["streams", "version", *PROCESSES, "three services", "over bare", "rounds/s", "tokens/s"]
    bare = [f"{n} {summarise(bare_ms).text(3)}" for n, bare_ms in measured.bare_ms.items()]
    return f"{_table([*head, 'devices alone'], rows)}\n\nBare, by the number of streams: {', '.join(bare)}."


def _threads(measured: Measured) -> str:
    keys = [(process, kind) for process in PROCESSES for kind in _KINDS[process]]
    rows = [
        [
            num_streams,
            name,
            *(
                f"{statistics.median(load.thread_cpu_ms[process][kind] for load in loads):.3f}"
                for process, kind in keys
            ),
        ]
        for name, of_version in measured.loads.items()
        for num_streams, loads in of_version.items()
    ]
    return _table(["streams", "version", *(f"{process}, {kind}" for process, kind in keys)], rows)


def _of_devices(num_streams: int, loads: Sequence[Load]) -> float:
    """Tokens a second if nothing but the devices took time."""
    round_ms = DEVICES.target_ms + DEVICES.num_draft_tokens * DEVICES.draft_ms
    return num_streams * statistics.median(load.tokens_per_round for load in loads) / round_ms * 1e3


def _ratios(measured: Measured) -> str:
    figures: dict[str, Callable[[Load], float]] = {
        "three services": lambda load: load.services_ms,
        **{name: _cpu_ms_of(name) for name in PROCESSES},
        "tokens/s": lambda load: load.tokens_per_s,
    }
    rows = [
        [n, *(summarise(measured.over_other(n, figure)).text(2) for figure in figures.values())]
        for n in measured.bare_ms
    ]
    return _table(["streams", *figures], rows)


def _cpu_ms_of(process: str) -> Callable[[Load], float]:
    return lambda load: load.cpu_ms[process]


def _hits(measured: Measured) -> str:
    rows = [
        [
            _where(rtt_ms),
            name,
            summarise(measured.hit_over_pass(name, rtt_ms)).text(3),
            f"{statistics.median(load.hit_rate for load in loads):.0%}",
        ]
        for name, of_one in measured.hits.items()
        for rtt_ms, loads in of_one.items()
    ]
    return _table(["coordinator", "version", "round over pass", "hits"], rows)


def _capacity(measured: Measured, version: str) -> str:
    cost_ms = measured.cpu_ms(version, max(measured.bare_ms))
    one_each = ", ".join(f"one {name} {served_per_s(cost_ms[name]):,.0f}" for name in SERVICES)
    rows = [
        [
            f"{found.pass_ms:g}",
            f"{found.num_streams:,}",
            f"{found.rounds_per_s:,.0f}",
            *(found.num_processes[name] for name in SERVICES),
            f"{found.num_cores:.1f}",
            f"{found.share:.0%}",
        ]
        for found in needs(measured, version)
    ]
    head = [
        "pass (ms)",
        "streams",
        "rounds/s",
        *SERVICES,
        "cores busy",
        f"share that {NUM_CORES} cores serve",
    ]
    return f"Rounds a second: {one_each}.\n\n{_table(head, rows)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _where(rtt_ms: float) -> str:
    return f"coordinator {rtt_ms:g} ms from verify" if rtt_ms else "neighbours"


def main(argv: list[str] | None = None) -> int:
    """Measure, print the tables, write the files; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.rounds", description=__doc__)
    parser.add_argument("--against", type=Path, metavar="PATH", help="checkout to compare with")
    parser.add_argument("--repetitions", type=int, default=Plan.num_repetitions, help="(default %(default)s)")
    parser.add_argument("--no-hits", action="store_true", help="leave out what a hit takes")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args(argv)
    if args.against and not (args.against / "coordinator/__main__.py").exists():
        parser.error(f"--against {args.against}: no checkout of this repository")
    plan = Plan(num_repetitions=args.repetitions, num_hit_tokens=0 if args.no_hits else Plan.num_hit_tokens)
    versions = {THIS: HERE} | ({OTHER: args.against.resolve()} if args.against else {})
    facts = machine()
    measured = measure(plan, versions)
    found = Report(
        name="rounds",
        title="What a round costs",
        machine=facts,
        about=_about(plan),
        bars=bars(measured),
        details=details(measured),
        data={
            "plan": asdict(plan),
            "measured": asdict(measured),
            "needs": {name: [asdict(one) for one in needs(measured, name)] for name in versions},
        },
    )
    print(found.write(args.out))
    return int(not all(bar.passed for bar in found.bars))


def _about(plan: Plan) -> str:
    return (
        f"Emulated devices: target {DEVICES.target_ms:g} ms a pass, draft {DEVICES.draft_ms:g} ms a step, "
        f"acceptance {DEVICES.alpha:g}, {DEVICES.num_draft_tokens} draft tokens, greedy, nothing prepared "
        f"ahead; *devices alone*: tokens/s if nothing else took time. Three services and the client, which "
        f"is the SDK, are processes of one machine. {plan.num_repetitions} interleaved repetitions after a "
        f"warm-up; medians (least to greatest), ratios within a repetition. *Bare*: processor time of both "
        f"ends for one message of {MESSAGE_BYTES} bytes there and back, on as many grpc.aio streams of one "
        f"channel as there are generations. Hits: one stream, target {HIT_DEVICES.target_ms:g} ms, "
        f"{HIT_DEVICES.num_outcomes} outcomes prepared, the runner-up right with {HIT_DEVICES.runner_up:g}, "
        f"median time between two chunks; a proxy delays what passes between coordinator and verify by the "
        f"round trip. What {NUM_CORES} cores serve is arithmetic: one round of every stream in each pass of "
        f"the target, no process busier than {MAX_LOAD:.0%} of a core like this machine's; without what the "
        f"models themselves need, as launching kernels. *Loop*: a process's main thread."
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
