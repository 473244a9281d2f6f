"""Interleaved repetitions: whatever slows the machine for a while meets every system alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.echo import EchoPair
from benchmarks.systems import Sample, System, Work

NUM_EXCHANGES = 2
"""Stream round trips of a specwire round: one with the draft service, one with the verify service."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured for one target."""

    num_repetitions: int
    num_tokens: int
    prompts: Sequence[Sequence[int]]
    num_echoes: int = 300


@dataclass
class Series:
    """One system at one temperature: one entry a repetition, all prompts of it together.

    Attributes:
        tokens_per_s: output tokens over the sum of the prompts' times.
        tokens_per_pass: output tokens a forward pass of the target.
        own_ms_per_round: see `systems.own_ms`; 0 for transformers.
        token_ids: of each prompt, from the last repetition.
    """

    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_pass: list[float] = field(default_factory=list)
    own_ms_per_round: list[float] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)

    def add(self, samples: Sequence[Sample]) -> None:
        """Note one repetition: a sample a prompt."""
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        num_passes = sum(sample.num_passes for sample in samples)
        self.tokens_per_s.append(num_tokens / sum(sample.elapsed_s for sample in samples))
        self.tokens_per_pass.append(num_tokens / num_passes)
        self.own_ms_per_round.append(sum(sample.own_ms for sample in samples) / num_passes)
        self.token_ids = [list(sample.token_ids) for sample in samples]


@dataclass
class Comparison:
    """All systems on one target at one temperature.

    Attributes:
        series: by system name, in the order of measurement.
        two_echoes_ms: two bare round trips in each repetition, from the median one.
    """

    target: str
    temperature: float
    num_tokens: int
    series: dict[str, Series]
    two_echoes_ms: list[float] = field(default_factory=list)


def compare(
    target: str,
    temperature: float,
    systems: Sequence[System],
    plan: Plan,
    echo: EchoPair,
    say: Callable[[str], None],
) -> Comparison:
    """Every repetition runs every prompt through every system, in the same order."""
    comparison = Comparison(target, temperature, plan.num_tokens, {s.name: Series() for s in systems})
    for repetition in range(plan.num_repetitions):
        samples: dict[str, list[Sample]] = {system.name: [] for system in systems}
        for prompt in plan.prompts:
            work = _work(prompt, plan.num_tokens, temperature, seed=repetition)
            for system in systems:
                samples[system.name].append(_exactly(system, work))
        for name, of_one in samples.items():
            comparison.series[name].add(of_one)
        round_trip_s = statistics.median(echo.round_trips_s(plan.num_echoes))
        comparison.two_echoes_ms.append(NUM_EXCHANGES * round_trip_s * 1e3)
        say(_progress(comparison, repetition, plan.num_repetitions))
    return comparison


def warm_up(systems: Sequence[System], plan: Plan, temperatures: Sequence[float]) -> None:
    """Lazy imports, thread pools, allocations, caches: none of them belongs in a measurement."""
    for temperature in temperatures:
        for system in systems:
            system.generate(_work(plan.prompts[0], min(24, plan.num_tokens), temperature, seed=0))


def _work(prompt: Sequence[int], num_tokens: int, temperature: float, seed: int) -> Work:
    return Work(prompt_token_ids=prompt, num_tokens=num_tokens, temperature=temperature, seed=seed)


def _exactly(system: System, work: Work) -> Sample:
    sample = system.generate(work)
    if len(sample.token_ids) != work.num_tokens:
        raise RuntimeError(f"{system.name} made {len(sample.token_ids)} tokens, not {work.num_tokens}")
    return sample


def _progress(comparison: Comparison, repetition: int, num_repetitions: int) -> str:
    rates = ", ".join(f"{name} {series.tokens_per_s[-1]:.0f}" for name, series in comparison.series.items())
    where = f"{comparison.target}, temperature {comparison.temperature:g}"
    return f"{where}, repetition {repetition + 1} of {num_repetitions}, tokens/s: {rates}"
