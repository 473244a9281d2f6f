"""Guesses the draft's tokens from the stream's own text, as `ngram` and `suffix` guess the target's."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.inner.jobs import InnerJob
from draft_service.inner.pace import MOST_GUESSES, Look
from specwire.config.speculative import NGRAM, SpeculativeConfig
from specwire.proposals.history import MAX_CONTINUATIONS, History, likeliest_path


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

    def open(self) -> TextMemory:
        return TextMemory(self._config.prompt_lookup_min, self._config.prompt_lookup_max)

    def look(self, job: InnerJob) -> Look | None:
        """The longer the match, the likelier that the text goes on as it did."""
        memory: TextMemory = job.inner.memory
        num_committed = memory.length
        memory.extend(job.sequence.tokens[num_committed:])
        found = memory.find()
        token_ids: Sequence[int] = ()
        if found is not None:
            most = min(job.room, MOST_GUESSES)
            if self._config.method == NGRAM:
                [token_ids] = memory.continuations(found.ends[-1:], most).tolist()
            else:
                rows = memory.continuations(found.ends[-MAX_CONTINUATIONS:], most)
                token_ids, _ = likeliest_path(rows)
        memory.truncate(num_committed)
        if found is None:
            return None
        match_len = found.match_len
        return Look(match_len.bit_length(), match_len / (match_len + 1), token_ids)

    def guess(
        self, jobs: Sequence[InnerJob], looks: Sequence[Look], nums: Sequence[int]
    ) -> list[Sequence[int]]:
        return [look.token_ids[:num] for look, num in zip(looks, nums, strict=True)]

    def close(self) -> None:
        """See `InnerDrafter`."""
