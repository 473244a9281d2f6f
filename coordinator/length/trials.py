"""How much speculation pays, found by trials of more and of less of it instead of by a model.

A trial sees what a model of costs cannot: draft and target that share a processor, groups of streams that
take turns, a slow network. An option holds for all streams of the coordinator, since what one stream does
slows the others: the *cap* on draft tokens a round, or the number of outcomes to prepare for. The option with
the most tokens per stream and second is kept; the next smaller and larger ones, and 0, are tried again so
rarely that trials cost one per cent, and less the longer they change nothing.

Rounds are credited with the tokens that are expected by the acceptance known when options are compared: what
they happened to commit would take hundreds of rounds to average out. Pure: no clock, no network.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# How long a trial lasts. Rounds and times are those of each stream, if not said otherwise.
_SETTLING_ROUNDS = 3
"""Rounds of a stream after a switch that are not counted: others may still be under the old option."""
_TRIAL_ROUNDS, _MIN_TRIAL_ROUNDS = 4, 12
"""Least number of rounds that are counted: of each stream, and of all streams together."""
_MIN_TRIAL_NS = 250_000_000
"""Least time that is counted: a shorter trial shows how quiet the machine just was."""
_CLEAR_DIFFERENCE, _MAX_TRIAL_ROUNDS = 0.2, 48
"""While the difference is smaller than this share, up to so many rounds of all streams are counted: a trial
costs little then."""

# How rounds are averaged.
_OUTLIER_RATIO = 4.0
"""No round counts for more than so many mean ones: a prompt of any length may be in it."""
_MEMORY_ROUNDS = 64
"""Rounds after which a measurement has faded to a third."""
_STALE_WEIGHT = 0.25
"""Weight of an option's earlier measurements when it is tried again."""

# When an option is tried again.
_TRIAL_COST = 0.01
"""Share of all tokens that trials may cost."""
_MIN_PAUSE_TRIALS = 8
"""Between two trials of an option pass at least so many times the rounds of a trial."""
_MAX_DOUBLINGS = 3
"""Every trial that changes nothing doubles the pause before the next one of that option, so many times."""
_SOON_ROUNDS = 100
"""When an option is replaced, those that brought more than the new one are tried again within so many."""
_LIKELY_SHARE, _DOUBT_ROUNDS = 0.5, 100
"""Where devices are shared, models are wrong by as much as this share: what promises more of the best
option's rate is tried within so many rounds."""
_CHECK_ROUNDS, _TRUST_ROUNDS = 10, 50
"""With a new number of streams: rounds before the first option is tried, and more before each further one."""
_NEVER = 1 << 62
_NUM_ENTRY_OPTIONS = 3
"""From 0, so many of the smallest options are candidates: one draft token may not be worth the wait."""


Tokens = Sequence[float] | Mapping[int, float]
"""That a round commits, by number of draft tokens, or by another number that tells kinds of rounds apart."""


@dataclass
class Rate:
    """Rounds by number of draft tokens, and the time of all of them; recent rounds count more."""

    drafted: dict[int, float] = field(default_factory=dict)
    time_ns: float = 0.0
    rounds: float = 0.0

    def tokens_per_ns(self, tokens: Tokens) -> float:
        """Rate where n draft tokens bring a round tokens[n]; 0 before the first round."""
        total = sum(rounds * tokens[n] for n, rounds in self.drafted.items())
        return total / self.time_ns if self.time_ns else 0.0

    @property
    def round_ns(self) -> float:
        """Mean time of a round; 0 before the first one."""
        return self.time_ns / self.rounds if self.rounds else 0.0

    def speculative_ns(self, plain_ns: float) -> float:
        """Mean time of a round with draft tokens, where one without takes `plain_ns`; 0 before the first."""
        num_plain = self.drafted.get(0, 0.0)
        num_speculative = self.rounds - num_plain
        return max(0.0, self.time_ns - num_plain * plain_ns) / num_speculative if num_speculative else 0.0

    def add(self, num_drafted: int, time_ns: int, memory_rounds: int) -> None:
        """One round of a stream."""
        if self.rounds >= 1:
            time_ns = min(time_ns, int(_OUTLIER_RATIO * self.round_ns))
        self.fade(1 - 1 / memory_rounds)
        self.drafted[num_drafted] = self.drafted.get(num_drafted, 0.0) + 1
        self.time_ns += time_ns
        self.rounds += 1

    def fade(self, weight: float) -> None:
        """Reduce the weight of all rounds so far to this share."""
        for num_drafted in self.drafted:
            self.drafted[num_drafted] *= weight
        self.time_ns *= weight
        self.rounds *= weight


