"""`python -m benchmarks.overload`: ten times more requests than the devices can serve, and no retries.

An open loop: requests leave on a Poisson schedule of their own, whether the server keeps up or not. The
capacity is that of a closed loop on the same services just before, with `max_running` requests at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bars import Bar, Report, machine
from benchmarks.processes import Devices
from specwire import AsyncClient, ResourceExhaustedError, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from tools.bench.backends import Coordinator
from tools.bench.metrics import OK, RequestRecord
from tools.bench.prompts import Prompt
from tools.bench.serve import Measurement, OfferedLoad

PROMPT = Prompt(token_ids=(3, 1, 4, 1, 5, 9, 2, 6))
REFUSED = ResourceExhaustedError.status
TIMEOUT_S = 300.0
"""Of each request: long, so that one that waits for its place is not ended by its own deadline."""
MAX_REFUSAL_MS = 50.0
MIN_GOODPUT = 0.9
_PERCENTILES = (50, 99, 99.9, 100)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The services, their limits and the load.

    Attributes:
        seconds: how long the load lasts.
        factor: its rate over the capacity.
        num_waves: times that each place is taken in the closed loop; the first, and what runs at the end, are
            left out.
    """

    seconds: float = 30.0
    factor: float = 10.0
    num_tokens: int = 64
    max_running: int = 32
    max_waiting: int = 64
    num_waves: int = 12
    devices: Devices = field(default_factory=lambda: Devices(target_ms=60.0, draft_ms=4.0))

    def start(self) -> Stack:
        """Services with room for what may run, and these limits."""
        return self.devices.stack(
            num_kv_tokens=self.max_running * 2 * self.num_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
        )


@dataclass(frozen=True, kw_only=True)
class Overload:
    """What came of it.

    Attributes:
        capacity: tokens a second in the closed loop.
        offered: requests a second in the open one.
        goodput: tokens a second while the load lasted, of requests that were completed then or later.
        num_admitted: those that were not refused, of which num_finished were completed.
        failures: how the others ended, at most ten.
        refusal_ms: of each refusal, from sending the request to the error; sorted.
        lateness_ms: of each request behind its schedule; sorted.
        longest_ms: of any request that was completed, waiting included.
    """

    capacity: float
    offered: float
    goodput: float
    num_admitted: int
    num_finished: int
    failures: list[str]
    refusal_ms: list[float]
    lateness_ms: list[float]
    longest_ms: float


async def measure(address: str, plan: Plan) -> Overload:
    """Capacity, then overload."""
    params = SamplingParams(max_tokens=plan.num_tokens, rule=Rule.GUMBEL)
    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        closed = Measurement(Coordinator(client), [PROMPT], params, _closed(plan))
        await closed.warm_up(2)
        await closed.run()
        capacity = steady_rate(closed.records, plan.max_running)
        rate = plan.factor * capacity / plan.num_tokens
        load = OfferedLoad(num_requests=round(rate * plan.seconds), rate=rate)
        opened = Measurement(Coordinator(client), [PROMPT], params, load)
        await opened.run()
    return judge(opened.records, capacity, rate, plan.seconds)


def _closed(plan: Plan) -> OfferedLoad:
    return OfferedLoad(num_requests=plan.num_waves * plan.max_running, concurrency=plan.max_running)


def steady_rate(records: Sequence[RequestRecord], concurrency: int) -> float:
    """Tokens a second of a closed loop, from when its first wave is over until the last request is sent: only
    then all places are taken.

    Raises:
        RuntimeError: a request failed.
    """
    failed = [record.error for record in records if record.status != OK]
    if failed:
        raise RuntimeError(f"the closed loop lost {len(failed)} requests: {failed[0]}")
    first_s = sorted(record.end_s for record in records)[concurrency - 1]
    return token_rate(records, first_s, max(record.start_s for record in records))


def token_rate(records: Iterable[RequestRecord], first_s: float, last_s: float) -> float:
    """Tokens a second between two moments; a window cuts through requests, so those are not counted."""
    num_tokens = sum(
        count
        for record in records
        for time_s, count in zip(record.chunk_times_s, record.chunk_tokens, strict=True)
        if first_s < time_s <= last_s
    )
    return num_tokens / (last_s - first_s)


