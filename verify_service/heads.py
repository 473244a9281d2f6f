"""What a target proposes by itself after its own verdicts, with its heads (`specwire.engine.heads`).

    verdict ─▶ rule ─▶ outcome ─▶ state of the last accepted token, next token ─▶ heads ─▶ proposal

On the engine thread, right after a pass. The coordinator comes to the same outcome or drops the proposal.
Where tokens are matched a proposal may be a tree that grows best first, and heads draw with the noise that
the target will draw with. Under rejection sampling it is a chain of their likeliest tokens: a function of
committed tokens alone, hence a draft that is certain of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from specwire import tree
from specwire.core import Outcome, Proposal, Verdict, certain
from specwire.engine.heads.model import Heads
from specwire.engine.jobs import TokenSequence
from specwire.estimate.calibration import NUM_RANKS, Calibration
from specwire.estimate.growth import TreeGrowth
from specwire.rule import acceptance, random, sampling
from specwire.rule.columns import GREEDY, GUMBEL, MATCHED, Row, Rows
from specwire.rule.transfer import to_device, to_host

log = logging.getLogger(__name__)

_SHARPNESS = 2.0
"""Of the softmax that turns scores into shares, as for a draft model; the calibration corrects it."""
_NUM_EXPANDED = 8
"""Most nodes of a tree that a step of the heads expands."""
_MOST_NOISE = 1 << 24
"""Numbers that are computed at once; 12 bytes each, for a moment."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a sequence's coordinator wants to be proposed after a verdict.

    Attributes:
        num_draft_tokens: none if 0.
        max_depth: longest path of a tree; 0 for a chain.
    """

    num_draft_tokens: int = 0
    max_depth: int = 0


NOTHING = Wanted()


@dataclass(slots=True, eq=False)
class Drafting:
    """What to propose after a job's verdict, and what was proposed.

    Attributes:
        judged: the proposal of the verdict, with what the rule needs.
        end_len: most tokens that the sequence may come to.
        outcome: of the verdict, by the same rule as the coordinator's; set with `proposal`.
        proposal: after the outcome; None if there is none.
    """

    judged: Proposal
    wanted: Wanted
    end_len: int
    outcome: Outcome | None = None
    proposal: Proposal | None = None

    def growth(self, committed_len: int, calibration: Calibration, *, is_tree: bool) -> TreeGrowth | None:
        """What is proposed after so many committed tokens; None if nothing is, or there is no room."""
        wanted, room = self.wanted, self.end_len - committed_len - 1  # the last token is the target's own
        depth = min(wanted.max_depth or wanted.num_draft_tokens, wanted.num_draft_tokens, room)
        if depth <= 0:
            return None
        return TreeGrowth(wanted.num_draft_tokens if is_tree else depth, depth, calibration)


@dataclass(slots=True, eq=False)
class Growing:
    """One sequence's proposal while it grows.

    Attributes:
        committed: its tokens, those of the outcome included.
        num_ranked: candidates at each node.
        rows: by node that was expanded, the row of the state after it; -1 is the prefix, and -2 all of the
            prefix but its last token.
        open: nodes to expand next.
    """

    sequence: TokenSequence
    committed: list[int]
    growth: TreeGrowth
    num_ranked: int
    rows: dict[int, int]
    open: list[int] = field(default_factory=lambda: [-1])


class Node(NamedTuple):
    """An open node of one of the sequences."""

    of: Growing
    node: int

    @property
    def depth(self) -> int:
        """Draft tokens up to the node, its own included; 0 for the prefix."""
        return self.of.growth.depths[self.node] + 1 if self.node >= 0 else 0

    @property
    def token_id(self) -> int:
        """Its own; of the prefix, the last one."""
        return self.of.growth.token_ids[self.node] if self.node >= 0 else self.of.committed[-1]

    @property
    def parent_row(self) -> int:
        """The row of the state before its token."""
        return self.of.rows[self.of.growth.parents[self.node] if self.node >= 0 else -2]

    def sampled(self) -> Row:
        """How the token after it is sampled."""
        sequence, committed = self.of.sequence, self.of.committed
        return Row(
            sequence.params,
            sequence.prompt_len,
            [*committed, *self.of.growth.path_to(self.node)] if sequence.params.needs_history else (),
            len(committed) + self.depth,
            sequence.seed,
            len(committed),
        )


class Scorer(Protocol):
    """What proposals are scored with."""

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits."""

    def logits(self, states: Tensor) -> Tensor:
        """Float32 [n, vocab_size]; -inf for ids that the target cannot read."""