@dataclass
class Arm:
    """An option as measured."""

    rate: Rate = field(default_factory=Rate)
    due: int = 0  # when to try it again, on the level's clock
    num_confirmed: int = 0  # latest trials in a row that showed it to be worse


@dataclass
class Level:
    """Options and trials with about so many streams.

    Attributes:
        arms: by option, ascending.
        best: the option that is kept.
        option: the one that holds now; another one during a trial.
        clock: rounds counted under any option.
        num_counted, counted_ns: rounds counted since this option holds, and their time.
        num_trials: begun so far.
        none_due_before: no option is to be tried before the clock says so.
    """

    arms: dict[int, Arm]
    best: int
    option: int
    clock: int = 0
    num_counted: int = 0
    counted_ns: int = 0
    num_trials: int = 0
    none_due_before: int = 0

    @property
    def on_trial(self) -> bool:
        """Whether the option that holds is not the best one so far."""
        return self.option != self.best

    @property
    def has_untried(self) -> bool:
        """Whether a candidate for a trial was never measured: `begin_trial` needs its expected rate."""
        return any(not self.arms[option].rate.rounds for option in self._candidates())

    def add(self, option: int, num_streams: int, num_drafted: int, time_ns: int) -> bool:
        """Count a round of a stream that has settled under `option`.

        Returns:
            Whether enough rounds are counted to end the trial, or else to begin one.
        """
        if option != self.option:
            return False  # begun before the switch
        self.arms[option].rate.add(num_drafted, time_ns, _MEMORY_ROUNDS * num_streams)
        self.clock += 1
        self.num_counted += 1
        self.counted_ns += time_ns
        if self.clock < self.none_due_before:
            return False
        num_enough = max(_MIN_TRIAL_ROUNDS, _TRIAL_ROUNDS * num_streams)
        return self.num_counted >= num_enough and self.counted_ns >= _MIN_TRIAL_NS * num_streams

    def begin_trial(self, num_streams: int, expected: Mapping[int, float]) -> None:
        """Switch to the first candidate that is due, if any.

        Args:
            expected: modelled rate by option, in any unit; not read once all candidates were tried.
        """
        due = (option for option in self._candidates() if self._is_due(option, num_streams, expected))
        option = next(due, None)
        if option is not None:
            self.num_trials += 1
            self._switch(option)
        elif not self.has_untried:
            self.none_due_before = min((self.arms[each].due for each in self._candidates()), default=_NEVER)

    def end_trial(self, num_streams: int, tokens: Tokens, *, adopt: float, keep: float) -> None:
        """Keep the better option, once the trial is long enough for the difference that it shows.

        Args:
            tokens: that a round commits, by number of draft tokens.
            adopt, keep: ratio of the larger option's rate to the smaller one's from which the larger one is
                preferred: where it is on trial, and where it is the best one so far.
        """
        rates = {option: arm.rate.tokens_per_ns(tokens) for option, arm in self.arms.items()}
        tried, kept = self.option, self.best
        is_clear = abs(rates[tried] - rates[kept]) > _CLEAR_DIFFERENCE * max(rates[tried], rates[kept])
        if not is_clear and self.num_counted < _MAX_TRIAL_ROUNDS:
            return
        less, more = sorted((tried, kept))
        ratio = adopt if tried == more else keep
        self.best, worse = (more, less) if rates[more] >= ratio * rates[less] else (less, more)
        self._schedule(worse, rates, num_streams)
        if self.best == tried:
            self._reschedule_rivals(rates, num_streams)
        self._switch(self.best)

    def forget(self) -> None:
        """Drop all measurements: another decision has changed what the options are worth."""
        self.arms = {option: Arm() for option in self.arms}
        self.clock = 0
        self._switch(self.best)

    def _switch(self, option: int) -> None:
        if option != self.best:
            self.arms[option].rate.fade(_STALE_WEIGHT)
        self.option, self.num_counted, self.counted_ns = option, 0, 0
        self.none_due_before = 0

    def _candidates(self) -> tuple[int, ...]:
        return _neighbours(tuple(self.arms), self.best)

    def _is_due(self, option: int, num_streams: int, expected: Mapping[int, float]) -> bool:
        """An option that was never tried waits the longer, the less it promises; but a model may be wrong."""
        arm = self.arms[option]
        if arm.rate.rounds:
            return arm.due <= self.clock
        share = min(1.0, expected[option] / expected[self.best])
        delay = _MIN_TRIAL_ROUNDS * (1 - share) / _TRIAL_COST
        if share > _LIKELY_SHARE:
            delay = min(delay, _DOUBT_ROUNDS)
        return max(arm.due, delay * num_streams) <= self.clock

    def _schedule(self, worse: int, rates: Mapping[int, float], num_streams: int) -> None:
        """Set when the worse of the two is tried again: when that costs `_TRIAL_COST` of all tokens."""
        arm, best = self.arms[worse], self.arms[self.best]
        arm.num_confirmed = arm.num_confirmed + 1 if worse == self.option else 0
        loss = max(0.0, 1 - rates[worse] / rates[self.best])
        num_rounds = self.num_counted + _SETTLING_ROUNDS * num_streams
        budget = _TRIAL_COST / len(self._candidates())
        pause = num_rounds * arm.rate.round_ns / best.rate.round_ns * loss / budget
        pause = max(pause, _MIN_PAUSE_TRIALS * self.num_counted)
        arm.due = self.clock + int(pause * 2 ** min(arm.num_confirmed, _MAX_DOUBLINGS))

    def _reschedule_rivals(self, rates: Mapping[int, float], num_streams: int) -> None:
        """There is a new best option, and the pauses of others were meant for trials against the last one."""
        for option, arm in self.arms.items():
            if rates[option] > rates[self.best]:
                arm.due, arm.num_confirmed = min(arm.due, self.clock + _SOON_ROUNDS * num_streams), 0


