"""How near the chosen number of draft tokens comes to the best fixed one, and to plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat

from benchmarks.report import Bar, table
from benchmarks.simulation import workload
from benchmarks.simulation.devices import StepCost
from benchmarks.simulation.network import Link, Overheads
from benchmarks.simulation.system import Setting
from specwire.core import SamplingParams
from specwire.engine.emulated import EmulatedModel

LEAN = Overheads(message_ms=0.02, wake_ms=0.05, round_ms=0.02, proposal_us=20)
"""An exchange of messages in 0.2 ms: neighbours, services that are awake."""
WIDE_VOCAB = 1 << 22
"""So that no two streams ever come to the same text."""
ALPHAS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
RTTS_MS = (0.0, 5.0, 20.0, 80.0)
FIXED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
LEAST_OF_BEST = {"steady texts": 0.95, "alternating texts": 1.0, "shared device": 0.95}
LEAST_OF_PLAIN = 0.98
_PLAIN, _CHOSEN = "0", "auto"
_TARGET, _DRAFT = StepCost(base_ms=30.0), StepCost(base_ms=2.0)


@dataclass(frozen=True, kw_only=True)
class Text:
    """How easy it is: always alike, or in stretches of `period` tokens that alternate."""

    alpha: float
    hard_alpha: float = 0.0
    period: int = 0

    @property
    def model(self) -> EmulatedModel:
        """A draft for it."""
        return EmulatedModel(
            alpha=self.alpha,
            hard_alpha=self.hard_alpha,
            period=self.period,
            runner_up=0.55,
            vocab_size=WIDE_VOCAB,
        )

    def __str__(self) -> str:
        return f"{self.alpha:g} and {self.hard_alpha:g} in turns" if self.period else f"{self.alpha:g}"


ALTERNATING = (Text(alpha=0.95, hard_alpha=0.3, period=300),)


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is generated, and where.

    Attributes:
        slowdown: as of `Setting`; over 1 where the draft shares the target's device.
    """

    text: Text
    rtt_ms: float
    num_streams: int = 1
    slowdown: float = 1.0
    target: StepCost = _TARGET
    draft: StepCost = _DRAFT

    @property
    def kind(self) -> str:
        """Points of a kind are judged together."""
        if self.slowdown > 1:
            return "shared device"
        return "alternating texts" if self.text.period else "steady texts"


SHARED = [
    Point(
        text=Text(alpha=0.8),
        rtt_ms=0.0,
        num_streams=num_streams,
        slowdown=2.0,
        target=StepCost(base_ms=3.0, token_us=300.0),
        draft=StepCost(base_ms=1.0, token_us=100.0),
    )
    for num_streams in (1, 4)
]
"""Passes about as long as the embedded pair's on a CPU; two at once have half of its time each."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Tokens/s of all streams of a point.

    Attributes:
        plain: without drafts.
        fixed: by number of draft tokens.
        chosen: by the adaptive length, once it has seen twice as many tokens as are counted.
        young: by the adaptive length, while it saw the first half of those.
    """

    point: Point
    plain: float
    fixed: dict[int, float]
    chosen: float
    young: float

    @property
    def best_length(self) -> int:
        """Of the fixed ones."""
        return max(self.fixed, key=lambda length: self.fixed[length])

    @property
    def of_best(self) -> float:
        """Chosen over the best of all fixed ones and plain decoding."""
        return self.chosen / max(self.plain, *self.fixed.values())

    @property
    def of_plain(self) -> float:
        """Chosen over plain decoding."""
        return self.chosen / self.plain

    @property
    def young_of_plain(self) -> float:
        """Likewise, while it learnt."""
        return self.young / self.plain


def explore(points: Sequence[Point], num_tokens: int, say: Callable[[str], None]) -> list[Choice]:
    """Of each length `num_tokens` of a stream are counted, after half as many, or twice if it learns."""
    found = []
    names = [_PLAIN, _CHOSEN, *map(str, FIXED)]
    with ProcessPoolExecutor() as pool:
        for point in points:
            measured = pool.map(rates, repeat(point), names, repeat(num_tokens))
            (*_, plain), (young, _, chosen), *fixed = measured
            by_length = {n: rate for n, (*_, rate) in zip(FIXED, fixed, strict=True)}
            found.append(Choice(point=point, plain=plain, fixed=by_length, chosen=chosen, young=young))
            say(_line(found[-1]))
    return found


def rates(point: Point, num_draft_tokens: str, num_tokens: int) -> list[float]:
    """Tokens/s of batches one after the other, the last of which counts."""
    setting = Setting(
        model=point.text.model,
        target=point.target,
        draft=point.draft,
        slowdown=point.slowdown,
        num_draft_tokens=num_draft_tokens,
        link=Link(rtt_ms=point.rtt_ms),
        overheads=LEAN,
    )
    warm_up = [num_tokens] * 2 if num_draft_tokens == _CHOSEN else [num_tokens // 2]
    params = [SamplingParams(max_tokens=n, temperature=0, seed=1) for n in (*warm_up, num_tokens)]
    batches = [[each] * point.num_streams for each in params]
    return [workload.tokens_per_s(batch) for batch in workload.completions(setting, batches)]


def _line(done: Choice) -> str:
    point = done.point
    return (
        f"{point.kind}, streams {point.num_streams}, alpha {point.text}, {point.rtt_ms:g} ms: "
        f"{done.of_best:.3f} of the best ({done.best_length}), {done.of_plain:.3f} of plain; "
        f"young {done.young_of_plain:.3f}"
    )


def bars(choices: Sequence[Choice]) -> list[Bar]:
    """The worst points."""
    found = []
    for kind, least in LEAST_OF_BEST.items():
        alike = [done for done in choices if done.point.kind == kind]
        named = {
            "the best fixed length": ([done.of_best for done in alike], least),
            "plain decoding": ([done.of_plain for done in alike], LEAST_OF_PLAIN),
        }
        for what, (ratios, limit) in named.items():
            worst = min(ratios, default=None)
            found.append(
                Bar(what=f"{kind}: chosen over {what}, worst", measured=worst, limit=limit, at_least=True)
            )
    return found


def details(choices: Sequence[Choice]) -> str:
    """All points, in tokens/s."""
    head = [
        "",
        "streams",
        "α",
        "RTT ms",
        "plain",
        "best fixed",
        "adaptive",
        "of the best",
        "of plain",
        "while it learnt",
    ]
    rows = [
        [
            done.point.kind,
            done.point.num_streams,
            done.point.text,
            f"{done.point.rtt_ms:g}",
            f"{done.plain:.1f}",
            f"{max(done.fixed.values()):.1f} (γ = {done.best_length})",
            f"{done.chosen:.1f}",
            *(f"{each:.3f}" for each in (done.of_best, done.of_plain, done.young_of_plain)),
        ]
        for done in choices
    ]
    return table(head, rows)
