"""How much speculation pays, here and now? Found out by doing more and less of it, not by a model.

What a model of costs cannot know, a trial shows: draft and target that share a processor, groups of streams
that take turns, a slow network. A trial sets an option for all streams of the coordinator together, since
what one does slows the others: the *cap*, which is the most draft tokens that any stream may choose, or how
many outcomes are prepared for. The option that brings a stream the most tokens a second is kept; the next
smaller and larger ones, and 0, are tried again so rarely that trials cost one per cent, and less the longer
they change nothing.

What counts are the tokens that rounds were good for, by what is known of acceptance when options are
compared: luck would need trials of hundreds of rounds to cancel out, and what was expected long ago was
expected by a beginner. Pure: no clock, no network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

CAPS = (0, 2, 4, 8, 16)
FIRST_CAP = 4

_SETTLING_ROUNDS = 3
"""Rounds of a stream after a switch that are not counted: others may still be under the old cap."""
_TRIAL_ROUNDS = 4
"""Rounds of each stream that a trial counts, at least."""
_MIN_TRIAL_ROUNDS = 12
_MIN_TRIAL_NS = 250_000_000
"""Time that a trial counts of each stream, at least: a shorter one shows how quiet the machine just was."""
_CLEAR = 0.2
_UNCLEAR_ROUNDS = 48
"""A trial counts so many rounds while the difference is smaller than that: it costs little then."""
_OUTLIER = 4.0
"""No round counts for longer than so many usual ones: a prompt of any length may be in it."""
_MEMORY_ROUNDS = 64
"""Rounds of each stream after which a measurement has faded to a third."""
_FADED = 0.25
_TRIAL_COST = 0.01
_MAX_DOUBLINGS = 3
"""Every trial that changes nothing doubles the pause before the next one of that cap, so many times."""
_MIN_PAUSE_TRIALS = 8
"""Between two trials of a cap at least so many times what a trial takes."""
_TRUST_ROUNDS = 50
_SOON_ROUNDS = 100
"""When an option is deposed, those that brought more than the new one are tried again within so many rounds
of each stream."""
_DOUBTFUL, _DOUBT_ROUNDS = 0.5, 100
"""What is modelled may be wrong by so much, where devices are shared: so it is tried after so many rounds."""
_CHECK_ROUNDS = 10
"""Rounds of each stream before plain decoding is tried with a number of streams that is new."""
_ADVANTAGE = 1.03
STAYS = 0.99
"""What is kept stays for so many times the tokens of a smaller option: hard text makes them all alike."""
_ENTRY = 3
"""Of so many smallest options one may be the next after 0: a token alone may not be worth the wait."""


@dataclass
class Rate:
    """Rounds of a stream by number of draft tokens, and their time, old ones faded.

    Attributes:
        drafted: how many rounds had so many draft tokens.
    """

    drafted: dict[int, float] = field(default_factory=dict)
    time_ns: float = 0.0
    rounds: float = 0.0

    def per_ns(self, tokens: Sequence[float]) -> float:
        """Tokens a nanosecond where n draft tokens bring a round tokens[n]; 0 before the first round."""
        brought = sum(rounds * tokens[n] for n, rounds in self.drafted.items())
        return brought / self.time_ns if self.time_ns else 0.0

    @property
    def round_ns(self) -> float:
        """Mean time of a round; 0 before the first one."""
        return self.time_ns / self.rounds if self.rounds else 0.0

    def speculative_ns(self, plain_ns: float) -> float:
        """Mean time of a round with draft tokens, where one without takes so long; 0 before the first one."""
        num_plain = self.drafted.get(0, 0.0)
        num_speculative = self.rounds - num_plain
        return max(0.0, self.time_ns - num_plain * plain_ns) / num_speculative if num_speculative else 0.0

    def fade(self) -> None:
        """Count all that was measured for little."""
        self._keep(_FADED)

    def add(self, num_drafted: int, time_ns: int, memory_rounds: int) -> None:
        """One round of a stream."""
        if self.rounds >= 1:
            time_ns = min(time_ns, int(_OUTLIER * self.round_ns))
        self._keep(1 - 1 / memory_rounds)
        self.drafted[num_drafted] = self.drafted.get(num_drafted, 0.0) + 1
        self.time_ns += time_ns
        self.rounds += 1

    def _keep(self, part: float) -> None:
        for num_drafted in self.drafted:
            self.drafted[num_drafted] *= part
        self.time_ns *= part
        self.rounds *= part


@dataclass
class _Arm:
    """One option: what it brought, and when to try it again (`due`, in rounds), after so many vain trials."""

    rate: Rate = field(default_factory=Rate)
    due: int = 0
    confirmed: int = 0


@dataclass
class _Level:
    """What was measured with about so many streams.

    Attributes:
        best: the option that is kept.
        option: the one that holds now; another one during a trial.
        clock: rounds counted under any option.
        counted, counted_ns: rounds counted under this one, since it holds, and their time.
    """

    arms: dict[int, _Arm]
    best: int
    option: int
    clock: int = 0
    counted: int = 0
    counted_ns: int = 0

    def switch(self, option: int) -> None:
        if option != self.best:
            self.arms[option].rate.fade()  # what it was worth long ago counts little
        self.option, self.counted, self.counted_ns = option, 0, 0

    def reconsider(self, tokens: Sequence[float], num_streams: int) -> None:
        """There is a new best one, and the pauses of the others were meant for trials against the last."""
        soon = self.clock + _SOON_ROUNDS * num_streams
        kept = self.arms[self.best].rate.per_ns(tokens)
        for arm in self.arms.values():
            if arm.rate.per_ns(tokens) > kept:
                arm.due, arm.confirmed = min(arm.due, soon), 0

    def is_clear(self, tokens: Sequence[float]) -> bool:
        """Whether the trial has shown a difference that is no accident."""
        tried, kept = (self.arms[option].rate.per_ns(tokens) for option in (self.option, self.best))
        return abs(tried - kept) > _CLEAR * max(tried, kept)

    def candidates(self) -> list[int]:
        """What may be tried: nothing at all first, then a little less or more."""
        options = list(self.arms)
        place = options.index(self.best)
        near = options[max(0, place - 1) : max(place + 2, _ENTRY)]
        return [option for option in dict.fromkeys((0, *reversed(near))) if option != self.best]


class Trials:
    """Sets an option, and when to try another one; for each number of streams, to a power of two.

    Args:
        options: ascending; the first one is 0, for nothing at all.
        first: the one to begin with, asked when the first rounds are counted.
        tokens: what a round brings, by number of draft tokens, as far as is known now.
        expected: what an option may bring, in any unit, before it was tried; None knows nothing.
        advantage: so many times the tokens of a smaller option must a larger one bring.
        stays: likewise, once it is kept; asked at each decision.

    Attributes:
        num_trials: begun so far.
    """

    def __init__(
        self,
        options: Sequence[int],
        first: Callable[[], int],
        tokens: Callable[[], Sequence[float]],
        *,
        expected: Callable[[int], float] | None = None,
        advantage: float = _ADVANTAGE,
        stays: Callable[[], float] = lambda: STAYS,
    ) -> None:
        self._options = options
        self._expected = expected
        self._advantage = advantage
        self._stays = stays
        self._tokens = tokens
        self._first = first
        self._levels: dict[int, _Level] = {}
        self.num_trials = 0

    def option(self, num_streams: int) -> int:
        """What holds for the rounds that begin now."""
        return self._level(num_streams).option

    def seen(self, num_streams: int) -> int:
        """As `option`, for whoever only looks: a number of streams that is new stays new."""
        key = max(1, num_streams).bit_length()
        near = min(self._levels, key=lambda known: abs(known - key), default=None)
        return self._first() if near is None else self._levels[near].option

    def best(self, num_streams: int) -> int:
        """What is thought to be best."""
        return self._level(num_streams).best

    def on_trial(self, num_streams: int) -> bool:
        """True while that is not the option that is thought to be best."""
        level = self._level(num_streams)
        return level.option != level.best

    def rate(self, option: int, num_streams: int) -> Rate:
        """What was measured under an option with about so many streams."""
        return self._level(num_streams).arms[option].rate

    def forget(self, num_streams: int) -> None:
        """All measurements with about so many streams: something else has changed what options are worth."""
        level = self._level(num_streams)
        level.arms = {option: _Arm() for option in self._options}
        level.clock = 0
        level.switch(level.best)

    def add(self, option: int, num_streams: int, num_drafted: int, time_ns: int) -> None:
        """A round of a stream that has settled under `option`, and its time."""
        level = self._level(num_streams)
        if option != level.option:
            return  # begun before the switch
        level.arms[option].rate.add(num_drafted, time_ns, _MEMORY_ROUNDS * num_streams)
        level.clock += 1
        level.counted += 1
        level.counted_ns += time_ns
        num_enough = max(_MIN_TRIAL_ROUNDS, _TRIAL_ROUNDS * num_streams)
        if level.counted < num_enough or level.counted_ns < _MIN_TRIAL_NS * num_streams:
            return
        if level.option != level.best:
            tokens = self._tokens()
            if level.is_clear(tokens) or level.counted >= _UNCLEAR_ROUNDS:
                wanted = self._advantage if level.option > level.best else self._stays()
                _decide(level, num_streams, tokens, wanted)
        else:
            due = [option for option in level.candidates() if self._is_due(level, option, num_streams)]
            if due:
                self.num_trials += 1
                level.switch(due[0])

    def _level(self, num_streams: int) -> _Level:
        """A number that is new begins as the nearest one that is known, and trusts it for a while."""
        key = max(1, num_streams).bit_length()
        if key not in self._levels:
            near = min(self._levels, key=lambda known: abs(known - key), default=None)
            best = self._first() if near is None else self._levels[near].best
            arms = {option: _Arm() for option in self._options}
            self._levels[key] = level = _Level(arms, best, best)
            if near is not None:
                for i, arm in enumerate(level.arms.values()):
                    arm.due = (_CHECK_ROUNDS + i * _TRUST_ROUNDS) * num_streams
        return self._levels[key]

    def _is_due(self, level: _Level, option: int, num_streams: int) -> bool:
        """What promises little is tried late, as if it had been tried before; but a promise may be wrong."""
        arm = level.arms[option]
        if arm.rate.rounds or self._expected is None:
            return arm.due <= level.clock
        part = min(1.0, self._expected(option) / self._expected(level.best))
        put_off = _MIN_TRIAL_ROUNDS * (1 - part) / _TRIAL_COST
        if part > _DOUBTFUL:
            put_off = min(put_off, _DOUBT_ROUNDS)
        return max(arm.due, put_off * num_streams) <= level.clock


def _decide(level: _Level, num_streams: int, tokens: Sequence[float], wanted: float) -> None:
    """A trial is over: keep the better option, until to try the others again costs one per cent of it all.

    `wanted` is how many times the tokens of the smaller one the larger one has to bring.
    """
    tried, kept = level.option, level.best
    ours, theirs = level.arms[tried].rate, level.arms[kept].rate
    less, more = sorted((tried, kept))
    pays = level.arms[more].rate.per_ns(tokens) >= wanted * level.arms[less].rate.per_ns(tokens)
    level.best = more if pays else less
    other = kept if level.best == tried else tried
    arm = level.arms[other]
    arm.confirmed = arm.confirmed + 1 if other == tried else 0
    better, worse = (ours, theirs) if level.best == tried else (theirs, ours)
    loss = max(0.0, 1 - worse.per_ns(tokens) / better.per_ns(tokens))
    trial = level.counted + _SETTLING_ROUNDS * num_streams
    cost = _TRIAL_COST / len(level.candidates())
    pause = trial * worse.round_ns / better.round_ns * loss / cost
    pause = max(pause, _MIN_PAUSE_TRIALS * level.counted) * 2 ** min(arm.confirmed, _MAX_DOUBLINGS)
    arm.due = level.clock + int(pause)
    if level.best == tried:
        level.reconsider(tokens, num_streams)
    level.switch(level.best)


class Settling:
    """One stream's way under what holds for all. Its first rounds count: to open a draft has its price."""

    def __init__(self) -> None:
        self._holds: tuple[int | None, int] | None = None
        self._rounds_left = 0

    def enter(self, cap: int | None, num_outcomes: int) -> None:
        """A round of the stream begins under this; no cap where the stream keeps to a number of its own."""
        holds = cap, num_outcomes
        if self._holds is not None and holds != self._holds:
            self._rounds_left = _SETTLING_ROUNDS
        else:
            self._rounds_left = max(0, self._rounds_left - 1)
        self._holds = holds

    @property
    def settled(self) -> tuple[int | None, int] | None:
        """What the stream's rounds stand for; None while it is new under it."""
        return None if self._rounds_left else self._holds
