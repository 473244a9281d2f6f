"""The simulator against the running system: the same requests, the same emulated law, tokens/s side by side.

The running system is three processes on this machine (four with a delay proxy), which the simulator knows
through `MACHINE`; acceptance is the same token for token, so what is compared is time.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import psutil

from benchmarks.simulation import workload
from benchmarks.simulation.devices import StepCost
from benchmarks.simulation.network import Link, Overheads, Pace
from benchmarks.simulation.system import Setting
from specwire import AsyncClient, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.completion import Completion
from specwire.config.models import EMULATED
from specwire.config.stack import UpConfig
from specwire.engine.emulated import EmulatedModel

Floats = npt.NDArray[np.float64]

BAR = 0.05
TARGET_MS = 30.0
MACHINE = Overheads(
    message_ms=0.05,
    wake_ms=0.6,
    round_ms=0.7,
    token_us=50,
    proposal_us=100,
    step_ms=0.3,
    row_us=18,
    num_cores=2,
)
"""Two cores for everything. Steps, rows and proposals are the time that their code takes by itself; the
others were fitted to twelve runs without any distance (alpha 0.8; 0, 1 and 4 draft tokens; 1, 4, 16 and 64
streams). Processors are not equally fast at all times: each stack's runs are compared at the pace that plain
decoding on the same stack shows, by one stream and, where several are compared, by 32 as well: 16 share
messages so well that they show nothing of the work."""
_PROXY_MS = 1.5
"""Round trip through the delay proxy, beside the delay: one more process in the way."""
_STEP_EXCESS_MS = 0.05
"""An emulated step in the running system takes so much longer than it was told to."""
_WARM_UP = SamplingParams(max_tokens=20, temperature=0, num_draft_tokens=4, seed=0)
_REFERENCE = SamplingParams(max_tokens=80, temperature=0, num_draft_tokens=0, seed=0)
"""Plain decoding, before all points of a grid and after them."""
_NUM_BUSY, _BUSY_TOKENS = 32, 40
_PACE_STEPS = 4
_CHOSEN_WARM_UP = 300
_MAX_WAITS = 20


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is run on a stack.

    Attributes:
        num_draft_tokens: None lets the coordinator choose, after a warm-up in which it learns.
        num_tokens: of each of `num_repetitions` batches of `num_streams` completions.
    """

    num_draft_tokens: int | None
    rule: str = "greedy"
    num_streams: int = 1
    num_tokens: int = 100
    num_repetitions: int = 3

    def batches(self) -> list[list[SamplingParams]]:
        """Requests; what counts are the last `num_repetitions`."""
        warm_up = [self._batch(0, _CHOSEN_WARM_UP)] if self.num_draft_tokens is None else []
        return [*warm_up, *(self._batch(i + 1, self.num_tokens) for i in range(self.num_repetitions))]

    def _batch(self, number: int, num_tokens: int) -> list[SamplingParams]:
        greedy = self.rule == "greedy"
        return [
            SamplingParams(
                max_tokens=num_tokens,
                temperature=0.0 if greedy else 1.0,
                rule=Rule.REJECTION if self.rule == "rejection" else Rule.GUMBEL,
                seed=1000 * number + stream,
                num_draft_tokens=self.num_draft_tokens,
            )
            for stream in range(self.num_streams)
        ]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Points on one stack."""

    alpha: float
    draft_ms: float
    rtt_ms: float
    num_outcomes: int
    points: Sequence[Point]

    @property
    def references(self) -> list[list[SamplingParams]]:
        """Plain decoding by one stream, and by many where a point has several."""
        busy = replace(_REFERENCE, max_tokens=_BUSY_TOKENS)
        several = any(point.num_streams > 1 for point in self.points)
        return [[_REFERENCE], [busy] * _NUM_BUSY] if several else [[_REFERENCE]]

    @property
    def batches(self) -> list[list[SamplingParams]]:
        """Of all points, one after the other."""
        points = [batch for point in self.points for batch in point.batches()]
        return [[_WARM_UP], *self.references, *points, *self.references]


def _points(*lengths: int | None, rule: str = "greedy") -> list[Point]:
    return [
        Point(num_draft_tokens=n, rule=rule, num_tokens=300 if n is None else 120, num_repetitions=3)
        for n in lengths
    ]


def _grid(alpha: float, draft_ms: float, rtt_ms: float, num_outcomes: int, points: Iterable[Point]) -> Grid:
    return Grid(
        alpha=alpha, draft_ms=draft_ms, rtt_ms=rtt_ms, num_outcomes=num_outcomes, points=tuple(points)
    )


GRIDS = (
    _grid(0.8, 2, 0, 0, [*_points(3, None), *_points(8, rule="gumbel"), *_points(5, rule="rejection")]),
    _grid(0.8, 2, 0, 16, [*_points(5, None)]),
    _grid(0.8, 2, 20, 0, [*_points(5, None), *_points(3, rule="gumbel")]),
    _grid(0.8, 2, 20, 16, [*_points(5, None), *_points(3, rule="gumbel")]),
    _grid(0.8, 2, 80, 16, [*_points(8), *_points(5, rule="gumbel")]),
    _grid(0.5, 2, 5, 0, [*_points(3), *_points(1, rule="gumbel")]),
    _grid(0.5, 6, 20, 16, [*_points(1), *_points(3, rule="gumbel")]),
    _grid(0.7, 6, 0, 0, [*_points(3), *_points(5, rule="gumbel")]),
    _grid(0.7, 2, 5, 16, [*_points(3, None), *_points(5, rule="gumbel")]),
    _grid(0.9, 2, 5, 0, [*_points(8), *_points(5, rule="gumbel")]),
    _grid(0.9, 6, 80, 16, [*_points(5), *_points(8, rule="gumbel")]),
    _grid(0.9, 2, 20, 16, [*_points(8), *_points(8, rule="gumbel")]),
    _grid(
        0.8,
        2,
        0,
        0,
        [
            Point(num_draft_tokens=3, rule="gumbel", num_streams=16, num_tokens=80),
            Point(num_draft_tokens=0, rule="gumbel", num_streams=64, num_tokens=40),
            Point(num_draft_tokens=3, rule="gumbel", num_streams=64, num_tokens=80),
        ],
    ),
    _grid(
        0.8,
        2,
        20,
        16,
        [
            Point(num_draft_tokens=3, rule="gumbel", num_streams=16, num_tokens=80),
            Point(num_draft_tokens=5, rule="gumbel", num_streams=4, num_tokens=120),
        ],
    ),
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A point, and tokens/s of each repetition in the running system and in the simulator.

    Attributes:
        waking, work: the pace, over `MACHINE`'s.
    """

    waking: float
    work: float
    alpha: float
    draft_ms: float
    rtt_ms: float
    num_outcomes: int
    num_draft_tokens: int | None
    rule: str
    num_streams: int
    real: list[float] = field(default_factory=list)
    simulated: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Simulated over real: the same tokens in how much less time."""
        return statistics.harmonic_mean(self.simulated) / statistics.harmonic_mean(self.real)


def compare(
    grids: Sequence[Grid], wait: Callable[[], None], num_passes: int, say: Callable[[str], None]
) -> list[Compared]:
    """Each grid on a stack of its own, then in the simulator.

    Args:
        wait: called before each pass.
        num_passes: over each grid in the running system; the fastest of equal runs counts, since whatever
            else the machine does only slows it.
    """
    compared = []
    for grid in grids:
        passes = []
        for _ in range(num_passes):
            wait()
            passes.append(run_real(grid))
        fastest = [max(rates) for rates in zip(*passes, strict=True)]
        num_references = len(grid.references)
        before, after = fastest[1 : 1 + num_references], fastest[-num_references:]
        pace = pace_of(grid, [statistics.fmean(rates) for rates in zip(before, after, strict=True)])
        real = _rates(grid, fastest)
        simulated = _rates(grid, simulate(grid, pace))
        for point, ours, theirs in zip(grid.points, simulated, real, strict=True):
            done = Compared(
                waking=pace.waking,
                work=pace.work,
                alpha=grid.alpha,
                draft_ms=grid.draft_ms,
                rtt_ms=grid.rtt_ms,
                num_outcomes=grid.num_outcomes,
                num_draft_tokens=point.num_draft_tokens,
                rule=point.rule,
                num_streams=point.num_streams,
                real=theirs,
                simulated=ours,
            )
            say(f"{describe(done)}: {done.ratio:.3f}")
            compared.append(done)
    return compared


def wait_until_quiet() -> None:
    """Until others use less than a tenth of a core, or for twenty seconds."""
    for _ in range(_MAX_WAITS):
        if psutil.cpu_percent(1.0) * (os.cpu_count() or 1) < 10:
            break


def describe(done: Compared) -> str:
    """In one line."""
    length = "auto" if done.num_draft_tokens is None else done.num_draft_tokens
    return (
        f"alpha {done.alpha:g}, draft {done.draft_ms:g} ms, {done.rtt_ms:g} ms away, "
        f"{done.num_outcomes} outcomes, {done.num_streams} x {length} {done.rule}"
    )


def setting(grid: Grid, pace: Pace) -> Setting:
    """The grid's stack, simulated."""
    return Setting(
        model=EmulatedModel(alpha=grid.alpha, runner_up=0.55),
        target=StepCost(base_ms=TARGET_MS + _STEP_EXCESS_MS),
        draft=StepCost(base_ms=grid.draft_ms + _STEP_EXCESS_MS),
        num_outcomes=str(grid.num_outcomes),
        link=Link(rtt_ms=grid.rtt_ms + pace.waking * _PROXY_MS if grid.rtt_ms else 0.0),
        overheads=MACHINE.at(pace),
        exact=True,
    )


