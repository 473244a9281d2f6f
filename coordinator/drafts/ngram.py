"""Drafts from the text itself: what followed the last tokens when they occurred before ("prompt lookup").

Source: Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding); n-gram drafts
are in Leviathan et al. 2023 (arXiv 2211.17192), section 4.1, already. Exact with every rule: where tokens are
matched a draft needs no probabilities, and under rejection sampling a draft that is certain of its token has
a distribution of one point, so the token is accepted with the target's probability.

Knows no network and no clock. The loop sees a `generation.Drafter` like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coordinator.cost import Cost
from coordinator.drafts.rates import Rate, expected_tokens
from coordinator.generation import Plan, Round
from coordinator.length.measurements import best_length
from specwire.config.speculative import NGRAM, NgramConfig
from specwire.core import Proposal, Support, num_in_common
from specwire.telemetry import tracing

_MAX_MATCH_LEN = 32
"""Longest match that is told from longer ones, in tokens."""
_MAX_CANDIDATES = 128
"""Latest occurrences of the last token that are looked at: bounds the search in a text of few tokens."""
_MIN_CAPACITY = 256


class Match(NamedTuple):
    """An earlier occurrence of a sequence's last tokens."""

    end: int  # index of the token that followed it
    match_len: int  # tokens in common before that, at most _MAX_MATCH_LEN


class History:
    """The tokens of a sequence, to find earlier occurrences of the last ones; 4 bytes a token, no index.

    All tokens are compared with the last one at once: some 20 µs for a look-up in 32,768 of them, with no
    index to build when a long prompt arrives.
    """

    def __init__(self, min_len: int, max_len: int) -> None:
        """Args:
        min_len, max_len: of the n-grams that are looked for, in tokens.
        """
        self._min_len, self._max_len = min_len, max_len
        # In front are tokens that equal no other, so that a comparison stops there by itself.
        self._pad = max(_MAX_MATCH_LEN, max_len)
        self._tokens = np.full(self._pad + _MIN_CAPACITY, -1, dtype=np.int32)
        self._end = self._pad

    def update(self, committed: Sequence[int]) -> None:
        """Add the tokens that are new; the earlier ones never change."""
        new = committed[self._end - self._pad :]
        end = self._end + len(new)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[: self._end], np.empty(end, dtype=np.int32)])
        self._tokens[self._end : end] = new
        self._end = end

    def find(self) -> Match | None:
        """The latest occurrence of the longest n-gram that ends the sequence and occurred before."""
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
        return self._match(int(found[-1])) if len(found) else None

    def _match(self, end: int) -> Match:
        """That ends with the token at this index."""
        tokens, last = self._tokens, self._end - 1
        earlier, latest = (tokens[i - _MAX_MATCH_LEN + 1 : i + 1][::-1] for i in (end, last))
        differs = earlier != latest
        match_len = int(differs.argmax()) if differs.any() else _MAX_MATCH_LEN
        return Match(end + 1 - self._pad, match_len)

    def continuation(self, match: Match, num_tokens: int) -> list[int]:
        """What followed; where that reaches the end of the sequence, the repetition goes on."""
        start = self._pad + match.end
        period: list[int] = self._tokens[start : min(start + num_tokens, self._end)].tolist()
        return [period[i % len(period)] for i in range(num_tokens)]


class Guess(NamedTuple):
    """A proposal, and the tokens that a round with it is expected to commit."""

    proposal: Proposal
    expected_tokens: float


class NgramDrafter:
    """Proposes what followed the last tokens before, as many tokens as pay.

    Acceptance is measured by length of the match, in every round that had one, whether its tokens were
    proposed or not: they can be compared with what was committed. Where the request does not fix the number
    of draft tokens, so many are proposed as promise the most tokens a second by the measured cost of passes,
    or none: on a new text, where matches mislead, rounds are plain ones.
    """

    unavailable = ""

    def __init__(self, config: NgramConfig, *, matches_tokens: bool, is_fixed: bool) -> None:
        """Args:
        matches_tokens: whether the rule matches tokens, and needs no supports.
        is_fixed: propose as many tokens as planned wherever there is a match.
        """
        self._history = History(config.prompt_lookup_min, config.prompt_lookup_max)
        self._matches_tokens = matches_tokens
        self._is_fixed = is_fixed
        self._rates: dict[int, Rate] = {}
        self._guessed: tuple[Rate, list[int]] | None = None
        self._verify_cost = Cost()

    async def propose(
        self, committed: Sequence[int], plan: Plan, parent: tracing.Span
    ) -> tuple[Proposal, Cost]:
        """See `generation.Drafter`; without any wait."""
        return self.guess(committed, plan.num_text_tokens).proposal, Cost()

    def guess(self, committed: Sequence[int], num_tokens: int) -> Guess:
        """At most so many tokens; none where there is no match or none pays."""
        self._guessed = None
        nothing = Guess(Proposal(len(committed)), 1.0)
        if num_tokens <= 0:
            return nothing
        self._history.update(committed)
        match = self._history.find()
        if match is None:
            return nothing
        token_ids = self._history.continuation(match, num_tokens)
        rate = self._rate(match.match_len)
        self._guessed = rate, token_ids
        expected = expected_tokens(rate.value, num_tokens)
        num_proposed = num_tokens if self._is_fixed else best_length(expected, self._round_times(num_tokens))
        return Guess(self._proposal(len(committed), token_ids[:num_proposed]), expected[num_proposed])

    def observe(self, done: Round) -> None:
        """See `generation.Drafter`."""
        self._verify_cost = done.verify_cost
        if self._guessed is None:
            return
        rate, token_ids = self._guessed
        emitted = [token_id for token_id, _ in done.emitted]
        num_right = num_in_common(token_ids, emitted)
        rate.add(num_right, was_rejected=num_right < min(len(token_ids), len(emitted)))

    def close(self) -> None:
        """See `generation.Drafter`; it holds nothing but tokens."""

    def _rate(self, match_len: int) -> Rate:
        """Of matches about as long; the longer, the likelier that the text goes on as it did."""
        return self._rates.setdefault(match_len.bit_length(), Rate(prior=match_len / (match_len + 1)))

    def _round_times(self, num_tokens: int) -> list[float]:
        """[num_tokens + 1] of rounds by number of draft tokens, in ns; all equal before one is measured."""
        load = self._verify_cost.load
        if load is None or not load.base_ns:
            return [1.0] * (num_tokens + 1)
        least_ns = self._verify_cost.network_ns + load.base_ns + load.num_sequences * load.sequence_ns
        token_ns = load.num_sequences * load.token_ns
        return [least_ns + token_ns * (n + 1) for n in range(num_tokens + 1)]

    def _proposal(self, base_len: int, token_ids: list[int]) -> Proposal:
        return Proposal(base_len, token_ids, () if self._matches_tokens else _certain(token_ids), NGRAM)


_ONE = np.ones(1, dtype=np.float32)


def _certain(token_ids: list[int]) -> list[Support]:
    """Of each token, the distribution that has nothing else."""
    return [Support(np.array([token_id]), _ONE) for token_id in token_ids]
