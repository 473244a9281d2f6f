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
LEAST_OF_BEST, LEAST_OF_PLAIN = 0.95, 0.98
LEAST_OF_BEST_ALTERNATING = 1.0
_PLAIN, _CHOSEN = "0", "auto"
_TARGET_MS, _DRAFT_MS = 30.0, 2.0


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
class Choice:
    """Tokens/s of one stream at one point.

    Attributes:
        plain: without drafts.
        fixed: by number of draft tokens.
        chosen: by the adaptive length, once it has seen twice as many tokens as are counted.
        young: by the adaptive length, while it saw the first half of those.
    """

    text: Text
    rtt_ms: float
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


def explore(
    texts: Sequence[Text], rtts_ms: Sequence[float], num_tokens: int, say: Callable[[str], None]
) -> list[Choice]:
    """All pairs; of each length `num_tokens` are counted, after half as many, or twice if it learns."""
    found = []
    names = [_PLAIN, _CHOSEN, *map(str, FIXED)]
    with ProcessPoolExecutor() as pool:
        for text in texts:
            for rtt_ms in rtts_ms:
                measured = pool.map(rates, repeat(text), repeat(rtt_ms), names, repeat(num_tokens))
                (*_, plain), (young, _, chosen), *fixed = measured
                by_length = {n: rate for n, (*_, rate) in zip(FIXED, fixed, strict=True)}
                done = Choice(
                    text=text, rtt_ms=rtt_ms, plain=plain, fixed=by_length, chosen=chosen, young=young
                )
                say(_line(done))
                found.append(done)
    return found


def rates(text: Text, rtt_ms: float, num_draft_tokens: str, num_tokens: int) -> list[float]:
    """Tokens/s of streams one after the other, the last of which counts."""
    setting = Setting(
        model=text.model,
        target=StepCost(base_ms=_TARGET_MS),
        draft=StepCost(base_ms=_DRAFT_MS),
        num_draft_tokens=num_draft_tokens,
        link=Link(rtt_ms=rtt_ms),
        overheads=LEAN,
    )
    warm_up = [num_tokens] * 2 if num_draft_tokens == _CHOSEN else [num_tokens // 2]
    batches = [[SamplingParams(max_tokens=n, temperature=0, seed=1)] for n in (*warm_up, num_tokens)]
    return [workload.tokens_per_s(batch) for batch in workload.completions(setting, batches)]


def _line(done: Choice) -> str:
    return (
        f"alpha {done.text}, {done.rtt_ms:g} ms: {done.of_best:.3f} of the best ({done.best_length}), "
        f"{done.of_plain:.3f} of plain; young {done.young_of_plain:.3f}"
    )


def bars(choices: Sequence[Choice]) -> list[Bar]:
    """The worst points."""
    steady = [done.of_best for done in choices if not done.text.period]
    turning = [done.of_best for done in choices if done.text.period]
    named = {
        "steady texts: chosen over the best fixed length, worst": (steady, LEAST_OF_BEST),
        "alternating texts: chosen over the best fixed length, worst": (turning, LEAST_OF_BEST_ALTERNATING),
        "chosen over plain decoding, worst": ([done.of_plain for done in choices], LEAST_OF_PLAIN),
    }
    return [
        Bar(what=what, measured=min(found, default=None), limit=limit, at_least=True)
        for what, (found, limit) in named.items()
    ]


def details(choices: Sequence[Choice]) -> str:
    """All points, in tokens/s."""
    head = ["α", "RTT ms", "plain", "best fixed", "adaptive", "of the best", "of plain", "while it learnt"]
    rows = [
        [
            done.text,
            f"{done.rtt_ms:g}",
            f"{done.plain:.1f}",
            f"{max(done.fixed.values()):.1f} (γ = {done.best_length})",
            f"{done.chosen:.1f}",
            *(f"{each:.3f}" for each in (done.of_best, done.of_plain, done.young_of_plain)),
        ]
        for done in choices
    ]
    return table(head, rows)
