"""The loop that drafts, verifies and commits. Knows no grpc, no text, and no clock but a stopwatch."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from coordinator.cost import Cost
from coordinator.ledger import Ledger
from coordinator.requests import GenerationRequest
from specwire import clock
from specwire.completion import Stage
from specwire.config.speculative import FROM_TEXT
from specwire.core import Fate, Logprobs, Outcome, Proposal, Verdict
from specwire.errors import ServiceUnavailableError
from specwire.proposals import chains, tree
from specwire.rule import acceptance
from specwire.telemetry import semantics as names
from specwire.telemetry import tracing


@dataclass(frozen=True, slots=True)
class Plan:
    """How to draft in the next round.

    Attributes:
        num_draft_tokens: to draft; of a tree, its nodes; of several chains, the tokens of each.
        max_depth: longest path of a tree; 0 for a chain.
        num_outcomes: of the round that the draft prepares proposals for during the verify pass.
        patience_s: longest wait for a proposal, in seconds; after it the round is a plain one.
        num_text_tokens: most draft tokens of a proposal from the text itself, for which there is no wait.
        num_chains: to draw, independently of each other.
        why_plain: why no draft tokens are planned; empty if some are.
    """

    num_draft_tokens: int
    num_outcomes: int = 0
    patience_s: float = math.inf
    num_text_tokens: int = 0
    max_depth: int = 0
    num_chains: int = 1
    why_plain: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether there are none, of any source."""
        return not (self.num_draft_tokens or self.num_text_tokens)

    @property
    def num_steps(self) -> int:
        """Draft tokens one after another: forward passes of the draft."""
        return self.max_depth or self.num_draft_tokens

    @property
    def num_wanted(self) -> int:
        """Draft tokens of all chains."""
        return self.num_draft_tokens * self.num_chains

    def limit(self, proposal: Proposal) -> Proposal:
        """What the plan allows of a proposal that was made for an earlier one."""
        if len(proposal.token_ids) <= self.num_draft_tokens and not (self.max_depth or proposal.leaves):
            return proposal
        found = tree.within(proposal, self.num_wanted, self.num_steps)
        return chains.first(found, self.num_chains)

    def within(self, most: int, room: int) -> Plan:
        """The same for a round near the end of a generation.

        Args:
            most: longest path of draft tokens.
            room: most draft tokens, on any path.
        """
        if max(self.num_steps, self.num_text_tokens) <= most and self.num_wanted <= room:
            return self
        if most <= 0:
            return replace(self, num_draft_tokens=0, num_outcomes=0, num_text_tokens=0, max_depth=0)
        return replace(
            self,
            num_draft_tokens=min(self.num_draft_tokens, room if self.max_depth else most),
            num_outcomes=0,
            num_text_tokens=min(self.num_text_tokens, most),
            max_depth=min(self.max_depth, most),
            num_chains=self.num_chains if self.num_wanted <= room else 1,
        )


class Planner(Protocol):
    """Decides how much to draft."""

    @property
    def limit(self) -> int:
        """Longest path of draft tokens that it ever plans."""

    def plan(self) -> Plan:
        """For the next round; from past rounds alone, never from the tokens that it would leave out."""

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """Learn from a round and the time that it took, including what its consumer did with it."""


class Drafter(Protocol):
    """The draft's side of one sequence; the loop does not know where proposals come from."""

    @property
    def unavailable(self) -> str:
        """Why the draft was not there for a part of the generation; empty if it always was."""

    def follow(self, committed: Sequence[int], begun: Proposal, plan: Plan) -> Cost:
        """The target goes on by itself with this proposal, which was prepared; the draft works on from it."""

    async def propose(
        self, committed: Sequence[int], plan: Plan, parent: tracing.Span
    ) -> tuple[Proposal, Cost]:
        """At most the planned number of draft tokens; none when the draft does not answer in time."""

    def observe(self, done: Round) -> None:
        """Learn from a round, whose tokens are committed now."""

    def close(self) -> None:
        """Release what it holds; a later round may still ask for a proposal."""


class Verifier(Protocol):
    """The target's side of one sequence."""

    async def verify(
        self, committed: Sequence[int], proposal: Proposal, parent: tracing.Span, *, is_plain: bool = False
    ) -> tuple[Verdict, Cost]:
        """The target's verdict on every draft position and on the one after them.

        Args:
            is_plain: no proposal is planned for the rounds after this one, so it may begin them by itself.
        """

    def begun(self, committed: Sequence[int], outcome: Outcome) -> Proposal | None:
        """The proposal that the target judges next by itself, after the outcome of the last verdict; an empty
        one of a plain round.

        None if it waits for a request, or came to another outcome.
        """


