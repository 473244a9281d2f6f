"""Proposals that grow: from the outcome of a verdict, then from each node that is expanded.

    outcome ─▶ logits after it ─▶ candidates, nodes ─▶ logits after the best of them ─▶ ... ─▶ proposal

Where tokens are matched a proposal may be a tree that grows best first, and tokens are drawn with the noise
that the target will draw with. Under rejection sampling it is a chain of the likeliest tokens: a function of
committed tokens alone, hence a draft that is certain of them. What drafts may draw the chain instead, and say
what from. Logits stay on the target's device, which may be several ranks, and so do states that the next ones
are computed from.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, Self

import numpy as np
from torch import Tensor

from specwire.config.own_methods import OWN_METHODS
from specwire.config.services import VerifyConfig
from specwire.core import MAX_SUPPORT, SUPPORT_MASS, Proposal
from specwire.engine.batch import Feed
from specwire.engine.boot import ModelService
from specwire.engine.device import DeviceLostError, DraftQuery
from specwire.engine.drawn import Drawn
from specwire.engine.jobs import TokenSequence
from specwire.errors import SpecwireError
from specwire.proposals import tree
from specwire.proposals.growth import NUM_EXPANDED, NUM_RANKS, Calibration, TreeGrowth
from specwire.proposals.tree import TokenTree
from specwire.rule import sampling
from specwire.rule.choices import SHARPNESS, likeliest
from specwire.rule.columns import GREEDY, GUMBEL, MATCHED, Row, Rows
from specwire.rule.rows import draw_supported
from specwire.rule.transfer import to_host
from specwire.support import Support, certain
from verify_service.own import Noise, OwnDrafts
from verify_service.verifier import VerifyJob

log = logging.getLogger(__name__)

_BEFORE_LAST = -2
"""What lies before the last committed token, as a parent of the prefix, which is -1."""


@dataclass(slots=True, eq=False)
class Growing:
    """One sequence's proposal while it grows.

    Attributes:
        committed: its tokens, those of the outcome included.
        num_ranked: candidates at each node; 1 for a chain.
        rows: of nodes that were run, the places among all of them; of `_BEFORE_LAST`, the row of the verdict
            after it.
        is_drawn: a chain of tokens that are drawn, instead of the likeliest ones.
        open: nodes to expand next.
        supports: that tokens were drawn from.
        fed: the nodes that were run so far, in the order of their expansion; None for a chain.
    """

    sequence: TokenSequence
    committed: list[int]
    growth: TreeGrowth
    num_ranked: int
    rows: dict[int, int]
    is_drawn: bool = False
    open: list[int] = field(default_factory=lambda: [-1])
    supports: list[Support] = field(default_factory=list)
    fed: TokenTree | None = None

    def run(self, nodes: Sequence[int]) -> None:
        """These are run next; of a tree, the pass is to know where they lie."""
        if self.num_ranked > 1 and nodes[0] >= 0:
            self.fed = self.growth.extended(self.fed or TokenTree(len(self.committed), ()), nodes)

    def add(self, node: int, found: Drawn, row: int) -> None:
        """What was drawn after a node, or the likeliest tokens there, are its children."""
        if self.is_drawn:
            support = found.supports[row]
            assert support is not None
            self.supports.append(support)
            self.growth.add(node, [max(0, found.token_ids[row])], [1.0])
        else:
            num = self.num_ranked
            self.growth.add(node, found.ranked[row][:num], found.shares[row][:num])


class Node(NamedTuple):
    """An open node of one of the sequences."""

    of: Growing
    node: int

    @property
    def depth(self) -> int:
        """Draft tokens up to the node, its own included; 0 for the prefix."""
        return self.of.growth.depth_after(self.node)

    @property
    def parent(self) -> int:
        return self.of.growth.parents[self.node] if self.node >= 0 else _BEFORE_LAST

    @property
    def token_id(self) -> int:
        """Its own; of the prefix, the last one."""
        return self.of.growth.token_ids[self.node] if self.node >= 0 else self.of.committed[-1]

    def sampled(self) -> Row:
        """How the token after it is sampled."""
        sequence, committed = self.of.sequence, self.of.committed
        is_read = sequence.params.needs_history or sequence.grammar is not None
        history = [*committed, *self.of.growth.path_to(self.node)] if is_read else ()
        return sequence.row(history, len(committed) + self.depth, len(committed))


class GrowthQuestion(NamedTuple):
    """What is wanted after the nodes of a pass; a rank may be asked.

    Attributes:
        groups: of nodes that lie together, how the tokens after them are sampled, and how many of the
            likeliest to find after each; 0 to draw one.
    """

    groups: Sequence[tuple[Rows, int]]
    noise: Noise
    sharpness: float


def choose(question: GrowthQuestion, logits: Tensor) -> list[Drawn]:
    """As a `device.Decide`: of each group, what is drawn after nodes, or the likeliest tokens there."""
    answer, start = [], 0
    for rows, num_ranked in question.groups:
        some = logits[start : start + len(rows.encoded)]
        start += len(some)
        log_probs = sampling.apply_warps(sampling.apply_history(some, rows), rows)
        if num_ranked:
            scores = question.noise.added(log_probs, rows)
            ids, *others = to_host(*likeliest(scores, most=num_ranked, sharpness=question.sharpness))
            answer.append(Drawn.matched(ids[:, 0], ids, *others))
        else:
            *drawn, _ = draw_supported(log_probs, rows, SUPPORT_MASS, MAX_SUPPORT)
            answer.append(Drawn.supported(*to_host(*drawn)))
    return answer


class GrownDrafts(OwnDrafts):
    """Proposals for all sequences of a step at once."""

    sharpness = SHARPNESS
    draws = False
    """Whether tokens are drawn where they are not matched."""
    support_len = 0
    """Entries that supports of drawn tokens are padded to, so that their size does not depend on tokens."""

    def __init__(self, runner: Any, *, may_be_tree: bool) -> None:
        self._runner = runner
        self._may_be_tree = may_be_tree
        self._calibrations = {kind: Calibration() for kind in (0, GREEDY, GUMBEL)}
        self._grown: dict[TokenSequence, Growing] = {}

    @classmethod
    def load(cls, config: VerifyConfig, service: ModelService) -> Self:
        """Of a loaded target, whose runner has it."""
        has_trees = service.info.trees and OWN_METHODS[config.own.source].has_trees
        return cls(service.runner, may_be_tree=has_trees)

    def propose(self, jobs: Sequence[VerifyJob]) -> None:
        """See `OwnDrafts`. Where there is no room, with the tokens that there was room for."""
        self.num_passes = self.num_nodes = self.num_hosted = self.prefill_ns = 0
        self._grown = {sequence: grown for sequence, grown in self._grown.items() if not sequence.closed}
        try:
            growing = [found for job in jobs if (found := self.begin(job)) is not None]
            try:
                if growing:
                    self.grow(growing)
            except (SpecwireError, DeviceLostError) as error:  # the next pass finds a device lost, too
                log.debug("no more is drafted: %s", error)
            for job in jobs:
                job.drafted = self._proposal(job.sequence)
        except Exception:
            log.exception("drafting failed")

    def begin(self, job: VerifyJob) -> Growing | None:
        """Apply the rule, learn from the outcome, and begin what follows it; None if nothing is to."""
        sequence, base_len, row = job.sequence, job.committed_len, job.first_row
        kind = sequence.encoded.traits & MATCHED
        emitted = job.judge()
        before = self._grown.pop(sequence, None)
        if before is not None and len(before.committed) == base_len:
            before.growth.learn(emitted)
        committed = [*sequence.tokens[:base_len], *emitted]
        depth = job.draft_depth(len(committed))
        if not depth:
            return None
        is_tree = self._may_be_tree and bool(kind) and job.wanted.max_depth > 0
        size = job.wanted.num_draft_tokens if is_tree else depth
        growth = TreeGrowth(size, depth, self._calibrations[kind])
        if job.outcome is not None and job.outcome.path:
            row += job.outcome.path[-1] + 1  # whose state the outcome goes on from
        num_ranked = NUM_RANKS if is_tree else 1
        # The masks of a grammar may fail, or be late, for one token and not for another: none is drawn then.
        is_drawn = self.draws and not kind and sequence.grammar is None
        found = self._grown[sequence] = Growing(
            sequence, committed, growth, num_ranked, {_BEFORE_LAST: row}, is_drawn
        )
        return found

    def grow(self, growing: list[Growing]) -> None:
        """Expand open nodes, of all sequences together, until there are none."""
        noise = Noise((each.sequence, len(each.committed), each.growth.max_depth) for each in growing)
        growing = sorted(growing, key=attrgetter("is_drawn"))
        while growing:
            nodes = [Node(each, node) for each in growing for node in each.open]
            question = self._question(nodes, noise)
            answer = self.chosen_after(nodes, question)
            self.num_passes, self.num_nodes = self.num_passes + 1, self.num_nodes + len(nodes)
            found = ((drawn, row) for drawn in answer for row in range(len(drawn.token_ids)))
            for (of, node), (drawn, row) in zip(nodes, found, strict=True):
                of.add(node, drawn, row)
            for each in growing:
                each.open = self.open_after(each)
            growing = [each for each in growing if each.open]

    def chosen_after(self, nodes: Sequence[Node], question: GrowthQuestion) -> list[Drawn]:
        """What `choose` answers of the logits after nodes.

        Args:
            nodes: of one sequence after another, all that begin together or none that does.
        """
        rows = [node.of.rows[node.parent] for node in nodes]
        for row, (of, node) in enumerate(nodes, self.num_nodes):
            of.rows[node] = row
        columns = rows, [node.token_id for node in nodes], [node.depth for node in nodes]
        query = DraftQuery(nodes[0].node < 0, *(np.array(column, np.int64) for column in columns))
        found: list[Drawn] = self._runner.run_draft(self.feeds(nodes), query, question, choose)
        return found

    def feeds(self, nodes: Sequence[Node]) -> Sequence[Feed]:
        """What the pass after nodes appends to the pages of the sequences; none where it needs none."""
        return ()

    def open_after(self, growing: Growing) -> list[int]:
        """The nodes to expand next; none where a proposal is done."""
        return growing.growth.expand(NUM_EXPANDED)

    def _question(self, nodes: Sequence[Node], noise: Noise) -> GrowthQuestion:
        groups = []
        for is_drawn, alike in groupby(nodes, key=attrgetter("of.is_drawn")):
            some = [*alike]
            most = 0 if is_drawn else max(node.of.num_ranked for node in some)
            groups.append((Rows.of([node.sampled() for node in some]), most))
        return GrowthQuestion(groups, noise, self.sharpness)

    def _proposal(self, sequence: TokenSequence) -> Proposal | None:
        grown = self._grown.get(sequence)
        if grown is None or not grown.growth.num_nodes:
            return None
        found = grown.growth.proposal(len(grown.committed))
        found = replace(found, parents=tree.checked_parents(found.parents, len(found.token_ids)))
        if grown.supports:
            return replace(found, supports=grown.supports, support_len=self.support_len)
        is_matched = sequence.encoded.traits & MATCHED
        return found if is_matched else replace(found, supports=certain(found.token_ids))
