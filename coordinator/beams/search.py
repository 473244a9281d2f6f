"""The loop of a beam search: draft after the live beams, run them in one pass, step as far as that goes.

    live beams ─▶ drafts after each ─▶ trees ─▶ the target's log probabilities after each node ─▶ steps

A step needs what may follow each live beam. The first one of a round always has it; a further one has it
where all beams that the step before chose were draft tokens. So drafts change how many passes a search takes,
and never its result. Knows no grpc, no text, and no clock but a stopwatch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from coordinator.beams.drafting import BeamDrafts, BeamPlanner
from coordinator.beams.trees import BeamTree, common_ancestor, packed
from coordinator.cost import Cost
from coordinator.generation import Round, Turns
from coordinator.ledger import Ledger
from coordinator.requests import GenerationRequest
from specwire.completion import Stage
from specwire.core import MAX_TREE_NODES, Logprobs, Outcome, Proposal, Verdict
from specwire.errors import ServiceUnavailableError
from specwire.estimate import clock
from specwire.rule.beam_search import Beam, BeamSearch, Scored
from specwire.telemetry import tracing


class Target(Protocol):
    """The target's side, such as `peers.verifier.RemoteVerifier`."""

    async def verify(
        self, committed: Sequence[int], proposal: Proposal, parent: tracing.Span
    ) -> tuple[Verdict, Cost]:
        """The target's log probabilities after the committed tokens and after each node."""
        ...

    def rewind(self, length: int) -> None:
        """What was committed from there on is not any more."""
        ...


class BeamGeneration:
    """One search.

    Attributes:
        finished: the texts found, best score first, once the rounds have ended.
    """

    def __init__(
        self,
        request: GenerationRequest,
        drafts: BeamDrafts,
        target: Target,
        *,
        planner: BeamPlanner,
        ledger: Ledger,
        tracer: tracing.Tracing,
        parent: tracing.Span,
        turns: Turns,
    ) -> None:
        assert request.beam_rules is not None
        self._prompt = list(request.prompt_token_ids)
        self._rules = request.beam_rules
        self._search = BeamSearch(request.beam_rules)
        self._has_trees = request.target.trees
        self._longest_len = request.target.longest_len
        self._drafts, self._target = drafts, target
        self._planner = planner
        self._ledger = ledger
        self._tracer = tracer
        self._parent = parent
        self._turns = turns
        self._held: Beam | None = None  # what the target was last asked about

    @property
    def finished(self) -> Sequence[Scored]:
        """See the class."""
        return self._search.finished

    async def rounds(self) -> AsyncGenerator[list[Round], None]:
        """The passes of each round, until the search has ended."""
        while not self._search.ended:
            if not self._turns.may_start:
                await self._turns.wait()
            started_ns = clock.stopwatch_ns()
            with self._tracer.span("round", parent=self._parent.context) as span:
                passes, num_steps = await self._round(span if self._tracer.enabled else self._parent)
            yield passes
            self._planner.observe(num_steps, self._ledger.switch(Stage.COORDINATOR) - started_ns)

    async def _round(self, parent: tracing.Span) -> tuple[list[Round], int]:
        trees = packed([each.beam for each in self._search.live], self._most_nodes())
        draft_cost = await self._draft(trees, parent)
        rows: dict[Beam, Logprobs] = {}
        judged: list[tuple[BeamTree, Verdict, Cost]] = []
        for tree in trees:
            verdict, cost = await self._verify(tree, parent)
            rows |= zip([tree.prefix, *tree.nodes], verdict.logprobs, strict=True)
            judged.append((tree, verdict, cost))
        num_steps = self._step(rows, trees)
        return self._passes(judged, num_steps, draft_cost), num_steps

    def _most_nodes(self) -> int:
        """Of a tree with live beams: all of its tokens have to fit into the context."""
        if not self._has_trees:
            return 0
        longest = len(self._prompt) + max(each.beam.length for each in self._search.live)
        return max(0, min(MAX_TREE_NODES, self._longest_len - longest))

    async def _draft(self, trees: Sequence[BeamTree], parent: tracing.Span) -> Cost:
        beams = [beam for tree in trees for beam in tree.beams]
        length = beams[0].length
        rooms = [self._room(tree) for tree in trees]
        room = min(
            (room - tree.num_live_nodes) // len(tree.beams) for tree, room in zip(trees, rooms, strict=True)
        )
        plan = self._planner.plan(len(beams), self._rules.max_tokens - length - 1, room * len(beams))
        self._ledger.switch(Stage.DRAFT)
        proposals, cost = await self._drafts.propose(beams, plan, parent)
        self._ledger.settle(cost, Stage.VERIFY)
        of_beam = dict(zip(beams, proposals, strict=True))
        for tree, room in zip(trees, rooms, strict=True):
            for beam in tree.beams:
                tree.add(beam, of_beam[beam], room)
        return cost

    def _room(self, tree: BeamTree) -> int:
        """Most nodes of a tree, draft tokens included."""
        return min(MAX_TREE_NODES, self._longest_len - len(self._prompt) - tree.prefix.length)

    async def _verify(self, tree: BeamTree, parent: tracing.Span) -> tuple[Verdict, Cost]:
        committed = [*self._prompt, *tree.prefix.tokens()]
        if self._held is not None:
            self._target.rewind(len(self._prompt) + common_ancestor(self._held, tree.prefix).length)
        self._held = tree.prefix
        self._ledger.switch(Stage.VERIFY)
        try:
            verdict, cost = await self._target.verify(committed, tree.proposal(len(committed)), parent)
        except ServiceUnavailableError:
            self._ledger.fail()
            raise
        self._ledger.settle(cost, Stage.RULE)
        return verdict, cost

    def _step(self, rows: Mapping[Beam, Logprobs], trees: Sequence[BeamTree]) -> int:
        """Step as far as the rows go; returns the number of steps, at least one."""

        def extend(beam: Beam, token_id: int) -> Beam:
            found = (tree.extended(beam, token_id) for tree in trees)
            return next(filter(None, found), None) or Beam(beam, token_id)

        num_steps = 0
        while not self._search.ended and all(each.beam in rows for each in self._search.live):
            self._search.step(rows, extend)
            num_steps += 1
        return num_steps

    def _passes(
        self, judged: Sequence[tuple[BeamTree, Verdict, Cost]], num_steps: int, draft_cost: Cost
    ) -> list[Round]:
        """As rounds that are counted; steps after the first are the last one's accepted draft tokens."""
        found = []
        for i, (tree, verdict, cost) in enumerate(judged):
            drafts = tree.drafts(verdict.base_len)
            is_last = i == len(judged) - 1
            num_accepted = min(num_steps - 1, len(drafts.token_ids)) if is_last else 0
            outcome = Outcome(range(num_accepted), -1)
            found.append(Round(drafts, verdict, outcome, draft_cost if is_last else Cost(), cost))
        return found