def simulate(grid: Grid, pace: Pace) -> list[float]:
    """Tokens/s of each batch."""
    return _simulate(grid, pace, grid.batches)


def _simulate(grid: Grid, pace: Pace, batches: list[list[SamplingParams]]) -> list[float]:
    return [workload.tokens_per_s(batch) for batch in workload.completions(setting(grid, pace), batches)]


def pace_of(grid: Grid, reference_rates: Sequence[float]) -> Pace:
    """At which the simulator takes as long for the grid's references as the running system did.

    One stream alone cannot tell the two paces from each other: it gets one for both. What many take beyond
    one is mostly work.
    """
    num_streams = [len(batch) for batch in grid.references]

    def beyond(rates: Sequence[float]) -> Floats:
        """[number of references] milliseconds of a token beside its pass."""
        return 1e3 * np.array(num_streams) / rates - TARGET_MS - _STEP_EXCESS_MS

    def simulated(waking: float, work: float) -> Floats:
        pace = Pace(waking=waking, work=work)
        return beyond(_simulate(grid, pace, [[_WARM_UP], *grid.references])[1:])

    wanted, usual = beyond(reference_rates), simulated(1, 1)
    if len(wanted) == 1:
        alone = float(wanted[0] / usual[0])
        return Pace(waking=alone, work=alone)
    slopes = np.stack([simulated(2, 1) - usual, simulated(1, 2) - usual], axis=1)
    found = np.ones(2)
    for _ in range(_PACE_STEPS):
        found = np.maximum(0, found + np.linalg.solve(slopes, wanted - simulated(*found)))
    return Pace(waking=float(found[0]), work=float(found[1]))


