"""How much speculation pays, here and now? Found out by doing more and less of it, not by a model.

What a model of costs cannot know, a trial shows: draft and target that share a processor, groups of streams
that take turns, a slow network. A trial sets the *cap*, the most draft tokens that any stream may choose, for
all streams of the coordinator together, since what one does slows the others. The cap that brings a stream
the most tokens a second is kept; the next smaller and larger ones, and 0, are tried again so rarely that
trials cost one per cent, and less the longer they change nothing. Pure: no clock, no network.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CAPS = (0, 2, 4, 8, 16)
_FIRST_CAP = 4

_SETTLING_ROUNDS = 2
"""Rounds of a stream after a switch that are not counted: others may still be under the old cap."""
_TRIAL_ROUNDS = 4
"""Rounds of each stream that a trial counts, at least."""
_MIN_TRIAL_ROUNDS = 24
_MIN_TRIAL_NS = 250_000_000
"""Time that a trial counts of each stream, at least: a shorter one shows how quiet the machine just was."""
_OUTLIER = 4.0
"""No round counts for longer than so many usual ones: a prompt of any length may be in it."""
_MEMORY_ROUNDS = 64
"""Rounds of each stream after which a measurement has faded to a third."""
_TRIAL_COST = 0.01
_MAX_DOUBLINGS = 3
"""Every trial that changes nothing doubles the pause before the next one of that cap, so many times."""
_MIN_PAUSE_TRIALS = 8
"""Between two trials of a cap at least so many times what a trial takes."""
_TRUST_ROUNDS = 50
_CHECK_ROUNDS = 10
"""Rounds of each stream before plain decoding is tried with a number of streams that is new."""
_ADVANTAGE = 1.03
"""More speculation must bring so many times the tokens of less."""


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
        if self.rounds >= 1:
            time_ns = min(time_ns, int(_OUTLIER * self.round_ns))
        kept = 1 - 1 / memory_rounds
        self.tokens = self.tokens * kept + num_tokens
        self.time_ns = self.time_ns * kept + time_ns
        self.rounds = self.rounds * kept + 1


@dataclass
class _Arm:
    """One cap: what it brought, and when to try it again (`due`, in rounds), after so many vain trials."""

    rate: Rate = field(default_factory=Rate)
    due: int = 0
    confirmed: int = 0


@dataclass
class _Level:
    """What was measured with about so many streams.

    Attributes:
        best: the cap that is kept.
        cap: the one that holds now; another one during a trial.
        clock: rounds counted under any cap.
        counted, counted_ns: rounds counted under this one, since it holds, and their time.
    """

    best: int
    cap: int
    arms: dict[int, _Arm] = field(default_factory=lambda: {cap: _Arm() for cap in CAPS})
    clock: int = 0
    counted: int = 0
    counted_ns: int = 0

    def switch(self, cap: int) -> None:
        self.cap, self.counted, self.counted_ns = cap, 0, 0

    def candidates(self) -> list[int]:
        """What may be tried: nothing at all first, then a little less or more."""
        place = CAPS.index(self.best)
        near = CAPS[max(0, place - 1) : place + 2]
        return [cap for cap in dict.fromkeys((0, *reversed(near))) if cap != self.best]


class Trials:
    """Sets the cap, and when to try another one; for each number of streams, to a power of two."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}

    def cap(self, num_streams: int) -> int:
        """Most draft tokens in the rounds that begin now."""
        return self._level(num_streams).cap

    def on_trial(self, num_streams: int) -> bool:
        """True while that is not the cap that is thought to be best."""
        level = self._level(num_streams)
        return level.cap != level.best

    def rate(self, cap: int, num_streams: int) -> Rate:
        """What was measured under a cap with about so many streams."""
        return self._level(num_streams).arms[cap].rate

    def add(self, cap: int, num_streams: int, num_tokens: int, time_ns: int) -> None:
        """A round of a stream that has settled under `cap`, and how long it took."""
        level = self._level(num_streams)
        if cap != level.cap:
            return  # begun before the switch
        level.arms[cap].rate.add(num_tokens, time_ns, _MEMORY_ROUNDS * num_streams)
        level.clock += 1
        level.counted += 1
        level.counted_ns += time_ns
        enough_rounds = level.counted >= max(_MIN_TRIAL_ROUNDS, _TRIAL_ROUNDS * num_streams)
        if not enough_rounds or level.counted_ns < _MIN_TRIAL_NS * num_streams:
            return
        if level.cap != level.best:
            _decide(level, num_streams)
        else:
            due = [cap for cap in level.candidates() if level.arms[cap].due <= level.clock]
            if due:
                level.switch(due[0])

    def _level(self, num_streams: int) -> _Level:
        """A number that is new begins as the nearest one that is known, and trusts it for a while."""
        key = max(1, num_streams).bit_length()
        if key not in self._levels:
            near = min(self._levels, key=lambda known: abs(known - key), default=None)
            best = _FIRST_CAP if near is None else self._levels[near].best
            self._levels[key] = level = _Level(best, best)
            if near is not None:
                for i, arm in enumerate(level.arms.values()):
                    arm.due = (_CHECK_ROUNDS + i * _TRUST_ROUNDS) * num_streams
        return self._levels[key]


def _decide(level: _Level, num_streams: int) -> None:
    """A trial is over: keep the better cap, until trying again costs one per cent of the time's worth."""
    tried, kept = level.cap, level.best
    ours, theirs = level.arms[tried].rate, level.arms[kept].rate
    less, more = sorted((tried, kept))
    pays = level.arms[more].rate.per_ns >= _ADVANTAGE * level.arms[less].rate.per_ns
    level.best = more if pays else less
    other = kept if level.best == tried else tried
    arm = level.arms[other]
    arm.confirmed = arm.confirmed + 1 if other == tried else 0
    better, worse = (ours, theirs) if level.best == tried else (theirs, ours)
    loss = max(0.0, 1 - worse.per_ns / better.per_ns)
    trial = level.counted + _SETTLING_ROUNDS * num_streams
    pause = trial * worse.round_ns / better.round_ns * loss / _TRIAL_COST
    pause = max(pause, _MIN_PAUSE_TRIALS * level.counted) * 2 ** min(arm.confirmed, _MAX_DOUBLINGS)
    arm.due = level.clock + int(pause)
    level.switch(level.best)


class Settling:
    """One stream's way under the cap of all. Its first rounds count: to open a draft is part of the price."""

    def __init__(self) -> None:
        self._cap: int | None = None
        self._rounds_left = 0

    def enter(self, cap: int) -> None:
        """A round of the stream begins under this cap."""
        if self._cap is not None and cap != self._cap:
            self._rounds_left = _SETTLING_ROUNDS
        else:
            self._rounds_left = max(0, self._rounds_left - 1)
        self._cap = cap

    @property
    def settled(self) -> int | None:
        """The cap that the stream's rounds stand for; None while it is new under it."""
        return None if self._rounds_left else self._cap
