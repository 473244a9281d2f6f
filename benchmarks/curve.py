"""Many streams: total speed and time per output token against their number, and the report `curve.md`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from benchmarks import prompts as python
from benchmarks.names import ASSISTED, CONTINUOUS, NO_SPECULATION, SPECWIRE
from benchmarks.report import Bar, Report, Summary, ratios, summarise, table
from benchmarks.systems import Burst, StreamsSystem
from tools.bench.metrics import latency_figures

_SYSTEMS = (SPECWIRE, NO_SPECULATION, ASSISTED, CONTINUOUS)
_MANY = 16


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
        of_all = latency_figures([tpot for burst in bursts for tpot in burst.tpots_ms])
        self.p99_tpot_ms.append(of_all["p99"])


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
    run = 0  # 0 and 1 are left to the warm-up
    for num_streams in series:  # those that learn have each load for a while
        for _ in range(plan.num_settling_bursts * plan.num_bursts(num_streams)):
            run += 2
            for system in systems:
                if system.learns:
                    exactly(system, python.fresh(prompts[:num_streams], run), plan.num_tokens)
        say(f"{num_streams} streams: settled")
    for repetition in range(plan.num_repetitions):
        for num_streams, of_all in series.items():
            run += 2
            bursts: dict[str, list[Burst]] = {system.name: [] for system in systems}
            for i in range(plan.num_bursts(num_streams)):
                part = prompts[i * num_streams : (i + 1) * num_streams]
                for system in systems:  # the same prompts, but for the leading token of those who share
                    fresh = python.fresh(part, run + system.own_prompts)
                    bursts[system.name].append(exactly(system, fresh, plan.num_tokens))
            for name, of_one in bursts.items():
                of_all[name].add(of_one)
            rates = ", ".join(f"{name} {one.tokens_per_s[-1]:.0f}" for name, one in of_all.items())
            say(f"repetition {repetition + 1}, {num_streams} streams, tokens/s: {rates}")
    return series


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
    fresh = python.fresh(prompts[: max(plan.num_streams)], 0)
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


# --- the report -----------------------------------------------------------------------------------

_METHOD = (
    f"So many requests start together, each with a prompt of its own ({python.LEAST_TOKENS + 1} to "
    f"{python.MOST_TOKENS + 1} tokens of Python that the pair was not trained on), greedy, with the "
    "same number of output tokens. A cell holds the total output tokens per second, from the first "
    "request to the last token, and the 99th percentile over the requests of the time per output token "
    "as its reader saw it: (end - first chunk) / (tokens - 1). Cells are medians over repetitions; in a "
    "repetition all systems run back to back, and ratios of tokens/s (median, least to greatest) are "
    "taken within it. With few streams a repetition consists of several such bursts. No prompt is "
    "repeated to a server that could find it in its prefix cache.\n\n"
    "specwire is timed at its client, over three processes, with its default number of draft tokens and "
    "without speculation on the same running server; transformers inside its process. Assisted "
    "generation serves one request at a time, so its total rate hardly depends on their number: a "
    "sample of the requests is measured beside every other measurement, with the faster of two "
    "settings, and its time per output token leaves out how long a request waits for its turn. "
    "Continuous batching is `generate_batch` with its manager kept warm. specwire, which finds out by "
    "trials how much to draft, has three unmeasured repetitions at each number of streams first."
)


def ratio(of_all: Mapping[str, Series], reference: str) -> Summary:
    """specwire's tokens/s over another system's, within each repetition."""
    return summarise(ratios(of_all[SPECWIRE].tokens_per_s, of_all[reference].tokens_per_s))


def bars(curves: Sequence[Curve]) -> list[Bar]:
    """Never slower with speculation, on every target; far ahead of others with many streams."""
    widened = {curve.target: curve.series for curve in curves}.get("widened", {})
    of_many = widened.get(_MANY)
    found = [
        Bar(
            what=f"widened, {_MANY} streams: tokens/s × {name}",
            measured=ratio(of_many, name).median if of_many else None,
            limit=limit,
            at_least=True,
        )
        for name, limit in ((ASSISTED, 5.0), (CONTINUOUS, 1.0))
    ]
    for curve in curves:
        least = min(ratio(of_all, NO_SPECULATION).median for of_all in curve.series.values())
        what = f"{curve.target}, least of all rows: tokens/s × without speculation"
        found.append(Bar(what=what, measured=least, limit=0.98, at_least=True))
    return found


def report(machine: Mapping[str, str], curves: Sequence[Curve]) -> Report:
    """Of all targets."""
    return Report(
        name="curve",
        title="Many streams on a CPU",
        command="make bench",
        machine=machine,
        about=_METHOD,
        bars=bars(curves),
        details="\n\n".join(map(_table, curves)),
        data={"curves": [asdict(curve) for curve in curves]},
    )


def _table(curve: Curve) -> str:
    num_repetitions = len(next(iter(curve.series.values()))[SPECWIRE].tokens_per_s)
    head = ["streams", "specwire", "without speculation", "assisted", "continuous batching"]
    rows = [
        [num_streams, *(_cell(of_all[name]) for name in _SYSTEMS)]
        + [ratio(of_all, name).text(2) for name in _SYSTEMS[1:]]
        for num_streams, of_all in curve.series.items()
    ]
    same = ", ".join(f"{name} {count}" for name, count in curve.identical.items())
    return (
        f"## {curve.title}, {curve.num_tokens} tokens a request, {num_repetitions} repetitions\n\n"
        "Tokens/s; p99 time per output token in ms.\n\n"
        + table([*head, *(f"× {name}" for name in head[2:])], rows)
        + f"\n\nAssisted generation: {curve.assisted_setting}. Prompts of {curve.num_compared}, all at once, "
        f"with specwire's very tokens: {same}."
    )


def _cell(series: Series) -> str:
    rate = median(series.tokens_per_s)
    return f"{rate:,.{0 if rate >= 100 else 1}f}; {median(series.p99_tpot_ms):.1f}"