def run_real(grid: Grid) -> list[float]:
    """Tokens/s of each batch."""
    config = UpConfig(
        target=f"{EMULATED}step_ms={TARGET_MS:g}",
        draft=f"{EMULATED}step_ms={grid.draft_ms:g},alpha={grid.alpha:g},runner_up=0.55",
        address="127.0.0.1:0",
        num_outcomes=str(grid.num_outcomes),
        draft_rtt_ms=grid.rtt_ms,
        grace_s=1.0,
    )

    async def together(address: str) -> list[list[Completion]]:
        async with AsyncClient(address) as client:
            return [
                await asyncio.gather(
                    *(
                        client.generate(params=params, prompt_token_ids=list(workload.PROMPT))
                        for params in batch
                    )
                )
                for batch in grid.batches
            ]

    with Stack(config) as stack:
        batches = asyncio.run(together(stack.address))
    return [
        sum(len(done.token_ids) for done in batch) / max(done.timing.total_ms for done in batch) * 1e3
        for batch in batches
    ]


def _rates(grid: Grid, rates: Sequence[float]) -> list[list[float]]:
    """Of each point, those of its batches that count."""
    found, start = [], 1 + len(grid.references)
    for point in grid.points:
        end = start + len(point.batches())
        found.append(list(rates[end - point.num_repetitions : end]))
        start = end
    return found
