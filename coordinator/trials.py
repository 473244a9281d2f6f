"""Does speculation pay at all, here and now? Found out by doing both, not by a model.

What a model of costs cannot know, a trial shows: draft and target that share a processor, groups of streams
that take turns, a slow network. Every stream of the coordinator takes part in a trial, since what one does
slows the others. The mode that brings more tokens a second to a stream wins; the other is tried again so
rarely that trials cost one per cent, and less from time to time. Pure: no clock, no network.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

_SETTLING_ROUNDS = 2
"""Rounds of a stream in a new mode that are not counted: others may still be in the old one."""
_TRIAL_ROUNDS = 6
"""Rounds of each stream that a trial counts."""
_MIN_TRIAL_ROUNDS = 16
_MEMORY_ROUNDS = 64
"""Rounds of each stream after which a measurement has faded to a third."""
_TRIAL_COST = 0.01
_MAX_DOUBLINGS = 3
"""Every trial that changes nothing doubles the pause after it, so many times."""
_MIN_PAUSE_ROUNDS = 50
_ADVANTAGE = 1.01
"""Speculation must bring so many times the tokens of plain decoding."""


class Mode(Enum):
    """How all streams of a coordinator decode."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"

    @property
    def other(self) -> Mode:
        """The one of the two that this is not."""
        return Mode.SPECULATIVE if self is Mode.PLAIN else Mode.PLAIN


@dataclass
class Rate:
    """Tokens a stream emits and the time it takes for them, old rounds faded."""

    tokens: float = 0.0
    time_ns: float = 0.0
    rounds: float = 0.0

    @property
    def per_ns(self) -> float:
        """Tokens a nanosecond; 0 before the first round."""
        return self.tokens / self.time_ns if self.time_ns else 0.0

    @property
    def round_ns(self) -> float:
        """Mean time of a round; 0 before the first one."""
        return self.time_ns / self.rounds if self.rounds else 0.0

    def add(self, num_tokens: int, time_ns: int, memory_rounds: int) -> None:
        """One round of a stream."""
        kept = 1 - 1 / memory_rounds
        self.tokens = self.tokens * kept + num_tokens
        self.time_ns = self.time_ns * kept + time_ns
        self.rounds = self.rounds * kept + 1


@dataclass
class _Level:
    """What was measured with about so many streams.

    Attributes:
        counted: rounds counted in the mode that is on now, since it is on.
        pause: rounds of all streams until the next trial.
        confirmed: trials in a row that changed nothing.
    """

    best: Mode
    mode: Mode
    rates: dict[Mode, Rate] = field(default_factory=lambda: {mode: Rate() for mode in Mode})
    counted: int = 0
    pause: int = 0
    confirmed: int = 0

    def switch(self, mode: Mode) -> None:
        self.mode, self.counted = mode, 0


class Trials:
    """Chooses the mode, and when to try the other one; for each number of streams, to a power of two."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}

    def mode(self, num_streams: int) -> Mode:
        """What streams are to do in the rounds that begin now."""
        return self._level(num_streams).mode

    def on_trial(self, num_streams: int) -> bool:
        """True while the mode is not the one that is thought to be better."""
        level = self._level(num_streams)
        return level.mode is not level.best

    def rate(self, mode: Mode, num_streams: int) -> Rate:
        """What was measured of a mode with about so many streams."""
        return self._level(num_streams).rates[mode]

    def add(self, mode: Mode, num_streams: int, num_tokens: int, time_ns: int) -> None:
        """A round of a stream that has settled in `mode`; and how long it took."""
        level = self._level(num_streams)
        if mode is not level.mode:
            return  # begun before the switch
        level.rates[mode].add(num_tokens, time_ns, _MEMORY_ROUNDS * num_streams)
        level.counted += 1
        trial_rounds = max(_MIN_TRIAL_ROUNDS, _TRIAL_ROUNDS * num_streams)
        if level.mode is not level.best:
            if level.counted >= trial_rounds:
                self._decide(level, trial_rounds, num_streams)
        elif level.counted >= max(trial_rounds, level.pause):
            level.switch(level.best.other)

    def _decide(self, level: _Level, trial_rounds: int, num_streams: int) -> None:
        """The trial is over: on with the better mode, until another trial costs one per cent."""
        plain, speculative = (level.rates[mode].per_ns for mode in (Mode.PLAIN, Mode.SPECULATIVE))
        best = Mode.SPECULATIVE if speculative >= _ADVANTAGE * plain else Mode.PLAIN
        level.confirmed = level.confirmed + 1 if best is level.best else 0
        level.best = best
        loss = 1 - min(plain, speculative) / max(plain, speculative)
        better, worse = level.rates[best].round_ns, level.rates[best.other].round_ns
        rounds = trial_rounds + _SETTLING_ROUNDS * num_streams
        pause = rounds * worse / better * loss / _TRIAL_COST * 2 ** min(level.confirmed, _MAX_DOUBLINGS)
        level.pause = int(max(_MIN_PAUSE_ROUNDS * num_streams, pause))
        level.switch(level.best)

    def _level(self, num_streams: int) -> _Level:
        """A number that is new begins as the nearest one that is known."""
        key = max(1, num_streams).bit_length()
        if key not in self._levels:
            near = min(self._levels, key=lambda known: abs(known - key), default=None)
            best = Mode.SPECULATIVE if near is None else self._levels[near].best
            self._levels[key] = _Level(best, best)
        return self._levels[key]


class Settling:
    """One stream's way into the mode of all."""

    def __init__(self) -> None:
        self._mode: Mode | None = None
        self._rounds = 0

    def enter(self, mode: Mode) -> None:
        """A round of the stream begins in this mode."""
        self._rounds = self._rounds + 1 if mode is self._mode else 1
        self._mode = mode

    @property
    def settled(self) -> Mode | None:
        """The mode that the stream's rounds stand for; None while it is new in it."""
        return self._mode if self._rounds > _SETTLING_ROUNDS else None
