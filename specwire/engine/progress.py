"""Whether an engine gets on with its work: a pass far longer than passes cost is a device that hangs.

The engine's thread notes what it begins; the event loop looks at it now and then. Time counts only as far as
the loop itself was running: a process that was stopped as a whole has not seen its device hang.
"""

from __future__ import annotations

LOOK_EVERY_S = 0.25
LEAST_LIMIT_S = 2.0
_TIMES_USUAL = 20.0
"""What is taken for a hang is never shorter than so many times what the work costs."""


class Heartbeat:
    """Written by the engine's thread, and looked at from the event loop.

    Attributes:
        limit_s: longest time that what is under way may take.
        silent_s: how long there was work and nothing was begun or ended.
    """

    def __init__(self) -> None:
        self.limit_s = LEAST_LIMIT_S
        self.silent_s = 0.0
        self._num_beats = self._num_seen = 0

    def beat(self, usual_s: float = 0.0, least_s: float = LEAST_LIMIT_S) -> None:
        """Something begins that usually takes so long, or has ended.

        Args:
            usual_s: 0 for what takes no time to speak of.
            least_s: a hang takes longer than that in any case.
        """
        self.limit_s = max(least_s, _TIMES_USUAL * usual_s)
        self._num_beats += 1

    def look(self, has_work: bool, elapsed_s: float = LOOK_EVERY_S) -> None:
        """Called from the event loop every `LOOK_EVERY_S`; a late call counts for no longer than that."""
        if self._num_beats != self._num_seen:
            self._num_seen, self.silent_s = self._num_beats, 0.0
        elif has_work or self.hangs:  # what waited for a device that hangs has failed
            self.silent_s += min(elapsed_s, LOOK_EVERY_S)
        else:
            self.silent_s = 0.0

    @property
    def hangs(self) -> bool:
        """Whether it was silent for longer than what is under way may take."""
        return self.silent_s > self.limit_s
