"""Total speed and time per output token against the number of concurrent streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks import windows
from tools.bench.metrics import LatencySummary, RequestRecord


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured for one target.

    Attributes:
        least_requests: a repetition with fewer streams consists of several bursts, one after another, until
            it has had so many requests. Assisted generation gets so many at any number of streams.
        num_settling_bursts: repetitions that a system which learns has at each number of streams before it is
            measured there, with its own first prompts.
    """

    num_streams: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    num_repetitions: int = 3
    num_tokens: int = 48
    least_requests: int = 4
    num_settling_bursts: int = 3

    def num_bursts(self, num_streams: int) -> int:
        """Bursts in a repetition with so many streams."""
        return -(-self.least_requests // num_streams)

    @property
    def num_windows(self) -> int:
        """Distinct prompts that the largest repetition needs."""
        return max(n * self.num_bursts(n) for n in self.num_streams)


@dataclass(frozen=True, kw_only=True)
class Burst:
    """Requests that started together, all done.

    Attributes:
        elapsed_s: from the first request to the last token of all.
        token_ids: [num_requests][num_tokens].
        tpots_ms: [num_requests] time per output token as its reader saw it, in milliseconds.
    """

    elapsed_s: float
    token_ids: Sequence[Sequence[int]]
    tpots_ms: Sequence[float]


def tpot_ms(first_s: float, end_s: float, num_tokens: int) -> float:
    """Time per output token after the first, as `tools.bench.metrics` defines it; of at least two."""
    record = RequestRecord(start_s=0.0, end_s=end_s, chunk_times_s=(first_s,), num_output_tokens=num_tokens)
    value = record.tpot_ms
    assert value is not None, "one token has no time per token after the first"
    return value


class StreamsSystem(Protocol):
    """One way to serve many requests.

    Attributes:
        own_prompts: it shares a prefix cache with another system, so it must not get that one's prompts.
        learns: it adapts itself to the load, and is measured when it has.
    """

    name: str
    own_prompts: bool
    learns: bool

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Burst:
        """Continue all prompts, begun together, by `num_tokens` tokens each, greedily."""
        ...


@dataclass
class Series:
    """One system at one number of streams: one entry a repetition.

    Attributes:
        tokens_per_s: output tokens of all requests over the sum of the bursts' times.
        p99_tpot_ms: 99th percentile of the time per output token over the requests.
    """

    tokens_per_s: list[float] = field(default_factory=list)
    p99_tpot_ms: list[float] = field(default_factory=list)

    def add(self, bursts: Sequence[Burst]) -> None:
        """Note one repetition."""
        num_tokens = sum(len(ids) for burst in bursts for ids in burst.token_ids)
        self.tokens_per_s.append(num_tokens / sum(burst.elapsed_s for burst in bursts))
        of_all = LatencySummary.of([tpot for burst in bursts for tpot in burst.tpots_ms])
        assert of_all is not None
        self.p99_tpot_ms.append(of_all.percentiles[99])


@dataclass
class Curve:
    """All systems on one target.

    Attributes:
        target: its short name.
        title: with size and number format.
        assisted_setting: which of transformers' two ran.
        identical: by system, how many of `num_compared` prompts, all at once, gave the first system's very
            tokens.
        series: by number of streams, then by system, in the order of measurement.
    """

    target: str
    title: str
    num_tokens: int
    assisted_setting: str
    num_compared: int
    identical: dict[str, int]
    series: dict[int, dict[str, Series]]


def measure(
    systems: Sequence[StreamsSystem],
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    say: Callable[[str], None],
) -> dict[int, dict[str, Series]]:
    """Every repetition runs all systems at one number of streams back to back, then at the next."""
    series = {n: {system.name: Series() for system in systems} for n in plan.num_streams}
    run = 0
    for num_streams in series:
        run = _settle(systems, plan, prompts, num_streams, run)
        say(f"{num_streams} streams: settled")
    for repetition in range(plan.num_repetitions):
        for num_streams, of_all in series.items():
            run += 2
            bursts = _repetition(systems, plan, prompts, num_streams, run)
            for name, of_one in bursts.items():
                of_all[name].add(of_one)
            rates = ", ".join(f"{name} {one.tokens_per_s[-1]:.0f}" for name, one in of_all.items())
            say(f"repetition {repetition + 1}, {num_streams} streams, tokens/s: {rates}")
    return series


def _settle(
    systems: Sequence[StreamsSystem],
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    num_streams: int,
    run: int,
) -> int:
    """Let those that learn have this load for a while; returns the last run that was used up."""
    for _ in range(plan.num_settling_bursts * plan.num_bursts(num_streams)):
        run += 2  # 0 and 1 are left to the warm-up
        for system in systems:
            if system.learns:
                exactly(system, windows.fresh(prompts[:num_streams], run), plan.num_tokens)
    return run


def _repetition(
    systems: Sequence[StreamsSystem],
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    num_streams: int,
    run: int,
) -> dict[str, list[Burst]]:
    """Bursts of each system; all have the same prompts but for the leading token of those who share."""
    bursts: dict[str, list[Burst]] = {system.name: [] for system in systems}
    for i in range(plan.num_bursts(num_streams)):
        part = prompts[i * num_streams : (i + 1) * num_streams]
        for system in systems:
            fresh = windows.fresh(part, run + system.own_prompts)
            bursts[system.name].append(exactly(system, fresh, plan.num_tokens))
    return bursts


def compare_texts(
    systems: Sequence[StreamsSystem], plan: Plan, prompts: Sequence[Sequence[int]], *, exact: bool
) -> dict[str, int]:
    """How many prompts of the largest burst give the first system's very tokens, by system.

    This is the warm-up as well: lazy imports, thread pools and allocations belong in no measurement.

    Args:
        systems: those that take a whole burst.
        exact: speculation must not change a token. In half precision the size of a batch does.

    Raises:
        RuntimeError: with `exact`, the second system differs from the first.
    """
    fresh = windows.fresh(prompts[: max(plan.num_streams)], 0)
    reference, *others = [exactly(system, fresh, plan.num_tokens).token_ids for system in systems]
    identical = {
        system.name: sum(ours == theirs for ours, theirs in zip(reference, texts, strict=True))
        for system, texts in zip(systems[1:], others, strict=True)
    }
    if exact and identical[systems[1].name] != len(reference):
        num_different = len(reference) - identical[systems[1].name]
        raise RuntimeError(f"{num_different} of {len(reference)} texts change with speculation")
    return identical


def exactly(system: StreamsSystem, prompts: Sequence[Sequence[int]], num_tokens: int) -> Burst:
    """One burst, refused when a request has not made exactly `num_tokens` tokens."""
    burst = system.run(prompts, num_tokens)
    wrong = [len(ids) for ids in burst.token_ids if len(ids) != num_tokens]
    if wrong:
        raise RuntimeError(f"{system.name} made {wrong[0]} tokens, not {num_tokens}")
    return burst
