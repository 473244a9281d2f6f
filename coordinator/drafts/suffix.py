"""Guesses what followed the last tokens most often, in prompt, output and earlier outputs.

Source: Oliaro et al. 2024, SuffixDecoding (arXiv 2411.04975). Their suffix tree gives, for the longest match,
how often each continuation occurred; here the occurrences are found by comparing all tokens at once, and are
counted as the path goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.drafts.text import Guess
from specwire.config.speculative import SpeculativeConfig
from specwire.proposals.history import MAX_CONTINUATIONS, History, TokenArray, likeliest_path


class Suffix:
    """Of all occurrences of the longest match, the continuation that most of them share."""

    def __init__(self, config: SpeculativeConfig, earlier: TokenArray) -> None:
        """Args:
        earlier: [num_tokens] outputs of earlier generations.
        """
        self._history = History(config.prompt_lookup_min, config.prompt_lookup_max, earlier)

    def guess(self, committed: Sequence[int], num_tokens: int) -> Guess | None:
        """See `text.Method`."""
        self._history.update(committed)
        found = self._history.find()
        if found is None:
            return None
        rows = self._history.continuations(found.ends[-MAX_CONTINUATIONS:], num_tokens)
        token_ids, shares = likeliest_path(rows)
        match_len = found.match_len
        return Guess(token_ids, shares, match_len.bit_length(), match_len / (match_len + 1))
