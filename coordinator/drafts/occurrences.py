"""Guesses by earlier occurrences of the last tokens: what followed the latest one, or most of them.

Sources: Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding); n-gram drafts
are in Leviathan et al. 2023 (arXiv 2211.17192), section 4.1, already. Oliaro et al. 2024, SuffixDecoding
(arXiv 2411.04975), whose suffix tree gives, for the longest match, how often each continuation occurred; here
the occurrences are found by comparing all tokens at once, and are counted as the path goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.drafts.text import Guess
from specwire.config.speculative import SpeculativeConfig
from specwire.proposals.history import MAX_CONTINUATIONS, History, TokenArray, likeliest_path


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
