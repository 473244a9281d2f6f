"""Proposals for an engine that judges them itself: all rows of a step at once, for a caller that blocks.

    the engine's thread              an event loop on a thread of its own
    propose(rows) ── one call ─▶  each row's sequence by its tokens ─▶ its plan ─▶ at hand, or asked for
                  ◀─ chains ────  those that are asked for are waited for together, while that pays

A proposal is a chain of the draft's most likely tokens. An engine that takes no draft probabilities accepts a
token x with the target's probability of x, whoever proposed it: the output is exact, and the likeliest token
is the best.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy.typing as npt

from coordinator.cost import CallOutcome, Cost
from coordinator.generation import Plan, Planner, Round
from coordinator.length.choice import SharedChoice
from coordinator.length.planners import AdaptiveLength, FixedLength
from coordinator.length.ways import MAX_CHOSEN
from coordinator.peers.drafter import RemoteDrafter
from coordinator.peers.handshake import DraftPool
from specwire import clock
from specwire.config.services import CoordinatorConfig
from specwire.core import Load, ModelInfo, Outcome, Proposal, Rule, SamplingParams, Verdict
from specwire.errors import ServiceUnavailableError, SpecwireError
from specwire.proposals.estimate.costs import CostModel
from specwire.telemetry import tracing

log = logging.getLogger(__name__)

_UNSEEN_STEPS = 16
"""Steps without a row of a sequence after which it counts as ended; of one that was only put off, the draft
runs the tokens again."""
_IDLE_S = 5.0
"""Seconds without a step after which all sequences have ended."""
_GREEDY = SamplingParams(temperature=0.0, seed=0, rule=Rule.GUMBEL)
_NO_VERDICT = Verdict(0, ())


class StepRow(NamedTuple):
    """A sequence in a step of the engine.

    Attributes:
        token_ids: [at least num_tokens] int32, its tokens so far in front.
        num_tokens: how many these are.
        num_new: of these, added by the step: draft tokens that were accepted, and the target's own.
    """

    token_ids: npt.NDArray[Any]
    num_tokens: int
    num_new: int


@dataclass
class Counts:
    """What became of proposals.

    Attributes:
        outcomes: of those that were wanted.
        waited_ns: that steps were held up.
    """

    outcomes: Counter[CallOutcome] = field(default_factory=Counter)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    waited_ns: int = 0


@dataclass(eq=False)
class _Sequence:
    """A row over several steps.

    Attributes:
        ending: what is released at its end.
        known: the bytes of `committed`, by which its next row is recognised.
        proposal, cost: the latest, which the engine judges now.
        seen_in: the number of its last step.
        begun_ns: when that step's proposals were asked for.
    """

    planner: Planner
    drafter: RemoteDrafter
    span: tracing.Span
    ending: contextlib.ExitStack
    committed: list[int] = field(default_factory=list)
    known: bytes = b""
    proposal: Proposal = field(default_factory=lambda: Proposal(0))
    cost: Cost = field(default_factory=Cost)
    seen_in: int = 0
    begun_ns: int = 0

    def judged(self, token_ids: Sequence[int], step_cost: Cost) -> Round:
        """The round that the engine has ended."""
        num_accepted = min(len(token_ids) - 1, len(self.proposal.token_ids))
        outcome = Outcome(range(num_accepted), token_ids[-1])
        return Round(self.proposal, _NO_VERDICT, outcome, self.cost, step_cost)


class BatchDrafter:
    """Draft services for the rows of an engine's steps. They may fail, and then there are no proposals."""

    def __init__(self, config: CoordinatorConfig, target: ModelInfo, most: int) -> None:
        """Connect.

        Args:
            config: of which addresses, credentials, times and numbers of the draft are used.
            target: the engine's model, as it would describe itself in a handshake.
            most: draft tokens of a row that the engine takes.

        Raises:
            HandshakeError: a draft is incompatible with the target.
            ServiceUnavailableError: none answers.
            ConfigError: a credential cannot be used.
        """
        self._counts = Counts()
        self._config, self._target, self._most = config, target, most
        self._tracer = tracing.configure("specwire-batches")
        self._rows: list[_Sequence | None] = []
        self._sequences: list[_Sequence] = []
        self._costs = CostModel(2)  # of a step, by sequences and tokens
        self._num_steps = self._ended_ns = self._num_running = 0
        self._may_prepare = True
        self._choice = SharedChoice(
            lambda: self._num_running,
            num_outcomes=config.fixed_outcomes,
            may_prepare=lambda: self._may_prepare,
        )
        self._loop = asyncio.new_event_loop()
        self._idle: asyncio.TimerHandle | None = None
        self._turn = threading.Lock()  # a step is not ended within
        self._thread = threading.Thread(target=self._serve, name="specwire", daemon=True)
        self._thread.start()
        try:
            self._pool = self._run(self._connected())
        except BaseException:
            self._end_thread()
            raise

    def _serve(self) -> None:
        """Tasks that are left in the end are cancelled, and the loop is closed."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _connected(self) -> DraftPool:
        pool = DraftPool(self._config, self._target)
        try:
            await pool.connect()
            if pool.unavailable:
                raise ServiceUnavailableError(pool.unavailable)
        except SpecwireError:
            await pool.close()
            raise
        return pool

    def propose(self, rows: Sequence[StepRow | None]) -> list[list[int]]:
        """[num_rows] draft tokens to judge in the next step; of None, and where none are worth it, no tokens.

        Blocks no longer than proposals are worth. What fails is logged, and costs proposals only; so
        does a step after the end.
        """
        with self._turn:
            if not self._thread.is_alive():
                return [[] for _ in rows]
            try:
                found: Future[list[list[int]]] = Future()
                asyncio.run_coroutine_threadsafe(self._propose(rows, clock.stopwatch_ns(), found), self._loop)
                return found.result()
            except Exception:
                log.exception("no proposals in this step")
                return [[] for _ in rows]

    def take_counts(self) -> Counts:
        """What became of proposals since the last time; between steps."""
        counts, self._counts = self._counts, Counts()
        return counts

    def close(self) -> None:
        """Close all sequences and connections, and end the thread, after a step that runs; once closed, do
        nothing."""
        with self._turn:
            if self._thread.is_alive():
                self._run(self._close())
                self._end_thread()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _close(self) -> None:
        self._end_all()
        await self._pool.close()
        self._tracer.shutdown()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        if running:  # gRPC's own, which end with its calls
            await asyncio.wait(running, timeout=1.0)

    # --- a step -------------------------------------------------------------------------------------

    async def _propose(self, rows: Sequence[StepRow | None], now_ns: int, found: Future[Any]) -> None:
        """All sequences end some time after the last step: the engine says of none that it has ended."""
        if self._idle is not None:
            self._idle.cancel()  # or it would end sequences whose proposals are waited for
        try:
            found.set_result(await self._step(rows, now_ns))
        except BaseException as error:
            found.set_exception(error)
        # The engine's thread goes on first: sending keeps the interpreter's lock for 13 us a row.
        time.sleep(1e-4)  # noqa: ASYNC251
        self._idle = self._loop.call_later(_IDLE_S, self._end_all)

    async def _step(self, rows: Sequence[StepRow | None], now_ns: int) -> list[list[int]]:
        """Learn from the step that has ended, and find proposals for the next one."""
        self._num_steps += 1
        self._rows = self._found(rows)
        running = [sequence for sequence in self._rows if sequence is not None]
        self._num_running, draft = len(running), self._pool.info
        is_fixed = self._config.fixed_outcomes is not None
        self._may_prepare = is_fixed or draft is None or not draft.takes_turns_with(self._target)
        self._learn(rows, now_ns)
        asked: list[tuple[_Sequence, Plan]] = []
        for sequence in running:
            num_tokens = len(sequence.committed)
            room = self._target.context_len - num_tokens - 1
            plan = sequence.planner.plan().within(min(self._most, room), room)
            sequence.begun_ns = now_ns
            found = sequence.drafter.at_hand(sequence.committed, plan, sequence.span)
            if found is None:
                sequence.proposal, sequence.cost = Proposal(num_tokens), Cost()
                asked.append((sequence, plan))
            else:
                sequence.proposal, sequence.cost = found
        if asked:
            # All rows wait for those that are asked for, so that what these would bring is shared by all.
            share = sum(plan.patience_s for _, plan in asked) / len(running)
            await asyncio.gather(*(self._ask(*each, share) for each in asked))
        self._count(running)
        self._end([each for each in self._sequences if each.seen_in <= self._num_steps - _UNSEEN_STEPS])
        self._ended_ns = clock.stopwatch_ns()
        return [list(each.proposal.token_ids) if each is not None else [] for each in self._rows]

    async def _ask(self, sequence: _Sequence, plan: Plan, patience_s: float) -> None:
        propose, plan = sequence.drafter.propose, replace(plan, patience_s=min(plan.patience_s, patience_s))
        sequence.proposal, sequence.cost = await propose(sequence.committed, plan, sequence.span)

    def _count(self, running: Iterable[_Sequence]) -> None:
        counts = self._counts
        counts.waited_ns += max((each.cost.wall_ns for each in running), default=0)
        for sequence in running:
            counts.num_draft_tokens += len(sequence.proposal.token_ids)
            if sequence.cost.outcome is not None:
                counts.outcomes[sequence.cost.outcome] += 1

    def _learn(self, rows: Sequence[StepRow | None], now_ns: int) -> None:
        """From the step that has ended: what it cost, and what of each proposal was accepted."""
        step_ns = max(1, now_ns - self._ended_ns)
        load = self._load(len(rows), step_ns)
        step_cost = Cost(CallOutcome.READY, step_ns, forward_ns=step_ns, load=load)
        for row, sequence in zip(rows, self._rows, strict=True):
            if row is None or sequence is None:
                continue
            token_ids = row.token_ids[len(sequence.committed) : row.num_tokens].tolist()
            if sequence.committed and token_ids:
                done = sequence.judged(token_ids, step_cost)
                self._counts.num_accepted_tokens += done.outcome.num_accepted
                sequence.planner.observe(done, now_ns - sequence.begun_ns)
            sequence.committed += token_ids
            sequence.known = row.token_ids[: row.num_tokens].tobytes()

    def _load(self, num_rows: int, step_ns: int) -> Load:
        """What steps cost, as a verify service says it of passes."""
        judged = [each for each in self._rows if each is not None and each.committed]
        size = len(judged), sum(1 + len(each.proposal.token_ids) for each in judged)
        has_prompts = len(judged) < num_rows
        if judged and not has_prompts:
            self._costs.add(size, step_ns)
        sequence_ns, token_ns = self._costs.rates
        return Load(
            num_sequences=max(1, len(judged)),
            base_ns=int(self._costs.known_base),
            sequence_ns=int(sequence_ns),
            token_ns=int(token_ns),
            prefill_ns=max(0, step_ns - int(self._costs.predict(size))) if has_prompts else 0,
        )

    # --- sequences ----------------------------------------------------------------------------------

    def _found(self, rows: Sequence[StepRow | None]) -> list[_Sequence | None]:
        """The sequence that had all of a row's tokens but the new ones, mostly at its place; or another."""
        found: list[_Sequence | None] = []
        now = self._num_steps
        for row, likely in zip(rows, chain(self._rows, repeat(None)), strict=False):
            sequence = None
            if row is not None:
                known, sequence = row.token_ids[: row.num_tokens - row.num_new].tobytes(), likely
                if sequence is None or sequence.known != known or sequence.seen_in == now:
                    left = (each for each in self._sequences if each.known == known and each.seen_in != now)
                    sequence = next(left, None) or self._opened(row)
                sequence.seen_in = now
            found.append(sequence)
        return found

    def _opened(self, row: StepRow) -> _Sequence:
        fixed, most = self._config.fixed_draft_tokens, min(self._most, MAX_CHOSEN)
        planner: Planner = AdaptiveLength(self._choice, most=most)
        if fixed is not None:
            planner = FixedLength(min(fixed, self._most), self._choice)
        ending = contextlib.ExitStack()
        span = ending.enter_context(self._tracer.span("drafted"))
        drafter = RemoteDrafter(
            self._pool,
            _GREEDY,
            row.num_tokens,
            self._target.vocab_size,
            timeout_s=self._config.draft_timeout_ms / 1e3,
            deadline_s=None,
            tracer=self._tracer,
            parent=span,
        )
        ending.callback(drafter.close)
        sequence = _Sequence(planner, drafter, span, ending)
        self._sequences.append(sequence)
        return sequence

    def _end(self, sequences: Iterable[_Sequence]) -> None:
        for sequence in list(sequences):
            sequence.ending.close()
            self._sequences.remove(sequence)

    def _end_all(self) -> None:
        self._end(self._sequences)
        self._rows = []