def judge(records: Sequence[RequestRecord], capacity: float, offered: float, seconds: float) -> Overload:
    """The figures of an open loop of this length."""
    admitted = [record for record in records if record.status != REFUSED]
    finished = [record for record in admitted if record.status == OK]
    refused = [record for record in records if record.status == REFUSED]
    return Overload(
        capacity=capacity,
        offered=offered,
        goodput=token_rate(finished, 0.0, seconds),
        num_admitted=len(admitted),
        num_finished=len(finished),
        failures=[f"{record.status}: {record.error}" for record in admitted if record.status != OK][:10],
        refusal_ms=_sorted_ms(refused, lambda record: record.end_s - record.start_s),
        lateness_ms=_sorted_ms(records, lambda record: record.start_s - (record.scheduled_s or 0.0)),
        longest_ms=max(_sorted_ms(finished, lambda record: record.end_s - record.start_s), default=0.0),
    )


def _sorted_ms(records: Sequence[RequestRecord], measure: Callable[[RequestRecord], float]) -> list[float]:
    return sorted(1e3 * measure(record) for record in records)


def bars(found: Overload) -> list[Bar]:
    """The promises about overload."""
    return [
        Bar(
            what="admitted requests that did not finish",
            measured=found.num_admitted - found.num_finished,
            limit=0,
        ),
        Bar(
            what="refusal, 99th percentile",
            measured=float(np.percentile(found.refusal_ms, 99)),
            limit=MAX_REFUSAL_MS,
            unit="ms",
        ),
        Bar(what="refusal, slowest", measured=max(found.refusal_ms), limit=MAX_REFUSAL_MS, unit="ms"),
        Bar(
            what="goodput against capacity",
            measured=found.goodput / found.capacity,
            limit=MIN_GOODPUT,
            at_least=True,
        ),
    ]


def details(found: Overload) -> str:
    """The figures behind the bars."""
    rows = [
        ("capacity, tokens/s", f"{found.capacity:.0f}"),
        ("offered, requests/s", f"{found.offered:.1f}"),
        ("goodput while the load lasted, tokens/s", f"{found.goodput:.0f}"),
        ("admitted, finished", f"{found.num_admitted:,}, {found.num_finished:,}"),
        ("refused", f"{len(found.refusal_ms):,}"),
        ("refusal, ms: p50, p99, p99.9, slowest", _percentiles(found.refusal_ms)),
        ("load behind its schedule, ms: p50, p99, p99.9, most", _percentiles(found.lateness_ms)),
        ("longest request, waiting included, ms", f"{found.longest_ms:.0f}"),
    ]
    lines = ["| figure | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join([*lines, *(f"\n{failure}" for failure in found.failures)])


def _percentiles(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in np.percentile(values, _PERCENTILES))


def _data(found: Overload) -> dict[str, Any]:
    """For the JSON: of the long lists their percentiles."""
    return {
        name: dict(zip(map(str, _PERCENTILES), np.percentile(value, _PERCENTILES).tolist(), strict=True))
        if name.endswith("_ms") and isinstance(value, list)
        else value
        for name, value in asdict(found).items()
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, write the files; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=Plan.seconds, help="of load (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args(argv)
    facts, plan = machine(), Plan(seconds=args.seconds)
    with plan.start() as stack:
        overload = asyncio.run(measure(stack.address, plan))
    found = Report(
        name="overload",
        title=f"{plan.factor:g} times capacity for {plan.seconds:g} s",
        machine=facts,
        about=_about(plan),
        bars=bars(overload),
        details=details(overload),
        data={"plan": asdict(plan), "overload": _data(overload)},
    )
    print(found.write(args.out))
    return int(not all(bar.passed for bar in found.bars))


def _about(plan: Plan) -> str:
    devices = plan.devices
    return (
        f"Emulated devices whose passes cost time but no processor: target {devices.target_ms:g} ms, draft "
        f"{devices.draft_ms:g} ms, acceptance {devices.alpha:g}; requests of {plan.num_tokens} tokens; "
        f"max_running {plan.max_running}, max_waiting {plan.max_waiting}. Capacity is measured just before "
        f"by a closed loop of {plan.max_running} requests at a time. The load is an open loop with Poisson "
        f"arrivals from one client process, which does not retry. Refusals are timed at the client."
    )


if __name__ == "__main__":
    sys.exit(main())
