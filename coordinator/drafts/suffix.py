"""Guesses what followed the last tokens most often, in prompt, output and earlier outputs.

Source: Oliaro et al. 2024, SuffixDecoding (arXiv 2411.04975). Their suffix tree gives, for the longest match,
how often each continuation occurred; here the occurrences are found by comparing all tokens at once, and are
counted as the path goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from coordinator.drafts.history import History, TokenArray
from coordinator.drafts.text import Guess
from specwire.config.speculative import SpeculativeConfig

_MAX_CONTINUATIONS = 32
"""Latest occurrences of the longest match that are counted."""


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
        rows = self._history.continuations(found.ends[-_MAX_CONTINUATIONS:], num_tokens)
        token_ids, shares = likeliest_path(rows)
        match_len = found.match_len
        return Guess(token_ids, shares, match_len.bit_length(), match_len / (match_len + 1))


def likeliest_path(rows: TokenArray) -> tuple[list[int], list[float]]:
    """The token that most continuations have, among these the token that most of them have next, and so on.

    Args:
        rows: [num_continuations, num_tokens] in order of occurrence; of equally frequent tokens the latest
            wins.

    Returns:
        [num_tokens] tokens, and what share of the continuations up to there each has.
    """
    shares: list[float] = []
    while not (rows == rows[-1]).all():
        column = rows[:, len(shares)]
        [(token_id, count)] = Counter(column[::-1].tolist()).most_common(1)
        shares.append(count / len(rows))
        rows = rows[column == token_id]
    return rows[-1].tolist(), shares + [1.0] * (rows.shape[1] - len(shares))
