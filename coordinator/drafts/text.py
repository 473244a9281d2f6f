"""Drafts from text: how much of a guess is proposed, alone or beside a draft model.

What is guessed is up to a `Method`. Exact with every rule: where tokens are matched a draft needs no
probabilities, and under rejection sampling a draft that is certain of its token has a distribution of one
point, so the token is accepted with the target's probability. Knows no network and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.cost import Cost
from coordinator.generation import Drafter, Plan, Round
from specwire.core import Proposal, num_in_common
from specwire.proposals.estimate.acceptance import PRIOR_ACCEPTANCE
from specwire.proposals.estimate.rates import Rate, best_length, expected_tokens
from specwire.proposals.history import Guess
from specwire.support import certain
from specwire.telemetry import tracing


class Method(Protocol):
    """Guesses what follows the tokens of one sequence."""

    def guess(self, committed: Sequence[int], num_tokens: int) -> Guess | None:
        """At most so many tokens, at least one; None where nothing is known."""


@dataclass(kw_only=True)
class TextDrafter:
    """A `generation.Drafter`: as much of a guess as pays, or the model's tokens where they promise more.

    Acceptance is measured by kind of guess in every round that had one, whether it was proposed or not: a
    guess can be compared with what was committed. Where the request does not fix the number of draft tokens,
    so many are proposed as promise the most tokens a second by the measured cost of passes, or none: on a new
    text, where guesses mislead, rounds are plain ones.

    Between text and model the choice is made from past rounds before the model is asked: never from the
    tokens that the model drew, which would bias rejection sampling.

    Attributes:
        model: planned with no draft tokens where the text is to propose alone.
        source: of the method's proposals.
        matches_tokens: whether the rule matches tokens, and needs no supports.
        is_fixed: propose as many tokens as planned wherever there is a guess.
        is_certain: a guess is what must follow, so the model's proposal begins with it.
        remember: gets the output of the sequence when it is closed.
    """

    method: Method
    model: Drafter
    source: str
    matches_tokens: bool
    is_fixed: bool
    is_certain: bool = False
    remember: Callable[[Sequence[int]], None] | None = None

    def __post_init__(self) -> None:
        self._rates: dict[int, Rate] = {}
        self._model_rate = Rate(PRIOR_ACCEPTANCE)
        self._guess: Guess | None = None
        self._verify_cost = Cost()
        self._committed: Sequence[int] = ()
        self._num_remembered = 0

    @property
    def unavailable(self) -> str:
        """See `generation.Drafter`; why the model was not there."""
        return self.model.unavailable

    def follow(self, committed: Sequence[int], begun: Proposal, plan: Plan) -> Cost:
        self._guess = None
        return self.model.follow(committed, begun, plan)

    async def propose(
        self, committed: Sequence[int], plan: Plan, parent: tracing.Span
    ) -> tuple[Proposal, Cost]:
        """See `generation.Drafter`; without a wait where the text proposes."""
        if not self._committed:
            self._num_remembered = len(committed)
        self._committed = committed  # it grows: `close` finds the last round's tokens there
        own, promised = self.from_text(committed, plan.num_text_tokens)
        if own.token_ids:
            of_model = expected_tokens([self._model_rate.value] * plan.num_steps)[-1]
            if self.is_certain and plan.num_steps:  # the model continues this very text
                of_model = math.inf
            if promised >= of_model:
                return own, Cost()
        proposal, cost = await self.model.propose(committed, plan, parent)
        return proposal if proposal.token_ids else own, cost

    def from_text(self, committed: Sequence[int], num_tokens: int) -> tuple[Proposal, float]:
        """The method's proposal, and the tokens that a round with it is expected to commit."""
        self._guess = guess = self.method.guess(committed, num_tokens) if num_tokens > 0 else None
        if guess is None:
            return Proposal(len(committed)), 1.0
        rate = self._rate(guess).value
        expected = expected_tokens(min(1.0, rate * share) for share in guess.shares)
        most = len(guess.token_ids)
        num_proposed = most if self.is_fixed else best_length(expected, self._round_times(most))
        return self._proposal(len(committed), guess.token_ids[:num_proposed]), expected[num_proposed]

    def observe(self, done: Round) -> None:
        self._verify_cost = done.verify_cost
        self.model.observe(done)
        if self._guess is not None:
            token_ids, shares, *_ = self._guess
            committed = done.token_ids
            num_right = num_in_common(token_ids, committed)
            num_judged = min(num_right + 1, len(token_ids), len(committed))
            self._rate(self._guess).add(num_right, sum(shares[:num_judged]))
        if done.proposal.token_ids and not done.is_from_text:
            num_accepted = done.outcome.num_accepted
            self._model_rate.add(num_accepted, num_accepted + bool(done.rejected))

    def close(self) -> None:
        self.model.close()
        if self.remember is not None:
            self.remember(self._committed[self._num_remembered :])
        self._num_remembered = len(self._committed)

    def _rate(self, guess: Guess) -> Rate:
        return self._rates.setdefault(guess.kind, Rate(guess.prior))

    def _round_times(self, num_tokens: int) -> list[float]:
        """[num_tokens + 1] of rounds by number of draft tokens, in ns; all equal before one is measured."""
        load = self._verify_cost.load
        if load is None or not load.base_ns:
            return [1.0] * (num_tokens + 1)
        least_ns = self._verify_cost.network_ns + load.base_ns + load.num_sequences * load.sequence_ns
        token_ns = load.num_sequences * load.token_ns
        return [least_ns + token_ns * (n + 1) for n in range(num_tokens + 1)]

    def _proposal(self, base_len: int, token_ids: list[int]) -> Proposal:
        return Proposal(base_len, token_ids, () if self.matches_tokens else certain(token_ids), self.source)
