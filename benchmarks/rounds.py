"""`python -m benchmarks.rounds`: what a round costs around the devices.

Emulated devices, whose passes cost time but next to no processor. The yardstick is *bare*: the processor time
of both ends for one message there and one back, on as many grpc.aio streams as there are generations. With
`--against COMMIT` the services of another version take part in the same run, with the client of that version.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import rounds_report
from benchmarks.checkouts import HERE, Checkout, version
from benchmarks.echo import EchoPair
from benchmarks.report import RESULTS, Report, machine, say
from benchmarks.rounds_report import (
    DEVICES,
    HIT_DEVICES,
    MANY,
    MAX_HIT,
    ONE,
    OTHER,
    SOME,
    THIS,
    Measured,
)

MESSAGE_BYTES = 128
"""About a request or an answer of one sequence, under greedy."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        num_tokens: of each stream, by the number of streams at once.
        num_messages: of each bare stream, likewise: about as many as a stream has rounds.
        num_hit_tokens: of the single streams that measure hits; 0 for none.
    """

    num_repetitions: int = 5
    num_tokens: Mapping[int, int] = field(default_factory=lambda: {ONE: 400, SOME: 256, MANY: 320})
    num_messages: Mapping[int, int] = field(default_factory=lambda: {ONE: 2000, SOME: 80, MANY: 40})
    num_hit_tokens: int = 250


def measure(plan: Plan, versions: Mapping[str, Path]) -> Measured:
    """All of it; `versions` are checkouts by name."""
    measured = Measured.empty(versions, plan.num_tokens, hits=bool(plan.num_hit_tokens))
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
            checkout.run(most, plan.num_tokens[most])
        for repetition in range(plan.num_repetitions):
            for num_streams, num_tokens in plan.num_tokens.items():
                bare_ms = echo.cpu_ms(plan.num_messages[num_streams], num_streams, MESSAGE_BYTES)
                measured.bare_ms[num_streams].append(bare_ms)
                for name in _in_turn(versions, repetition):
                    load = started[name].run(num_streams, num_tokens)
                    measured.loads[name][num_streams].append(load)
                    cost = f"{load.services_ms:.3f} ms a round, bare {bare_ms:.3f} ms"
                    say(f"{num_streams} streams, {name}: {cost}, {load.tokens_per_s:,.0f} tokens/s")


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
                    say(f"verify {rtt_ms:g} ms away, {name}: {round_ms}")


def _in_turn(versions: Mapping[str, Path], repetition: int) -> list[str]:
    """Each version goes first in every other repetition."""
    names = list(versions)
    return names[::-1] if repetition % 2 else names


def main(argv: list[str] | None = None) -> int:
    """Measure, print the tables, write the files; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.rounds", description=__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="to compare with; or the path of a checkout")
    parser.add_argument("--repetitions", type=int, default=Plan.num_repetitions, help="(default %(default)s)")
    parser.add_argument("--no-hits", action="store_true", help="leave out what a hit takes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(argv)
    plan = Plan(num_repetitions=args.repetitions, num_hit_tokens=0 if args.no_hits else Plan.num_hit_tokens)
    facts = machine()
    with ExitStack() as stack:
        versions = {THIS: HERE}
        if args.against:
            versions[OTHER] = stack.enter_context(version(args.against))
            facts["compared with"] = args.against
        measured = measure(plan, versions)
    found = Report(
        name="rounds",
        title="What a round costs",
        machine=facts,
        about=_about(plan),
        bars=rounds_report.bars(measured),
        details=rounds_report.details(measured),
        data={
            "plan": asdict(plan),
            "measured": asdict(measured),
        },
    )
    return found.finish(args.out)


def _about(plan: Plan) -> str:
    return (
        f"Emulated devices: target {DEVICES.target_ms:g} ms a pass, draft {DEVICES.draft_ms:g} ms a step, "
        f"acceptance {DEVICES.alpha:g}, {DEVICES.num_draft_tokens} draft tokens, greedy, nothing prepared "
        f"ahead; *devices alone*: tokens/s if nothing else took time. Three services and the client, which "
        f"is the SDK, are processes of one machine; counted is the time in which all streams make rounds, "
        f"without opening and closing them. {plan.num_repetitions} interleaved repetitions after a "
        f"warm-up; medians (least to greatest), ratios within a repetition. *Bare*: processor time of both "
        f"ends for one message of {MESSAGE_BYTES} bytes there and back, on as many grpc.aio streams of one "
        f"channel as there are generations. Hits: one stream, target {HIT_DEVICES.target_ms:g} ms, "
        f"{HIT_DEVICES.num_outcomes} outcomes prepared, the runner-up right with {HIT_DEVICES.runner_up:g}, "
        f"median time between two chunks; a proxy delays what passes between coordinator and verify by the "
        f"round trip. *Loop*: a process's main thread."
    )


if __name__ == "__main__":
    sys.exit(main())
