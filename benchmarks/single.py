"""One stream: all systems on the same prompts, in interleaved repetitions, and the report `cpu.md`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.echo import EchoPair
from benchmarks.names import ASSISTED, ASSISTED_CONSTANT, PLAIN, SPECWIRE
from benchmarks.report import Report, ratios, summarise, table
from benchmarks.systems import CONSTANT_TOKENS, Sample, System, Work

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

    @property
    def best_assisted(self) -> str:
        """The faster of transformers' own settings on this target and temperature, by the median."""
        names = [name for name in (ASSISTED, ASSISTED_CONSTANT) if name in self.series]
        return max(names, key=lambda name: statistics.median(self.series[name].tokens_per_s))


def compare(
    target: str,
    temperature: float,
    systems: Sequence[System],
    plan: Plan,
    echo: EchoPair,
    say: Callable[[str], None],
) -> Comparison:
    """Every repetition runs every prompt through every system, in the same order: whatever slows the machine
    for a while meets every system alike."""
    comparison = Comparison(target, temperature, plan.num_tokens, {s.name: Series() for s in systems})
    for repetition in range(plan.num_repetitions):
        samples: dict[str, list[Sample]] = {system.name: [] for system in systems}
        for prompt in plan.prompts:
            work = Work(
                prompt_token_ids=prompt, num_tokens=plan.num_tokens, temperature=temperature, seed=repetition
            )
            for system in systems:
                sample = system.generate(work)
                if len(sample.token_ids) != work.num_tokens:
                    made = len(sample.token_ids)
                    raise RuntimeError(f"{system.name} made {made} tokens, not {work.num_tokens}")
                samples[system.name].append(sample)
        for name, of_one in samples.items():
            comparison.series[name].add(of_one)
        round_trip_s = statistics.median(echo.round_trips_s(plan.num_echoes))
        comparison.two_echoes_ms.append(NUM_EXCHANGES * round_trip_s * 1e3)
        rates = ", ".join(f"{name} {each.tokens_per_s[-1]:.0f}" for name, each in comparison.series.items())
        say(f"{target}, temperature {temperature:g}, repetition {repetition + 1}, tokens/s: {rates}")
    return comparison


def warm_up(systems: Sequence[System], plan: Plan, temperatures: Sequence[float]) -> None:
    """Lazy imports, thread pools, allocations, caches: none of them belongs in a measurement."""
    for temperature in temperatures:
        work = Work(
            prompt_token_ids=plan.prompts[0],
            num_tokens=min(24, plan.num_tokens),
            temperature=temperature,
            seed=0,
        )
        for system in systems:
            system.generate(work)


# --- the report -----------------------------------------------------------------------------------


def report(machine: Mapping[str, str], comparisons: Sequence[Comparison]) -> Report:
    """Rates are medians over repetitions with the least and the greatest."""
    series = next(iter(comparisons[0].series.values()))
    about = (
        "One stream; the same prompts, number of tokens, threads for the target and number formats for all "
        f"(draft in float32); {len(series.tokens_per_s)} interleaved repetitions of {len(series.token_ids)} "
        "prompts after a warm-up. Rates are medians (least to greatest). Ratios are taken within each "
        "repetition. specwire is timed at its client, over three processes; transformers inside its process. "
        "Assisted generation runs with its defaults (20 guesses, cut at a confidence of 0.4) and with a "
        f"constant {CONSTANT_TOKENS}; the faster one is *best assisted*."
    )
    details = [
        *(_table(comparison) for comparison in comparisons),
        _overhead(comparisons),
    ]
    return Report(
        name="cpu",
        title="One stream on a CPU",
        command="make bench",
        machine=machine,
        about=about,
        details="\n\n".join(details),
        data={"comparisons": [asdict(each) for each in comparisons]},
    )


def _table(comparison: Comparison) -> str:
    mode = "greedy" if comparison.temperature == 0 else f"temperature {comparison.temperature:g}"
    plain = comparison.series[PLAIN]
    assisted = comparison.series[comparison.best_assisted]
    rows = [
        [
            name,
            summarise(each.tokens_per_s).text(0 if plain.tokens_per_s[0] > 100 else 1),
            summarise(ratios(each.tokens_per_s, plain.tokens_per_s)).text(2),
            summarise(ratios(each.tokens_per_s, assisted.tokens_per_s)).text(2),
            f"{statistics.median(each.tokens_per_pass):.2f}",
        ]
        for name, each in comparison.series.items()
    ]
    head = ["system", "tokens/s", "× plain generate", "× best assisted", "tokens a target pass"]
    parts = [f"## {comparison.target}, {mode}, {comparison.num_tokens} tokens", table(head, rows)]
    if comparison.temperature == 0:
        same = {
            name: sum(ours == theirs for ours, theirs in zip(each.token_ids, plain.token_ids, strict=True))
            for name, each in comparison.series.items()
            if name != PLAIN
        }
        counts = ", ".join(f"{name} {num}" for name, num in same.items())
        parts.append(f"Prompts of {len(plain.token_ids)} with plain generate's very tokens: {counts}.")
    return "\n\n".join(parts)


def _overhead(comparisons: Sequence[Comparison]) -> str:
    rows = []
    for comparison in comparisons:
        own, echoes = comparison.series[SPECWIRE].own_ms_per_round, comparison.two_echoes_ms
        cells = (summarise(each).text(2) for each in (own, echoes, ratios(own, echoes)))
        rows.append([f"{comparison.target}, {comparison.temperature:g}", *cells])
    return (
        "## The coordinator's own time a round\n\n"
        "All that is neither spent in a model service nor on the way to one, against two bare grpc.aio "
        "stream round trips of 1 KB measured in the same repetition.\n\n"
        + table(["target, temperature", "own time (ms)", "two round trips (ms)", "ratio"], rows)
    )
