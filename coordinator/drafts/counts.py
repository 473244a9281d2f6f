"""Guesses by counts of n-grams: the token that most often follows the last n - 1, again and again.

Source: Leviathan et al. 2023 (arXiv 2211.17192), section 4.1: a bigram model as the draft, "negligible cost".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specwire.proposals.history import Guess, TokenArray

_ID_BITS = 21
"""Of a token id in a key of three; larger ids make wrong guesses, which cost a draft token."""
_ID_MASK = (1 << _ID_BITS) - 1
_PRIOR = 0.8
_GROWTH, _LEAST_GROWTH, _EARLIER_GROWTH = 1.125, 16, 1 / 256
"""Output is counted anew when it is so many times as long, and longer by so many tokens and by this share of
the earlier ones: some 10 µs a token."""


class Table:
    """The most frequent continuation of each context in a text; 24 bytes for each different context."""

    def __init__(self, n: int, tokens: TokenArray) -> None:
        """Args:
        n: length of the n-grams, 1 to 3.
        tokens: [num_tokens] the text.
        """
        self._num_context = n - 1
        num_grams = max(0, len(tokens) - n + 1)
        keys = np.zeros(num_grams, dtype=np.int64)
        for i in range(n):
            keys = keys << _ID_BITS | tokens[i : i + num_grams] & _ID_MASK
        grams, counts = np.unique(keys, return_counts=True)  # ascending: contexts are together
        self._contexts, first = np.unique(grams >> _ID_BITS, return_index=True)
        totals = np.add.reduceat(counts, first) if len(first) else counts
        order = np.lexsort((counts, grams >> _ID_BITS))  # the last of each context is its most frequent
        best = order[np.append(first[1:], len(grams)) - 1] if len(first) else order
        self._next, self._shares = grams[best] & _ID_MASK, counts[best] / totals

    def guess(self, committed: Sequence[int], num_tokens: int) -> Guess | None:
        """See `text.Method`; up to an unknown context, with how often each token followed its context."""
        token_ids: list[int] = []
        shares: list[float] = []
        context = 0
        for token_id in committed[len(committed) - self._num_context :]:
            context = context << _ID_BITS | token_id & _ID_MASK
        mask = (1 << _ID_BITS * self._num_context) - 1
        while len(token_ids) < num_tokens:
            i = int(self._contexts.searchsorted(context))
            if i == len(self._contexts) or self._contexts[i] != context:
                break
            token_ids.append(int(self._next[i]))
            shares.append(float(self._shares[i]))
            context = (context << _ID_BITS | token_ids[-1]) & mask
        return Guess(token_ids, shares, 0, _PRIOR) if token_ids else None


class CountedOutput:
    """By counts in the target's own output: earlier ones, and that of this sequence so far."""

    def __init__(self, n: int, earlier: TokenArray) -> None:
        """`earlier` [num_tokens] are outputs of earlier generations; `n` as of a `Table`."""
        self._n, self._earlier = n, earlier
        self._counted = Table(n, earlier)
        self._prompt_len: int | None = None
        self._least_growth = _LEAST_GROWTH + int(_EARLIER_GROWTH * len(earlier))
        self._recount_len = self._least_growth

    def guess(self, committed: Sequence[int], num_tokens: int) -> Guess | None:
        """See `text.Method`; the first call has the prompt."""
        if self._prompt_len is None:
            self._prompt_len = len(committed)
        output_len = len(committed) - self._prompt_len
        if output_len >= self._recount_len:
            self._recount_len = int(_GROWTH * output_len) + self._least_growth
            output = np.array(committed[self._prompt_len :], dtype=np.int32)
            self._counted = Table(self._n, np.concatenate([self._earlier, output]))
        return self._counted.guess(committed, num_tokens)