@dataclass(slots=True)
class Round:
    """One draft → verify → commit cycle.

    Attributes:
        why_plain: why it had no draft tokens; empty if it had some, or one token was left to generate.
        token_ids: committed: accepted ones, then the recovered, bonus or plain token.
    """

    proposal: Proposal
    verdict: Verdict
    outcome: Outcome
    draft_cost: Cost
    verify_cost: Cost
    why_plain: str = ""
    token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        drafted, outcome = self.proposal.token_ids, self.outcome
        self.token_ids = [*map(drafted.__getitem__, outcome.path), outcome.next_token]

    @property
    def is_from_text(self) -> bool:
        """Whether the coordinator made the proposal, and no model."""
        return self.proposal.source in FROM_TEXT

    @property
    def num_steps(self) -> int:
        """Draft tokens one after another: the longest path of the proposal."""
        parents = self.proposal.parents
        return 1 + max(tree.depths(parents)) if parents else len(self.proposal.token_ids)

    @property
    def rejected(self) -> list[int]:
        """The draft tokens that the rule rejected, in a chain at most one. Those after them are dropped.

        With any, the last committed token is a recovered one.
        """
        path = self.outcome.path
        refused = self.proposal.children(path[-1] if path else -1)
        return [self.proposal.token_ids[node] for node in refused]

    @property
    def last_fate(self) -> Fate:
        """Of the last committed token, which is the target's own."""
        if not self.proposal.token_ids:
            return Fate.PLAIN
        return Fate.RECOVERED if self.rejected else Fate.BONUS

    @property
    def logprobs(self) -> list[Logprobs]:
        """One entry for each emitted token, if requested."""
        rows = self.verdict.logprobs
        return [rows[row] for row in (0, *(node + 1 for node in self.outcome.path))] if rows else []


class Turns(Protocol):
    """When rounds may start."""

    @property
    def may_start(self) -> bool:
        """Whether one may now."""

    async def wait(self) -> None:
        """Until one may."""


@dataclass(kw_only=True)
class Generation:
    """One sequence being generated.

    Attributes:
        committed: the prompt and everything emitted since.
    """

    request: GenerationRequest
    drafter: Drafter
    verifier: Verifier
    planner: Planner
    ledger: Ledger
    tracer: tracing.Tracing
    trace_detail: bool
    parent: tracing.Span
    turns: Turns
    committed: list[int] = field(init=False)

    def __post_init__(self) -> None:
        request, params = self.request, self.request.keyed_params
        assert params.seed is not None  # drawn by the coordinator when the client gave none
        assert params.max_tokens is not None  # at the latest what the context has room for
        self._seed, self._params = params.seed, params
        self.committed = [*request.prompt_token_ids, *request.generated_token_ids]
        self._longest_len = request.target.longest_len
        self._end_len = request.prompt_len + params.max_tokens
        self._num_rounds = 0
        self._begun: Proposal | None = None

    async def rounds(self) -> AsyncGenerator[Round, None]:
        """Rounds until `max_tokens` are emitted; at a stop condition the caller stops iterating.

        The next round's request leaves when the caller asks for it: what need not be done before, such as
        text, is better left for later.
        """
        while len(self.committed) < self._end_len:
            if not self.turns.may_start:
                await self.turns.wait()
            started_ns = clock.stopwatch_ns()
            done = await (self._traced_cycle() if self.tracer.enabled else self._cycle(self.parent))
            self.ledger.switch(Stage.EMIT)
            yield done
            ended_ns = self.ledger.switch(Stage.COORDINATOR)
            self.drafter.observe(done)
            self.planner.observe(done, ended_ns - started_ns)

    async def _traced_cycle(self) -> Round:
        with self.tracer.span("round", parent=self.parent.context) as span:
            number = self._num_rounds
            done = await self._cycle(span)
            if span.trace_id:
                span.link(done.draft_cost.prepared_by)
                drafted = done.proposal
                attributes: tracing.Attributes = {
                    names.ROUND: number,
                    names.DRAFT_PREPARED: done.draft_cost.prepared,
                    names.CALL_OUTCOME: done.draft_cost.outcome,
                    names.BASE_LEN: drafted.base_len,
                    names.NUM_DRAFT_TOKENS: len(drafted.token_ids),
                    names.NUM_ACCEPTED_TOKENS: done.outcome.num_accepted,
                    names.SOURCE: drafted.source if drafted.token_ids else None,
                }
                span.set(attributes)
        return done

    async def _cycle(self, parent: tracing.Span) -> Round:
        """Draft, verify, commit."""
        # The last token of a round is the target's own, so the last round may draft one token less.
        num_done = len(self.committed)
        plan = self.planner.plan().within(self._end_len - num_done - 1, self._longest_len - num_done)
        proposal, draft_cost = await self._propose(plan, parent)
        try:
            verdict, verify_cost = await self.verifier.verify(
                self.committed, proposal, parent, is_plain=plan.is_plain
            )
        except ServiceUnavailableError:
            self.ledger.fail()
            raise
        self.ledger.settle(verify_cost, Stage.RULE)
        with self.tracer.span("accept", parent=parent.context) if self.trace_detail else _NO_SPAN:
            outcome = acceptance.accept(proposal, verdict, self._params, self._seed)
        why_plain = "" if proposal.token_ids else plan.why_plain
        if not (proposal.token_ids or why_plain):
            if draft_cost.draft_unavailable:
                why_plain = f"the draft is unavailable: {self.drafter.unavailable}"
            elif draft_cost.timed_out:
                why_plain = "the proposal did not arrive in time"
        done = Round(proposal, verdict, outcome, draft_cost, verify_cost, why_plain)
        self.committed += done.token_ids
        self._begun = self.verifier.begun(self.committed, outcome)
        self._num_rounds += 1
        return done

    async def _propose(self, plan: Plan, parent: tracing.Span) -> tuple[Proposal, Cost]:
        begun = self._begun
        if begun is not None and (plan.num_draft_tokens or not begun.token_ids):
            self.ledger.switch(Stage.VERIFY)
            return begun, Cost() if plan.is_plain else self.drafter.follow(self.committed, begun, plan)
        self.ledger.switch(Stage.DRAFT)
        proposal, cost = await self.drafter.propose(self.committed, plan, parent)
        self.ledger.settle(cost, Stage.VERIFY)
        return proposal, cost


_NO_SPAN = nullcontext()