@functools.cache
def _neighbours(options: tuple[int, ...], best: int) -> tuple[int, ...]:
    """Candidates for a trial, in that order: the first option, then the next larger and smaller ones."""
    place = options.index(best)
    near = options[max(0, place - 1) : max(place + 2, _NUM_ENTRY_OPTIONS)]
    return tuple(option for option in dict.fromkeys((options[0], *reversed(near))) if option != best)


class Trials:
    """A level for each number of streams, to a power of two; `first` is the option to begin with."""

    def __init__(self, options: Sequence[int], first: int) -> None:
        self.first = first
        self._options = options
        self._levels: dict[int, Level] = {}

    @property
    def num_trials(self) -> int:
        """Begun so far, with any number of streams."""
        return sum(level.num_trials for level in self._levels.values())

    def look(self, num_streams: int) -> Level:
        """The level for so many streams, or else for the nearest number."""
        key = _bucket(num_streams)
        near = key if key in self._levels else min(self._levels, key=lambda k: abs(k - key), default=None)
        return self._new_level(self.first) if near is None else self._levels[near]

    def enter(self, num_streams: int) -> Level:
        """The level to count rounds in; a new one trusts the best option of the nearest for some rounds."""
        key = _bucket(num_streams)
        if key not in self._levels:
            level = self._new_level(self.look(num_streams).best)
            for i, arm in enumerate(level.arms.values() if self._levels else ()):
                arm.due = (_CHECK_ROUNDS + i * _TRUST_ROUNDS) * num_streams
            self._levels[key] = level
        return self._levels[key]

    def _new_level(self, best: int) -> Level:
        return Level({option: Arm() for option in self._options}, best, best)


def _bucket(num_streams: int) -> int:
    return max(1, num_streams).bit_length()


class Settling:
    """Excludes a stream's rounds after a switch. Its first ones count: they pay for opening the draft."""

    def __init__(self) -> None:
        self._options: tuple[int | None, int] | None = None
        self._rounds_left = 0

    def enter(self, cap: int | None, num_outcomes: int) -> None:
        """A round of the stream begins under these; no cap where the stream's length is fixed."""
        options = cap, num_outcomes
        if self._options is not None and options != self._options:
            self._rounds_left = _SETTLING_ROUNDS
        else:
            self._rounds_left = max(0, self._rounds_left - 1)
        self._options = options

    @property
    def settled(self) -> tuple[int | None, int] | None:
        """Cap and number of outcomes that the stream's rounds count for; None while it settles."""
        return None if self._rounds_left else self._options
