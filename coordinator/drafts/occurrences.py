"""Guesses by earlier occurrences of the last tokens: what followed the latest one, or most of them.

Sources: Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding); n-gram drafts
are in Leviathan et al. 2023 (arXiv 2211.17192), section 4.1, already. Oliaro et al. 2024, SuffixDecoding
(arXiv 2411.04975), whose suffix tree gives, for the longest match, how often each continuation occurred; here
the occurrences are found by comparing all tokens at once, and are counted as the path goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from specwire.config.speculative import NGRAM, SpeculativeConfig
from specwire.proposals.history import MAX_CONTINUATIONS, NO_TOKENS, Guess, History, TokenArray


class Occurrences:
    """A `text.Method`. Of the longest match `ngram` takes what followed last, `suffix` what most share."""

    def __init__(self, config: SpeculativeConfig, earlier: TokenArray = NO_TOKENS) -> None:
        """Args:
        earlier: [num_tokens] outputs of earlier generations.
        """
        self._history = History(config.prompt_lookup_min, config.prompt_lookup_max, earlier)
        self._num_counted = 1 if config.method == NGRAM else MAX_CONTINUATIONS

    def guess(self, committed: Sequence[int], num_tokens: int) -> Guess | None:
        self._history.update(committed)
        return self._history.guess(num_tokens, self._num_counted)
