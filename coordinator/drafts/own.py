"""Proposals that the target makes by itself, and what a grammar leaves no choice about, which it says: both
arrive with the verdict before."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.cost import CallOutcome, Cost
from coordinator.generation import Plan, Round
from coordinator.peers.verifier import RemoteVerifier
from specwire.core import Proposal
from specwire.proposals.history import Guess
from specwire.telemetry import tracing

PRIOR = 0.5
"""Share of the tokens that a grammar leaves no choice about which the target spells alike, before it is
measured. Of the embedded target, which has seen little JSON."""


class OwnDrafter:
    """A `generation.Drafter`: takes what the last verdict brought, with no wait and no message of its own.

    The first round of a sequence has no proposal, nor has one after the target was lost.
    """

    unavailable = ""

    def __init__(self, target: RemoteVerifier) -> None:
        self._target = target

    def follow(self, committed: Sequence[int], begun: Proposal, plan: Plan) -> Cost:
        self._target.want(plan.num_draft_tokens, plan.max_depth)
        return Cost(outcome=CallOutcome.READY)

    async def propose(
        self, committed: Sequence[int], plan: Plan, parent: tracing.Span
    ) -> tuple[Proposal, Cost]:
        self._target.want(plan.num_draft_tokens, plan.max_depth)
        found = self._target.drafted(committed) if plan.num_draft_tokens else None
        if found is None:
            return Proposal(len(committed)), Cost()
        return plan.limit(found), Cost(outcome=CallOutcome.READY)

    def observe(self, done: Round) -> None:
        """See `generation.Drafter`; the target has learnt from it."""

    def close(self) -> None:
        """See `generation.Drafter`; there is nothing to release."""


class Forced:
    """A `text.Method`: what must follow, as tokens, of which the target may choose others."""

    def __init__(self, target: RemoteVerifier) -> None:
        self._target = target

    def guess(self, committed: Sequence[int], num_tokens: int) -> Guess | None:
        self._target.want(num_tokens, 0)
        found = self._target.drafted(committed)
        if found is None:
            return None
        token_ids = list(found.token_ids[:num_tokens])
        return Guess(token_ids, [1.0] * len(token_ids), 0, PRIOR)
