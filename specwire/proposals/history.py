"""Earlier occurrences of a sequence's last tokens, and what followed them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specwire.support import IntArray

_MAX_MATCH_LEN = 32
"""Longest match that is told from longer ones, in tokens."""
_MAX_CANDIDATES = 128
"""Latest occurrences of the last token that are looked at: bounds the search in a text of few tokens."""
MAX_CONTINUATIONS = 32
"""Latest occurrences of the longest match that are counted, where they are."""
_MIN_CAPACITY = 256
TokenArray = npt.NDArray[np.int32]
NO_TOKENS: TokenArray = np.empty(0, dtype=np.int32)


class Guess(NamedTuple):
    """What may follow.

    Attributes:
        token_ids: [num_tokens] at most as many as asked for; none where they are not known yet.
        shares: [num_tokens] how often each followed those before it, where they occurred.
        kind: acceptance is measured for guesses of a kind together.
        prior: acceptance of the kind before it is measured, as a share of `shares`.
    """

    token_ids: list[int]
    shares: list[float]
    kind: int
    prior: float


class History:
    """The tokens of a sequence after some earlier text; 4 bytes a token, no index.

    All tokens are compared with the last one at once: some 20 µs for a look-up in 32,768 of them, with no
    index to build when a long prompt arrives.
    """

    def __init__(self, min_len: int, max_len: int, earlier: TokenArray = NO_TOKENS) -> None:
        """Args:
        min_len, max_len: of the n-grams that are looked for, in tokens.
        earlier: [num_earlier] text that precedes the sequence.
        """
        self._min_len, self._max_len = min_len, max_len
        # In front are tokens that equal no other, so that a comparison stops there by itself.
        self._pad = max(_MAX_MATCH_LEN, max_len)
        self._base = self._end = self._pad + len(earlier)
        self._tokens = np.full(self._base + _MIN_CAPACITY, -1, dtype=np.int32)
        self._tokens[self._pad : self._base] = earlier

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self._end - self._base

    def truncate(self, length: int) -> None:
        """Forget the tokens from there on."""
        self._end = min(self._end, self._base + length)

    def update(self, committed: Sequence[int]) -> None:
        """Add the tokens that are new; those before them never change."""
        self.extend(committed[self.length :])

    def extend(self, new: Sequence[int]) -> None:
        """Add tokens at the end."""
        end = self._end + len(new)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[: self._end], np.empty(end, dtype=np.int32)])
        self._tokens[self._end : end] = new
        self._end = end

    def find(self) -> tuple[IntArray, int] | None:
        """The occurrences of the longest n-gram that ends the sequence; None without one of the least length.

        Returns:
            [num_matches] index of the token that followed each, in order; and the tokens that the latest has
            in common with the end, at most _MAX_MATCH_LEN.
        """
        tokens, last = self._tokens[: self._end], self._end - 1
        ends = np.flatnonzero(tokens[self._pad : last] == tokens[last])[-_MAX_CANDIDATES:] + self._pad
        found = ends if self._min_len == 1 else ends[:0]
        for before in range(1, self._max_len):
            ends = ends[tokens[ends - before] == tokens[last - before]]
            if not len(ends):
                break
            found = ends if before + 1 >= self._min_len else found
            if len(found) == 1:
                break
        return (found + 1 - self._pad, self._match_len(int(found[-1]))) if len(found) else None

    def guess(self, num_tokens: int, num_counted: int) -> Guess | None:
        """What followed the longest match: the longer that is, the likelier that the text goes on as it did.

        Args:
            num_counted: of its occurrences, how many of the latest are counted.
        """
        found = self.find()
        if found is None:
            return None
        ends, length = found
        rows = self.continuations(ends[-num_counted:], num_tokens)
        return Guess(*likeliest_path(rows), length.bit_length(), length / (length + 1))

    def _match_len(self, end: int) -> int:
        """Of the occurrence whose last token has this index."""
        tokens, last = self._tokens, self._end - 1
        earlier, latest = (tokens[i - _MAX_MATCH_LEN + 1 : i + 1][::-1] for i in (end, last))
        differs = earlier != latest
        return int(differs.argmax()) if differs.any() else _MAX_MATCH_LEN

    def continuations(self, ends: IntArray, num_tokens: int) -> TokenArray:
        """[num_matches, num_tokens] what followed each; at the end of the text the repetition goes on."""
        starts = self._pad + ends[:, None]
        return self._tokens[starts + np.arange(num_tokens) % (self._end - starts)]


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
