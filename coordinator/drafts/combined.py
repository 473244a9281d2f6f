"""A draft from the text beside a draft model: whichever promises more tokens proposes."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.cost import Cost
from coordinator.drafts.ngram import NgramDrafter
from coordinator.drafts.rates import Rate, expected_tokens
from coordinator.generation import Drafter, Plan, Round
from specwire.core import Proposal
from specwire.estimate.forecast import PRIOR_ACCEPTANCE
from specwire.telemetry import tracing


class CombinedDrafter:
    """The text's proposal where it promises at least as many tokens as the model's, or where the model has
    none; else the model's.

    The choice is made from past rounds before the model is asked: never from the tokens that the model drew,
    which would bias rejection sampling.
    """

    def __init__(self, text: NgramDrafter, model: Drafter) -> None:
        self._text = text
        self._model = model
        self._model_rate = Rate(PRIOR_ACCEPTANCE)

    @property
    def unavailable(self) -> str:
        """See `generation.Drafter`; why the model was not there."""
        return self._model.unavailable

    async def propose(
        self, committed: Sequence[int], plan: Plan, parent: tracing.Span
    ) -> tuple[Proposal, Cost]:
        """See `generation.Drafter`."""
        guess = self._text.guess(committed, plan.num_text_tokens)
        is_guessed = len(guess.proposal.token_ids) > 0
        model_tokens = expected_tokens(self._model_rate.value, plan.num_draft_tokens)[-1]
        if is_guessed and guess.expected_tokens >= model_tokens:
            return guess.proposal, Cost()
        proposal, cost = await self._model.propose(committed, plan, parent)
        return proposal if proposal.token_ids or not is_guessed else guess.proposal, cost

    def observe(self, done: Round) -> None:
        """See `generation.Drafter`."""
        self._text.observe(done)
        self._model.observe(done)
        if done.proposal.token_ids and not done.is_from_text:
            self._model_rate.add(done.outcome.num_accepted, was_rejected=bool(done.rejected))

    def close(self) -> None:
        """See `generation.Drafter`."""
        self._model.close()