class OwnDrafts:
    """Proposals for all sequences of a step at once.

    Args:
        scorer: of states.
        may_be_tree: whether the target verifies trees.
    """

    def __init__(self, scorer: Scorer, *, may_be_tree: bool) -> None:
        self._scorer = scorer
        self._may_be_tree = may_be_tree
        self._calibrations = {kind: Calibration() for kind in (0, GREEDY, GUMBEL)}
        self._grown: WeakKeyDictionary[TokenSequence, Growing] = WeakKeyDictionary()

    def split(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What a pass returned: logits [num_rows, vocab_size] and states [num_rows, state_size]."""
        raise NotImplementedError

    def propose(self, judged: Sequence[tuple[TokenSequence, Drafting, int, Verdict]], states: Tensor) -> None:
        """Set outcome and proposal of each.

        Args:
            judged: sequences that are drafted for, whose tokens end with those that the verdict is about,
                each with the first of its rows.
            states: [num_rows, state_size], of a step.

        A defect here costs proposals, never a verdict: it is logged.
        """
        try:
            growing: list[Growing] = []
            picked: list[int] = []
            for sequence, drafting, row, verdict in judged:
                found = self.begin(sequence, drafting, verdict)
                if found is not None:
                    found.rows[-2] = len(picked)
                    growing.append(found)
                    picked.append(row + _row_of(drafting.outcome))
            if growing:
                places = to_device(np.array(picked, np.int64), states.device)
                self.grow(growing, states[places])
            for sequence, drafting, _, _ in judged:
                drafting.proposal = self._proposal(sequence)
        except Exception:
            log.exception("drafting failed")

    def begin(self, sequence: TokenSequence, drafting: Drafting, verdict: Verdict) -> Growing | None:
        """Apply the rule, learn from the outcome, and begin what follows it; None if nothing is to."""
        judged, kind = drafting.judged, sequence.encoded.traits & MATCHED
        outcome = acceptance.accept(judged, verdict, sequence.params, sequence.seed)
        drafting.outcome = outcome
        emitted = [*(judged.token_ids[node] for node in outcome.path), outcome.next_token]
        before = self._grown.pop(sequence, None)
        if before is not None and len(before.committed) == judged.base_len:
            before.growth.learn(emitted)
        committed = [*sequence.tokens[: judged.base_len], *emitted]
        is_tree = self._may_be_tree and bool(kind) and drafting.wanted.max_depth > 0
        growth = drafting.growth(len(committed), self._calibrations[kind], is_tree=is_tree)
        if growth is None:
            return None
        found = self._grown[sequence] = Growing(sequence, committed, growth, NUM_RANKS if is_tree else 1, {})
        return found

    def grow(self, growing: list[Growing], states: Tensor) -> None:
        """Expand open nodes, of all sequences together, until there are none."""
        noise = _Noise(growing, self._scorer.vocab_size, states.device)
        while growing:
            # Heads differ by depth; nodes of a depth lie together.
            nodes = [Node(each, node) for each in growing for node in each.open]
            nodes.sort(key=lambda node: node.depth)
            states = torch.cat([states, self.advanced(nodes, states)])
            self._add_candidates(nodes, states[-len(nodes) :], noise)
            for row, (of, node) in enumerate(nodes, len(states) - len(nodes)):
                of.rows[node] = row
            for each in growing:
                each.open = each.growth.expand(_NUM_EXPANDED)
            growing = [each for each in growing if each.open]

    def advanced(self, nodes: Sequence[Node], states: Tensor) -> Tensor:
        """The state after each node, [num_nodes, state_size], in the dtype of `states`.

        Args:
            nodes: by depth.
            states: of all rows so far.
        """
        raise NotImplementedError

    def _add_candidates(self, nodes: Sequence[Node], states: Tensor, noise: _Noise) -> None:
        """The likeliest tokens after each node become its children."""
        rows = Rows.of([node.sampled() for node in nodes])
        scores = sampling.apply_warps(sampling.apply_history(self._scorer.logits(states), rows), rows)
        scores = _SHARPNESS * noise.added(scores, rows)
        top = scores.topk(min(max(node.of.num_ranked for node in nodes), scores.shape[1]), dim=-1)
        shares = (top.values - scores.logsumexp(dim=-1, keepdim=True)).exp()
        is_there = (top.values > float("-inf")) & shares.isfinite()
        found = to_host(top.indices, shares, is_there.sum(dim=-1))
        for (of, node), ids, of_ids, num in zip(nodes, *(each.tolist() for each in found), strict=True):
            most = min(num, of.num_ranked)
            of.growth.add(node, ids[:most], of_ids[:most])

    def _proposal(self, sequence: TokenSequence) -> Proposal | None:
        grown = self._grown.get(sequence)
        if grown is None or not grown.growth.num_nodes:
            return None
        found = grown.growth.proposal(len(grown.committed))
        parents = tree.checked_parents(found.parents, len(found.token_ids))  # none of a chain
        supports = () if sequence.encoded.traits & MATCHED else certain(found.token_ids)
        return replace(found, parents=parents, supports=supports)


class HeadsDrafts(OwnDrafts):
    """With heads.

    Args:
        heads: of the target.
        may_be_tree: whether the target verifies trees.
    """

    def __init__(self, heads: Heads, *, may_be_tree: bool) -> None:
        super().__init__(heads, may_be_tree=may_be_tree)
        self._heads = heads

    def split(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `OwnDrafts`; they lie side by side."""
        return logits[:, : self._heads.vocab_size], logits[:, self._heads.vocab_size :]

    def advanced(self, nodes: Sequence[Node], states: Tensor) -> Tensor:
        """See `OwnDrafts`."""
        columns = np.array([(node.parent_row, node.token_id, node.depth) for node in nodes], np.int64).T
        parents, token_ids = (to_device(column.copy(), states.device) for column in columns[:2])
        before = states[parents]
        depths, starts = np.unique(columns[2], return_index=True)
        ends = [*starts[1:].tolist(), len(nodes)]
        parts = [
            self._heads.advance(before[start:end], token_ids[start:end], depth)
            for depth, start, end in zip(depths.tolist(), starts.tolist(), ends, strict=True)
        ]
        return torch.cat(parts).to(states.dtype)


def _row_of(outcome: Outcome | None) -> int:
    """The row of a verdict whose state the outcome goes on from."""
    return outcome.path[-1] + 1 if outcome is not None and outcome.path else 0


class _Noise:
    """The target's noise under Gumbel coupling, at the positions of a step's proposals.

    A call costs as much for some positions as for one, so it is computed for all of them at once, or for one
    depth after another where vocabulary and batch are large. Nodes of a depth share it.
    """

    def __init__(self, growing: Sequence[Growing], vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._places: dict[tuple[int, int], int] = {}
        self._noise: Tensor
        keys = [
            (each.sequence.seed, len(each.committed) + depth)
            for each in growing
            if each.sequence.encoded.traits & GUMBEL
            for depth in range(each.growth.max_depth)
        ]
        if keys and len(keys) * vocab_size <= _MOST_NOISE:
            self._compute(keys)

    def added(self, scores: Tensor, rows: Rows) -> Tensor:
        """Scores [num_rows, vocab_size], with noise where tokens are coupled."""
        noisy = rows.having(GUMBEL)
        if noisy is None:
            return scores
        keys = list(zip(rows.seeds[noisy].tolist(), rows.positions[noisy].tolist(), strict=True))
        if not self._places.keys() >= set(keys):
            self._compute(list(dict.fromkeys(keys)))
        places = np.array([self._places[key] for key in keys], np.int64)
        noise = self._noise[to_device(places, self._device)]
        if isinstance(noisy, slice):
            return scores + noise
        return scores.index_add(0, to_device(noisy, self._device), noise)

    def _compute(self, keys: Sequence[tuple[int, int]]) -> None:
        seeds, positions = zip(*keys, strict=True)
        self._places = {key: place for place, key in enumerate(keys)}
        # Single precision: what is proposed need not be exact.
        self._noise = random.gumbel_noise(seeds, positions, self._vocab_size, self._device).float()
