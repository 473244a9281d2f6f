"""Guesses what followed the last tokens when they occurred before in prompt or output ("prompt lookup").

Source: Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding); n-gram drafts
are in Leviathan et al. 2023 (arXiv 2211.17192), section 4.1, already.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.drafts.text import Guess
from specwire.config.speculative import SpeculativeConfig
from specwire.proposals.history import History


class Ngram:
    """Of the occurrences of the longest match, what followed the latest."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._history = History(config.prompt_lookup_min, config.prompt_lookup_max)

    def guess(self, committed: Sequence[int], num_tokens: int) -> Guess | None:
        """See `text.Method`. The longer the match, the likelier that the text goes on as it did."""
        self._history.update(committed)
        found = self._history.find()
        if found is None:
            return None
        [token_ids] = self._history.continuations(found.ends[-1:], num_tokens).tolist()
        match_len = found.match_len
        return Guess(token_ids, [1.0] * num_tokens, match_len.bit_length(), match_len / (match_len + 1))
