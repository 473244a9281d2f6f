"""The loop of a beam search: draft after the live beams, run them in one pass, step as far as that goes.

    live beams ─▶ drafts after each ─▶ trees ─▶ the target's log probabilities after each node ─▶ steps

A step needs what may follow each live beam. The first one of a round always has it; a further one has it
where all beams that the step before chose were draft tokens. So drafts change how many passes a search takes,
and never its result. Knows no grpc, no text, and no clock but a stopwatch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.beams.followers import BeamDrafts, Followers, together
from coordinator.beams.planning import BeamPlanner, Size
from coordinator.beams.trees import BeamTree, packed, proposal_of
from coordinator.cost import Cost
from coordinator.generation import Plan, Round, Turns
from coordinator.ledger import Ledger
from coordinator.peers.verifier import RemoteVerifier
from coordinator.requests import GenerationRequest
from specwire import clock
from specwire.completion import Stage
from specwire.core import MAX_TREE_NODES, NO_TOKEN, Logprobs, Outcome, Verdict
from specwire.errors import InternalError, ServiceUnavailableError
from specwire.rule.beam_search import Beam, BeamSearch, Scored
from specwire.telemetry import tracing

_MAX_LIVE_NODES = 24
"""Of a tree, without draft tokens. Beams that are further apart than that are run below prefixes of their
own, which are in the target's cache. There is room for draft tokens, too."""


@dataclass(kw_only=True)
class BeamGeneration:
    """One search.

    Attributes:
        targets: one for each beam; as many are used as live beams are run in trees.
    """

    request: GenerationRequest
    drafts: BeamDrafts
    targets: Followers[RemoteVerifier]
    planner: BeamPlanner
    ledger: Ledger
    tracer: tracing.Tracing
    parent: tracing.Span
    turns: Turns

    def __post_init__(self) -> None:
        assert self.request.beam_rules is not None
        self._prompt_len = self.request.prompt_len
        self._rules = self.request.beam_rules
        self._search = BeamSearch(self._rules)
        self._longest_len = self.request.target.longest_len

    @property
    def finished(self) -> Sequence[Scored]:
        """The texts found, best score first, once the rounds have ended."""
        return self._search.finished

    async def rounds(self) -> AsyncGenerator[Round, None]:
        """Rounds until the search has ended.

        The outcome of each has the steps that took no pass, as accepted draft tokens.
        """
        while not self._search.ended:
            if not self.turns.may_start:
                await self.turns.wait()
            started_ns = clock.stopwatch_ns()
            with self.tracer.span("round", parent=self.parent.context) as span:
                done = await self._round(span if self.tracer.enabled else self.parent)
            yield done
            elapsed_ns = self.ledger.switch(Stage.COORDINATOR) - started_ns
            self.planner.observe(done, elapsed_ns)

    async def _round(self, parent: tracing.Span) -> Round:
        trees = packed([each.beam for each in self._search.live], self._most_nodes())
        plan, draft_cost = await self._draft(trees, parent)
        verdicts, verify_cost = await self._verify(trees, parent)
        rows: dict[Beam, Logprobs] = {}
        for tree, verdict in zip(trees, verdicts, strict=True):
            each = zip([tree.prefix, *tree.nodes], verdict.target_token_ids, verdict.logprobs, strict=True)
            rows |= {beam: found for beam, token_id, found in each if token_id != NO_TOKEN}
        num_steps = self._step(rows, trees)
        if not num_steps:
            raise InternalError("the target's logits are not finite")
        outcome = Outcome(range(num_steps - 1), -1)
        drafted = [node for tree in trees for node in tree.nodes[tree.num_live_nodes :]]
        proposal = proposal_of(drafted, verdicts[0].base_len)  # for counts
        return Round(proposal, verdicts[0], outcome, draft_cost, verify_cost, plan.why_plain)

    def _most_nodes(self) -> int:
        """Of a tree with live beams: all of its tokens have to fit into the context."""
        if not self.request.target.trees:
            return 0
        longest = self._prompt_len + max(each.beam.length for each in self._search.live)
        return max(0, min(_MAX_LIVE_NODES, self._longest_len - longest))

    async def _draft(self, trees: Sequence[BeamTree], parent: tracing.Span) -> tuple[Plan, Cost]:
        beams = [beam for tree in trees for beam in tree.beams]
        length = beams[0].length
        size = Size(
            num_beams=len(beams),
            num_trees=len(trees),
            num_nodes=sum(tree.num_live_nodes for tree in trees),
            length=self._prompt_len + length,
            num_left=self._rules.max_tokens - length,
        )
        room = self._longest_len - self._prompt_len
        rooms = [min(MAX_TREE_NODES, room - tree.prefix.length) for tree in trees]  # draft tokens included
        each = zip(trees, rooms, strict=True)
        room = min((room - tree.num_live_nodes) // len(tree.beams) for tree, room in each)
        plan = self.planner.plan(size, room)
        self.ledger.switch(Stage.DRAFT)
        proposals, cost = await self.drafts.propose(beams, plan, parent)
        self.ledger.settle(cost, Stage.VERIFY)
        of_beam = dict(zip(beams, proposals, strict=True))
        for tree, room in zip(trees, rooms, strict=True):
            for beam in tree.beams:
                tree.add(beam, of_beam[beam], room)
        return plan, cost

    async def _verify(self, trees: Sequence[BeamTree], parent: tracing.Span) -> tuple[list[Verdict], Cost]:
        """The verdicts on all trees, which the target runs in one pass if it can; the cost of the slowest."""
        self.ledger.switch(Stage.VERIFY)
        taken: set[int] = set()
        calls = []
        for tree in trees:
            target, committed = self.targets.moved_to(tree.prefix, taken)
            calls.append(target.verify(committed, proposal_of(tree.nodes, len(committed)), parent))
        try:
            answers = await together(calls)
        except ServiceUnavailableError:
            self.ledger.fail()
            raise
        cost = max((cost for _, cost in answers), key=lambda cost: cost.wall_ns)
        cost.num_cached_tokens = sum(cost.num_cached_tokens for _, cost in answers)
        self.ledger.settle(cost, Stage.RULE)
        return [verdict for verdict, _ in answers], cost

    def _step(self, rows: Mapping[Beam, Logprobs], trees: Sequence[BeamTree]) -> int:
        """Step as far as the rows go; returns the number of steps, none if a live beam has no row."""
        drafted = {place: node for tree in trees for place, node in tree.drafted.items()}

        def extend(beam: Beam, token_id: int) -> Beam:
            return drafted.get((beam, token_id)) or Beam(beam, token_id)

        num_steps = 0
        while not self._search.ended and all(each.beam in rows for each in self._search.live):
            self._search.step(rows, extend)
            num_steps += 1
        return num_steps
