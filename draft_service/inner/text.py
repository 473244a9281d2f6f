"""Guesses the draft's tokens from the stream's own text, as `ngram` and `suffix` guess the target's."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.inner.jobs import InnerJob
from draft_service.inner.pace import MOST_GUESSES
from specwire.config.speculative import NGRAM, SpeculativeConfig
from specwire.proposals.history import MAX_CONTINUATIONS, Guess, History


class TextMemory(History):
    """The committed tokens, and for the time of a look the drafted ones."""

    def release(self) -> None:
        """See `InnerDrafter.open`; it ends with the stream."""


class TextGuesser:
    """See `InnerDrafter`.

    Args:
        method: `ngram` or `suffix`. Earlier outputs are not read.
    """

    guess_ns = 0.0

    def __init__(self, method: str) -> None:
        self._config = SpeculativeConfig(method=method)
        self._num_counted = 1 if method == NGRAM else MAX_CONTINUATIONS

    def open(self) -> TextMemory:
        return TextMemory(self._config.prompt_lookup_min, self._config.prompt_lookup_max)

    def look(self, job: InnerJob) -> Guess | None:
        memory: TextMemory = job.inner.memory
        num_committed = memory.length
        memory.extend(job.sequence.tokens[num_committed:])
        found = memory.guess(min(job.room, MOST_GUESSES), self._num_counted)
        memory.truncate(num_committed)
        return found

    def guess(
        self, jobs: Sequence[InnerJob], looks: Sequence[Guess], nums: Sequence[int]
    ) -> list[Sequence[int]]:
        return [look.token_ids[:num] for look, num in zip(looks, nums, strict=True)]

    def close(self) -> None:
        """See `InnerDrafter`."""
