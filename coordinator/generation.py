"""The loop that drafts, verifies and commits. Knows no grpc, no text, and no clock but a stopwatch."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from specwire.core import Fate, Load, Outcome, Proposal, SamplingParams, Verdict
from specwire.estimate import clock
from specwire.rule import acceptance
from specwire.telemetry import tracing


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call to a model service cost.

    `queue_ns`, `forward_ns` and `num_cached_tokens` (found in its cache instead of computed) are the
    service's own figures, and `load` is what it says of itself. `num_new_tokens` are committed tokens that
    the draft had not proposed itself, and so has to run; `wall_ns` is ours, network included. Where work had
    begun before it was asked for, `queue_ns` and `forward_ns` are 0; with `prepared` the proposal was there
    already, and all else is 0. With `given_up` it was asked for, and did not come as soon as it was worth;
    with `away` there was no draft to ask, or it was lost meanwhile.
    """

    queue_ns: int = 0
    forward_ns: int = 0
    wall_ns: int = 0
    request_bytes: int = 0
    response_bytes: int = 0
    num_cached_tokens: int = 0
    num_new_tokens: int = 0
    load: Load | None = None
    prepared: bool = False
    given_up: bool = False
    away: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """For the round about to begin.

    Attributes:
        num_draft_tokens: to draft.
        num_outcomes: of the round that the draft shall prepare for meanwhile.
        patience_s: longest wait for a proposal, in seconds; then the round is a plain one.
    """

    num_draft_tokens: int
    num_outcomes: int = 0
    patience_s: float = math.inf


class Planner(Protocol):
    """How much to draft; never more than `limit`."""

    @property
    def limit(self) -> int:
        """Most draft tokens that it ever plans."""
        ...

    def plan(self) -> Plan:
        """For the round about to begin; from the past alone, never from the tokens it would leave out."""
        ...

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """Learn from a round and how long it took, what was then made of it included."""
        ...


class Drafter(Protocol):
    """The draft's side of one sequence."""

    async def propose(self, committed: Sequence[int], plan: Plan, parent: str) -> tuple[Proposal, Cost]:
        """At most as many guesses of what follows as planned; none when the draft is not there in time."""
        ...


class Verifier(Protocol):
    """The target's side of one sequence."""

    async def verify(self, committed: Sequence[int], proposal: Proposal, parent: str) -> tuple[Verdict, Cost]:
        """What the target says at every draft position and at the one after them."""
        ...


@dataclass(frozen=True, slots=True)
class Round:
    """One draft → verify → commit cycle."""

    proposal: Proposal
    verdict: Verdict
    outcome: Outcome
    draft_cost: Cost
    verify_cost: Cost
    rule_ns: int

    @property
    def emitted(self) -> list[tuple[int, Fate]]:
        """Committed tokens with their fates: accepted ones, then the recovered or bonus token."""
        num_accepted = self.outcome.num_accepted
        last = Fate.BONUS if num_accepted == len(self.proposal.token_ids) else Fate.RECOVERED
        accepted = [(token_id, Fate.ACCEPTED) for token_id in self.proposal.token_ids[:num_accepted]]
        return [*accepted, (self.outcome.next_token, last)]

    @property
    def rejected(self) -> list[int]:
        """The draft token that the rule refused, if any. Those after it were never judged."""
        num_accepted = self.outcome.num_accepted
        return list(self.proposal.token_ids[num_accepted : num_accepted + 1])


class Generation:
    """One sequence on its way.

    Args:
        generated_token_ids: emitted before, by another coordinator; they count for `max_tokens`.
        may_start: awaited before each round; whoever must wait for something does it here.

    Attributes:
        committed: the prompt and everything emitted since.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        drafter: Drafter,
        verifier: Verifier,
        *,
        planner: Planner,
        tracer: tracing.Tracing,
        parent: str = "",
        may_start: Callable[[], Awaitable[None]] | None = None,
        generated_token_ids: Sequence[int] = (),
    ) -> None:
        assert params.seed is not None  # drawn by the coordinator when the client gave none
        assert params.max_tokens is not None  # what the context has room for is known by now
        self._seed = params.seed
        self.committed = [*prompt_token_ids, *generated_token_ids]
        self._end_len = len(prompt_token_ids) + params.max_tokens
        self._params = params
        self._drafter = drafter
        self._verifier = verifier
        self._planner = planner
        self._tracer = tracer
        self._parent = parent
        self._may_start = may_start

    async def rounds(self) -> AsyncIterator[Round]:
        """Rounds until `max_tokens` are emitted; whoever sees a stop condition just stops asking."""
        number = 0
        while len(self.committed) < self._end_len:
            if self._may_start is not None:
                await self._may_start()
            started_ns = clock.stopwatch_ns()
            with self._tracer.span("round", parent=self._parent) as span:
                done = await self._round(span.traceparent)
                self.committed.extend(token_id for token_id, _ in done.emitted)
                span.set({tracing.ROUND: number, **_round_attributes(done)})
            number += 1
            yield done
            self._planner.observe(done, clock.stopwatch_ns() - started_ns)

    async def _round(self, parent: str) -> Round:
        # The last token of a round is the target's own, so the last round may draft one token less.
        plan = self._planner.plan()
        left = self._end_len - len(self.committed) - 1
        if plan.num_draft_tokens > left:
            plan = replace(plan, num_draft_tokens=left, num_outcomes=0)
        proposal, draft_cost = await self._drafter.propose(self.committed, plan, parent)
        verdict, verify_cost = await self._verifier.verify(self.committed, proposal, parent)
        started_ns = clock.stopwatch_ns()
        with self._tracer.span("accept", parent=parent):
            outcome = acceptance.accept(proposal, verdict, self._params, self._seed)
        rule_ns = clock.stopwatch_ns() - started_ns
        return Round(proposal, verdict, outcome, draft_cost, verify_cost, rule_ns)


def _round_attributes(done: Round) -> dict[str, int]:
    return {
        tracing.DRAFT_PREPARED: done.draft_cost.prepared,
        tracing.BASE_LEN: done.proposal.base_len,
        tracing.NUM_DRAFT_TOKENS: len(done.proposal.token_ids),
        tracing.NUM_ACCEPTED_TOKENS: done.outcome.num_accepted,
    }
