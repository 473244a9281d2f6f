"""Where separation pays: what cannot be built here, planned with the real controller in simulated time.

Four ways to serve the same streams on the same target devices are compared: the target alone, the draft on
the target's own devices, and separate drafts in lockstep or with prepared outcomes. All choose the number
of draft tokens by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from benchmarks.simulation import workload
from benchmarks.simulation.controller import LEAN, WIDE_VOCAB
from benchmarks.simulation.devices import StepCost
from benchmarks.simulation.network import Link
from benchmarks.simulation.system import Setting
from benchmarks.simulation.workload import Steady
from specwire.engine.emulated import EmulatedModel

TARGET = StepCost(base_ms=30, sequence_us=50, token_us=80)
"""A 70B model on a few GPUs: weights, a sequence's keys and values, the arithmetic of a token."""
DRAFT = StepCost(base_ms=2, sequence_us=10, token_us=3)
"""A 1B model on one GPU."""
SLOW_DRAFT = StepCost(base_ms=6, sequence_us=20, token_us=10)
RTTS_MS = (1, 5, 10, 20, 40, 80)
ALONE, COLOCATED, LOCKSTEP, PREPARED = "target alone", "colocated", "lockstep", "prepared"
_FIXED, _FIXED_PREPARED, _FIXED_OF_MANY = (1, 2, 3, 4, 6, 8), (3, 6), (3,)
_MANY = 32
JITTER = 0.05
"""Of a message's way, in round trips."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to serve some streams.

    Attributes:
        num_streams: of a target device.
        num_drafts: draft devices for each target device.
        num_groups: target devices.
    """

    way: str
    alpha: float = 0.7
    rtt_ms: float = 0.0
    num_streams: int = 16
    num_drafts: int = 2
    slow_draft: bool = False
    num_groups: int = 1
    num_draft_tokens: str = "auto"
    num_outcomes: str = "auto"

    def setting(self) -> Setting:
        """As a world to be simulated."""
        return Setting(
            model=EmulatedModel(alpha=self.alpha, runner_up=0.55, vocab_size=WIDE_VOCAB),
            target=TARGET,
            draft=SLOW_DRAFT if self.slow_draft else DRAFT,
            num_draft_tokens="0" if self.way == ALONE else self.num_draft_tokens,
            num_outcomes=self.num_outcomes if self.way == PREPARED else "0",
            link=Link(rtt_ms=self.rtt_ms, jitter_ms=JITTER * self.rtt_ms),
            overheads=LEAN,
            num_groups=self.num_groups,
            num_drafts=0 if self.way == ALONE else self.num_drafts * self.num_groups,
            colocated=self.way == COLOCATED,
        )


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A case and what came of it.

    Attributes:
        fixed: tokens/s of a target device by number of draft tokens, where it is not chosen; 16 outcomes are
            prepared for then, in the case of prepared outcomes.
        took_s: to simulate all that.
    """

    study: str
    case: Case
    found: Steady
    fixed: dict[int, float]
    took_s: float


def studies() -> Iterator[tuple[str, Case]]:
    """All cases, by study."""
    for alpha in (0.5, 0.7, 0.9):
        yield "distance", Case(way=ALONE, alpha=alpha)
        yield "distance", Case(way=COLOCATED, alpha=alpha)
        for rtt_ms in RTTS_MS if alpha == 0.7 else (5, 40):
            for way in (LOCKSTEP, PREPARED):
                yield "distance", Case(way=way, alpha=alpha, rtt_ms=rtt_ms)
    for num_streams, num_drafts in ((1, 1), (64, 4), (157, 8)):
        for way in (ALONE, COLOCATED, LOCKSTEP, PREPARED):
            yield (
                "load",
                Case(
                    way=way,
                    rtt_ms=20 if way in (LOCKSTEP, PREPARED) else 0,
                    num_streams=num_streams,
                    num_drafts=num_drafts,
                ),
            )
    yield "slow draft", Case(way=COLOCATED, slow_draft=True)
    for rtt_ms in (5, 40):
        for way in (LOCKSTEP, PREPARED):
            yield "slow draft", Case(way=way, rtt_ms=rtt_ms, slow_draft=True)
    for num_drafts in (1, 2, 4):
        yield "drafts", Case(way=PREPARED, rtt_ms=20, num_streams=64, num_drafts=num_drafts)


def whole() -> Iterator[tuple[str, Case]]:
    """10,048 streams on 64 targets that share 256 drafts, at a length that is fixed: too short to learn."""
    for way in (ALONE, LOCKSTEP, PREPARED):
        yield (
            "whole",
            Case(
                way=way,
                rtt_ms=20 if way != ALONE else 0,
                num_streams=157,
                num_groups=64,
                num_drafts=4,
                num_draft_tokens="2",
                num_outcomes="6",
            ),
        )


def plan(
    cases: Iterable[tuple[str, Case]], known: Mapping[Case, dict[int, float]], say: Callable[[str], None]
) -> list[Planned]:
    """Simulate them all, several at a time, but for fixed lengths that are known."""
    planned = []
    with ProcessPoolExecutor() as pool:
        names, each = zip(*cases, strict=True)
        for done in pool.map(_plan, names, each, (known.get(case) for case in each)):
            planned.append(done)
            say(_line(done))
    return planned


def _plan(study: str, case: Case, known: dict[int, float] | None) -> Planned:
    started_s = time.perf_counter()
    found = _simulate(case, *_spans(case))
    fixed = _fixed(case) if known is None else known
    return Planned(study=study, case=case, found=found, fixed=fixed, took_s=time.perf_counter() - started_s)


def _line(done: Planned) -> str:
    case, found = done.case, done.found
    fixed = ", ".join(f"{length}: {rate:.0f}" for length, rate in done.fixed.items())
    return (
        f"{done.study}: {case.num_groups} x {case.num_streams} streams, alpha {case.alpha:g}, {case.way}, "
        f"{case.rtt_ms:g} ms: {found.per_device:.0f} tokens/s a device, hits {found.hit_rate:.2f}, "
        f"{found.num_draft_tokens:.1f} drafted, p99 {found.token_ms_p99:.0f} ms; "
        f"{fixed} [{done.took_s:.0f} s]"
    )


def _simulate(case: Case, warm_up_s: float, measured_s: float) -> Steady:
    num_streams = case.num_streams * case.num_groups
    return workload.steady(case.setting(), num_streams, warm_up_s=warm_up_s, measured_s=measured_s)


def _fixed(case: Case) -> dict[int, float]:
    """Tokens/s of a target device by number of draft tokens."""
    cases = {
        length: replace(case, num_draft_tokens=str(length), num_outcomes="16")
        for length in _fixed_lengths(case)
    }
    return {length: _simulate(each, *_fixed_spans(case)).per_device for length, each in cases.items()}


def _fixed_lengths(case: Case) -> tuple[int, ...]:
    if case.way == ALONE or case.num_groups > 1:
        return ()
    if case.way != PREPARED:
        return _FIXED
    return _FIXED_OF_MANY if case.num_streams > _MANY else _FIXED_PREPARED


def _spans(case: Case) -> tuple[float, float]:
    """Seconds to warm up and to measure; what is chosen takes rounds to be learnt."""
    if case.num_groups > 1:
        return 0.4, 0.8
    if case.num_streams == 1:
        return 30.0, 60.0
    return (4.0, 2.0) if case.num_streams > _MANY else (30.0, 4.0)


def _fixed_spans(case: Case) -> tuple[float, float]:
    return (5.0, 60.0) if case.num_streams == 1 else (1.0, 2.0)
