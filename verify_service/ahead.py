"""Going on by itself: what one sequence judges next, once its verdict is known. Pure.

The coordinator sends the draft's prepared proposals before the verdicts that they depend on. The rule is a
pure function of proposal, verdict, parameters and seed, so the coordinator comes to the same outcome, with
the same random numbers. It stays the judge: what is begun here is only a guess of its next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specwire.core import NO_TOKEN, Continuation, Proposal, SamplingParams, Verdict
from specwire.proposals.prepared import PreparedProposals
from specwire.rpc.wire.verify import AheadOrder
from specwire.rule import acceptance

MAX_AHEAD = 64
"""Proposals kept for a sequence, as many as outcomes may be prepared for; and most rounds begun ahead."""
MAX_AHEAD_ENTRIES = 1 << 18
"""Entries of their supports, 12 bytes each: 64 proposals of 16 tokens with supports of 256."""


class Next(NamedTuple):
    """What a sequence goes on with.

    Attributes:
        continuation: as it is announced.
        token_ids: committed by the outcome.
        proposal: judged after them.
    """

    continuation: Continuation
    token_ids: Sequence[int]
    proposal: Proposal


class Ahead:
    """The proposals ahead of one sequence, and its committed tokens as far as it knows them.

    Attributes:
        last_id: of its proposals so far; 0 before the first one.
    """

    def __init__(self, params: SamplingParams) -> None:
        assert params.seed is not None
        self._params, self._seed = params, params.seed
        self._committed: list[int] = []
        self._prepared = PreparedProposals(MAX_AHEAD, MAX_AHEAD_ENTRIES)
        self.last_id = 0

    def commit(self, base_len: int, token_ids: Sequence[int]) -> None:
        """The coordinator's tokens; they replace whatever was committed here after `base_len`."""
        self._committed[base_len:] = token_ids

    def add(self, order: AheadOrder) -> None:
        """A proposal for the case that its path is committed."""
        self.last_id = order.ahead_id
        self._prepared.add(order.path, order.proposal, order.ahead_id)

    def after(self, proposal: Proposal, verdict: Verdict) -> Next | None:
        """What follows a verdict on the proposal; None if nothing is there for it.

        Raises:
            InternalError: the verdict cannot be judged.
        """
        if not self._prepared or len(self._committed) != proposal.base_len:
            return None
        if NO_TOKEN in verdict.target_token_ids:  # what follows may fail: the coordinator asks for it, or not
            return None
        outcome = acceptance.accept(proposal, verdict, self._params, self._seed)
        emitted = [*(proposal.token_ids[node] for node in outcome.path), outcome.next_token]
        self._committed += emitted
        found = self._prepared.take(self._committed)
        if found is None:
            return None
        return Next(Continuation(found.origin, outcome), emitted, found.proposal)
