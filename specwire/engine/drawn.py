"""Draft tokens by row of a pass: what they were drawn from, and likely alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from specwire.support import FloatArray, IntArray, Support

NOTHING: Mapping[Any, Any] = {}
"""Of fields that are empty by default; ranks of a group pickle them, which mapping proxies do not allow."""


class Drawn(NamedTuple):
    """What was drawn from the rows of a step; one entry for each row.

    Attributes:
        token_ids: -1 where the logits are not finite.
        supports: the support that each was drawn from, None where tokens are matched; empty if all are.
            Token 0 alone where the logits are not finite.
        ranked: likeliest tokens, best first; the drawn one may be among them. Empty if none are wanted.
        shares: where tokens are matched, how likely each of them is the target's by the draft's scores alone;
            empty if none are.
        own_ids: by row of jobs that draft text, the likeliest of the draft's own tokens that it may choose.
        of_chains: by row and number of chains, of jobs with several, the next token of each.
    """

    token_ids: list[int]
    supports: Sequence[Support | None] = ()
    ranked: Sequence[list[int]] = ()
    shares: Sequence[list[float]] = ()
    own_ids: Mapping[int, int] = NOTHING
    of_chains: Mapping[tuple[int, int], int] = NOTHING

    @classmethod
    def matched(cls, token_ids: IntArray, *candidates: Any) -> Self:
        """For rows where tokens are matched; `candidates` are what `choices.likeliest` returns, if wanted."""
        if not candidates:
            return cls(token_ids.tolist())
        ranked, lengths, shares = (column.tolist() for column in candidates)
        return cls(
            token_ids.tolist(),
            ranked=[ids[:n] for ids, n in zip(ranked, lengths, strict=True)],
            shares=[of_row[:n] for of_row, n in zip(shares, lengths, strict=True)],
        )

    @classmethod
    def supported(
        cls, token_ids: IntArray, ids: IntArray, probs: FloatArray, lengths: IntArray, *, num_ranked: int = 0
    ) -> Self:
        """For rows that were sampled from a support, which is sorted by probability, highest first.

        Every row has as many likeliest tokens, however few are in its support: how much is prepared for the
        outcomes of a proposal must not depend on its tokens.
        """
        each = zip(ids, probs, lengths.tolist(), strict=True)
        supports = [Support(row[:n], own[:n]) for row, own, n in each]
        ranked = ids[:, :num_ranked].tolist() if num_ranked else ()
        return cls(token_ids.tolist(), supports, ranked)
