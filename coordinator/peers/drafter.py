"""The draft service for one sequence: it may be far away, late, full, or not there at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from coordinator.cost import CallOutcome, Cost
from coordinator.generation import Plan, Round
from coordinator.peers.checks import check_proposal
from coordinator.peers.draft_sequence import ASKED, DraftSequence
from coordinator.peers.pool import Pool
from coordinator.peers.replicas import Replica
from coordinator.peers.streams import describe, span_around
from specwire import clock
from specwire.core import ModelInfo, Preparation, Proposal, SamplingParams
from specwire.errors import (
    InternalError,
    PrefixMismatchError,
    ResourceExhaustedError,
    ServiceDrainingError,
    ServiceUnavailableError,
    SpecwireError,
)
from specwire.proposals.prepared import Prepared
from specwire.rpc.wire import model as wire
from specwire.telemetry import semantics as names
from specwire.telemetry import tracing
from specwire.text.grammar import LONGEST_MASK_S

_RETRY_AFTER_MS = 1000
_HUNG_AFTER_WAITS = 5.0
"""A draft that has not answered for so many of its longest waits counts as lost."""


class RemoteDrafter:
    """A `generation.Drafter` that may fail: then proposals are empty, and `unavailable` says why.

    What a round gets, besides its cost:

        no replica, or the sequence fails   no tokens, `UNAVAILABLE` or `LOST`
        a prepared proposal follows         the proposal, `READY`; the draft works on from it
        an earlier answer is still late     no tokens; nothing more is requested
        no answer in time                   no tokens, `TIMED_OUT`; the answer is late from now on
        an answer in time                   the proposal, `ASKED` or `BEGUN`

    How long masks of a grammar take depends on drafted tokens, which must not decide where they are sampled:
    such a proposal is waited for, or its draft is lost.

    A draft that is lost or hangs costs one bounded wait; the next round tries another replica, or is a plain
    one. Which replica proposes never depends on a token (docs/failover.md).

    Attributes:
        unavailable: why the draft was not there for a part of the generation; empty if it always was.
    """

    def __init__(
        self,
        pool: Pool,
        params: SamplingParams,
        prompt_len: int,
        vocab_size: int,
        *,
        may_teach: bool = True,
        may_be_tree: bool = False,
        num_chains: int = 1,
        timeout_s: float,
        deadline_s: float | None,
        tracer: tracing.Tracing,
        parent: tracing.Span,
        on_prepared: Callable[[Sequence[int], Proposal], None] = lambda path, proposal: None,
    ) -> None:
        """Opens nothing yet.

        Args:
            params: that random numbers are keyed by.
            vocab_size: of the target, in tokens.
            may_teach: whether the draft may change its weights by the output.
            may_be_tree, num_chains: whether trees, and how many chains at most, are ever asked for.
            timeout_s: longest wait for a proposal, unless proposals are known to cost more.
            deadline_s: of the request, from now; None without one.
            parent: span of the generation.
            on_prepared: called for each proposal that was prepared, with the path that it follows.
        """
        self._pool = pool
        self._opening = wire.open_sequence(
            replace(params, adapter=""),
            prompt_len,
            vocab_size,
            tracer.propagators.headers(parent.context),
            may_learn=may_teach,
        )
        self._check = partial(
            check_proposal,
            matches_tokens=params.matches_tokens,
            may_be_tree=may_be_tree,
            num_chains=num_chains,
        )
        self._timeout_s = self._longest_wait_s = timeout_s
        self._waits_for_masks = params.grammar is not None and not params.matches_tokens
        self._deadline_s = deadline_s
        self._on_prepared = on_prepared
        self._tracer = tracer
        self._sequence: DraftSequence | None = None
        self._not_before_s: dict[Replica, float] = {}
        self.unavailable = ""

    def follow(self, committed: Sequence[int], begun: Proposal, plan: Plan) -> Cost:
        if not begun.token_ids:  # the next round asks
            return Cost()
        sequence = self._sequence
        if sequence is None:
            return Cost(outcome=CallOutcome.READY)
        return _continue_from(sequence, committed, begun, plan, sequence.prepared.take(committed))

    async def propose(
        self, committed: Sequence[int], plan: Plan, parent: tracing.Span
    ) -> tuple[Proposal, Cost]:
        found = self.at_hand(committed, plan, parent)
        return await self._ask(committed, plan, parent) if found is None else found

    def at_hand(
        self, committed: Sequence[int], plan: Plan, parent: tracing.Span
    ) -> tuple[Proposal, Cost] | None:
        """What a round gets without a request; None if the draft has to be asked.

        A proposal that has arrived already, from which the draft works on; or no tokens, while an earlier
        answer is late that may still arrive.
        """
        nothing = Proposal(len(committed))
        if plan.num_draft_tokens <= 0:
            return nothing, Cost()
        sequence = self._sequence
        if (
            sequence is not None and sequence.replica.num_lost != sequence.num_lost
        ):  # as another one found out
            self.unavailable = self.unavailable or sequence.replica.unavailable or "it was lost for a while"
            parent.event("draft lost", {names.SERVER_ADDRESS: sequence.replica.address})
            self.close()
            sequence = None
        replica = self._choose(committed) if sequence is None else sequence.replica
        if replica is None or replica.info is None:
            return nothing, Cost(outcome=CallOutcome.UNAVAILABLE)
        plan = _fitted(plan, replica.info, len(committed))
        if plan.num_draft_tokens <= 0:
            return nothing, Cost()
        if sequence is None:
            self._open(replica, committed)
            return None
        found = sequence.prepared.take(committed)
        if found is not None:
            proposal = plan.limit(found.proposal)
            return proposal, _continue_from(sequence, committed, proposal, plan, found)
        may_arrive = (
            sequence.error is None and 0 < sequence.late_s <= _HUNG_AFTER_WAITS * self._longest_wait_s
        )
        return (nothing, Cost()) if may_arrive else None

    def _choose(self, committed: Sequence[int]) -> Replica | None:
        """The replica to open a sequence at; None if there is none."""
        now_s = clock.stopwatch_ns() / 1e9
        avoided = {replica for replica, not_before_s in self._not_before_s.items() if now_s < not_before_s}
        replica = self._pool.choose(committed, avoided, self._opening.cache_salt)
        if replica is None:
            self.unavailable = self.unavailable or self._pool.unavailable
        return replica

    def _open(self, replica: Replica, committed: Sequence[int]) -> None:
        self._sequence = DraftSequence(
            replica,
            self._opening,
            self._deadline_s,
            waits=self._pool.waits,
            check=self._check,
            on_prepared=self._on_prepared,
        )
        self._pool.opened(replica, committed, self._opening.cache_salt)

    async def _ask(self, committed: Sequence[int], plan: Plan, parent: tracing.Span) -> tuple[Proposal, Cost]:
        """A proposal that is requested; no tokens where the draft is lost meanwhile."""
        sequence, started_ns = self._sequence, clock.stopwatch_ns()
        assert sequence is not None  # `at_hand` opens one
        address = sequence.replica.address
        try:
            if not self._tracer.enabled:
                return await self._request(sequence, committed, plan, parent.traceparent)
            with span_around(self._tracer, "draft", address, parent) as span:
                found = await self._request(sequence, committed, plan, span.traceparent)
                describe(span, *found)
            return found
        except SpecwireError as error:
            self._close_after(error, sequence.replica)
            parent.event("draft lost", {names.SERVER_ADDRESS: address, names.ERROR_TYPE: error.status})
            lost_ns = clock.stopwatch_ns() - started_ns
            cost = Cost(outcome=CallOutcome.LOST, wall_ns=lost_ns, lost_ns=lost_ns)
            return Proposal(len(committed)), cost

    def observe(self, done: Round) -> None:
        """See `generation.Drafter`; what proposals cost is learnt from each call."""

    async def _request(
        self, sequence: DraftSequence, committed: Sequence[int], plan: Plan, traceparent: str
    ) -> tuple[Proposal, Cost]:
        """Raises:
        SpecwireError: the sequence has failed, or its answer is so late that the draft counts as lost.
        """
        started_ns, replica = clock.stopwatch_ns(), sequence.replica
        assert replica.info is not None  # it was available
        plan = _fitted(plan, replica.info, len(committed))
        hung_after_s = _HUNG_AFTER_WAITS * self._longest_wait_s
        if sequence.late_s > hung_after_s:
            raise ServiceUnavailableError(f"no proposal within {hung_after_s * 1e3:.0f} ms")
        longest_s = replica.longest_s(plan.num_steps, sequence.num_prefill_tokens(committed))
        self._longest_wait_s = max(self._timeout_s, longest_s)
        patience_s = plan.patience_s
        if not replica.is_proven:  # it is sent the request, and not waited for
            patience_s = 0.0
            if self._waits_for_masks:
                plan = Plan(0)
        elif self._waits_for_masks:
            self._longest_wait_s += plan.num_steps * LONGEST_MASK_S
            patience_s = math.inf
        patience_s = min(patience_s, self._longest_wait_s)
        try:
            preparation = _preparation(replica, plan)
            found, cost = await sequence.request(
                committed, plan, preparation, timeout_s=patience_s, traceparent=traceparent
            )
        except TimeoutError:
            sequence.abandon()
            replica.is_overdue = replica.is_overdue or patience_s >= self._longest_wait_s
            if self._waits_for_masks and plan.num_draft_tokens:
                raise ServiceUnavailableError(f"no proposal within {patience_s * 1e3:.0f} ms") from None
            waited_ns = clock.stopwatch_ns() - started_ns
            cost = Cost(outcome=CallOutcome.TIMED_OUT, wall_ns=waited_ns, handling_ns=waited_ns)
            return Proposal(len(committed)), cost
        if cost.outcome is CallOutcome.ASKED:
            is_chain = not (plan.max_depth or found.leaves or found.parents)
            num_steps = len(found.token_ids) if is_chain else plan.num_steps
            replica.learn(num_steps, cost.num_prefill_tokens, cost.wall_ns, sequence.message_number)
        return plan.limit(found), cost

    # --- the end of a sequence --------------------------------------------------------------------------

    def _close_after(self, error: SpecwireError, replica: Replica) -> None:
        """Close the sequence after a failure, and note when its replica may be used again."""
        self.close()
        if isinstance(error, PrefixMismatchError):
            return  # the next round opens a sequence with all tokens
        self.unavailable = str(error)
        match error:
            case ResourceExhaustedError():  # full, not lost: sequences that are open there go on
                retry_after_ms = error.retry_after_ms or _RETRY_AFTER_MS
                self._not_before_s[replica] = clock.stopwatch_ns() / 1e9 + retry_after_ms / 1e3
            case ServiceDrainingError():  # it finishes what is open there
                replica.mark_unavailable(self.unavailable)
            case ServiceUnavailableError() | InternalError():
                replica.mark_lost(self.unavailable)
            case _:  # our own deadline, or a request that it refuses: not a replica failure
                self._not_before_s[replica] = math.inf

    def rewind(self, length: int) -> None:
        """The service is to keep no more than so many of the committed tokens."""
        if self._sequence is not None:
            self._sequence.rewind(length)

    def close(self) -> None:
        """Close the sequence; a later round opens another one."""
        if self._sequence is not None:
            self._sequence.close()
            self._pool.closed(self._sequence.replica)
        self._sequence = None


def _continue_from(
    sequence: DraftSequence, committed: Sequence[int], proposal: Proposal, plan: Plan, found: Prepared | None
) -> Cost:
    """The draft works on from a proposal that it had prepared, if the plan says so; what that cost."""
    preparation = _preparation(sequence.replica, plan)
    if preparation is not None:
        sequence.continue_from(committed, proposal, preparation)
    origin = found.origin if found is not None else ASKED
    return Cost(outcome=CallOutcome.READY, ahead_ns=origin.forward_ns, prepared_by=origin.traceparent)


def _preparation(replica: Replica, plan: Plan) -> Preparation | None:
    """What the draft prepares during the verify pass, if the plan asks for it and the replica can."""
    if not plan.num_outcomes or replica.info is None or not replica.info.prepares_outcomes:
        return None
    return Preparation(plan.num_outcomes, plan.num_draft_tokens, plan.max_depth)


def _fitted(plan: Plan, draft: ModelInfo, committed_len: int) -> Plan:
    """The plan as this draft can follow it: one chain where it has no trees, or another vocabulary; no more
    than its context holds."""
    if plan.max_depth and not draft.trees:
        plan = replace(plan, num_draft_tokens=min(plan.max_depth, plan.num_draft_tokens), max_depth=0)
    room = max(0, draft.longest_len - committed_len)
    has_several = draft.trees and not draft.target_tokenizer_fingerprint
    if plan.num_chains > 1 and (plan.num_wanted > room or not has_several):
        plan = replace(plan, num_chains=1)
    return plan if plan.num_draft_tokens <= room else replace(plan, num_draft_tokens=room)
