"""From the draft's logits to draft tokens, the supports they were drawn from, and likely alternatives.

Knows no grpc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draft_service.scores import SharedScores
from draft_service.translation import Committed
from draft_service.vocabulary import SharedVocabulary
from specwire import clock
from specwire.config.services import DraftConfig
from specwire.core import MAX_SUPPORT, SUPPORT_MASS, Proposal, num_in_common
from specwire.engine import chosen
from specwire.engine.cache.kv_cache import SequenceCache
from specwire.engine.device import NO_DRAFTING, DraftCost
from specwire.engine.drawn import NOTHING, Drawn
from specwire.engine.jobs import Job
from specwire.errors import InternalError, InvalidRequestError
from specwire.proposals.growth import NUM_EXPANDED, NUM_RANKS, TreeGrowth
from specwire.proposals.tree import TokenTree
from specwire.rule import sampling
from specwire.rule.choices import Kind, likeliest
from specwire.rule.columns import EDITED, MATCHED, Places, Row, Rows
from specwire.rule.random import Purpose, uniforms
from specwire.rule.rows import draw_supported, matched_scores, take_rows
from specwire.rule.transfer import to_device, to_host
from specwire.support import IntArray, Support


@dataclass(eq=False)
class DraftJob(Job):
    """Commit tokens, then decode `num_draft_tokens` more, one forward pass each.

    The last draft token is never run: its keys and values are computed in the next round, if it was
    accepted. That is why a round that accepts everything commits two tokens that the cache lacks.

    Where the logits after a draft token are not finite, the draft is certain of token 0, a distribution like
    any other: a proposal that ended there would be shorter for some tokens than for others. A request fails
    where those after its own tokens are not.

    Attributes:
        vocab_limit: token ids from here on are never drafted; 0 for no limit.
        num_candidates: likeliest tokens to record at each position, besides the drafted one.
        committed: of a draft with another vocabulary, all tokens up to the draft, in the target's vocabulary,
            as is all that a job takes and gives. The sequence has the draft's own tokens.
        draws: of several chains, the row, among the job's own, that the next token of each is drawn from.
        own_len: tokens of the sequence before the drafted ones.
        candidates: [num_draft_tokens][num_candidates], likeliest first; and those of the position after the
            proposal, once a `PeekJob` has found them.
    """

    num_draft_tokens: int = 0
    vocab_limit: int = 0
    num_candidates: int = 0
    committed: Committed | None = None
    draws: Sequence[int] = field(init=False, default=())
    own_len: int = field(init=False, default=0)
    drafted: list[int] = field(default_factory=list)
    supports: list[Support] = field(default_factory=list)
    candidates: list[list[int]] = field(default_factory=list)

    def start(self) -> None:
        if self.committed is None:
            super().start()
        else:
            self._commit(self.committed)
        self.own_len = len(self.sequence.tokens)
        self.num_rows = 1 if self.num_draft_tokens else 0

    def _commit(self, committed: Committed) -> None:
        """In the draft's own tokens; those that the sequence, or its parent, holds stay in the cache."""
        if self.sequence.params.matches_tokens:
            self._keep(*committed.own(self.num_draft_tokens))
            return
        # How many tokens the next pass runs must not depend on drafted tokens that were not judged, which
        # the tokens of the text that is committed instead may begin with: all drafted ones are run again.
        num_kept, own_ids = committed.own(self.num_draft_tokens, is_judged=True)
        del self.sequence.tokens[num_kept:]
        self._keep(num_kept, own_ids)

    def _keep(self, num_kept: int, own_ids: Sequence[int]) -> None:
        """Roll the sequence back to so many of its own tokens, or of its parent's, and append others."""
        sequence, parent = self.sequence, self.parent
        if parent is not None:
            num_shared = num_in_common(parent.chain[num_kept:], own_ids)
            num_kept, own_ids = num_kept + num_shared, own_ids[num_shared:]
            sequence.fork_from(parent, num_kept)
        sequence.rebase(num_kept, own_ids)

    @property
    def before(self) -> Sequence[int]:
        """All tokens before the drafted ones."""
        if self.committed is None:
            return self.sequence.tokens[: self.own_len]
        return list(self.committed.target_ids)

    def own_ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Drafted tokens as the sequence has them."""
        return token_ids if self.committed is None else self.committed.shared.to_draft(token_ids)

    @property
    def num_ranked(self) -> int:
        """Likeliest tokens that it needs of each row."""
        return self.num_candidates + 1 if self.num_candidates else 0

    @property
    def position(self) -> int:
        """Of the next token, or the first of those that are drawn next; where the sequence has no tree."""
        if self.committed is None:
            return len(self.sequence.tokens)
        return self.committed_len + len(self.drafted)

    def positions(self) -> Sequence[int]:
        """Of the tokens that are drawn after each of the last `num_rows` that were run."""
        return range(self.position, self.position + self.num_rows)

    def histories(self) -> list[Sequence[int]]:
        """The tokens before each of them."""
        if self.committed is None:
            return [self.sequence.tokens[:position] for position in self.positions()]
        return [[*self.before, *self.drafted]]

    def free_rows(self) -> list[IntArray | None]:
        """Of a job that drafts text: the draft's own tokens that each row may choose; None for any."""
        return []

    def rows(self) -> list[Row]:
        """How to sample each of them, where the columns of `Rows` are not enough."""
        each = zip(self.histories(), self.positions(), strict=True)
        return [self.sequence.row(history, position, self.committed_len) for history, position in each]

    def add(self, drawn: Drawn, row: int) -> None:
        """Append one draft token; unless it is the last, the next pass runs it.

        Args:
            row: the first of the job's own rows.
        """
        drafted, token_id = self.drafted, max(0, drawn.token_ids[row])
        if self.fails(drawn.token_ids[row], len(drafted)):
            return
        self.sequence.tokens += self.own_ids((token_id,))
        drafted.append(token_id)
        if self.num_candidates:
            others = [other for other in drawn.ranked[row] if other != token_id]
            self.candidates.append(others[: self.num_candidates])
        if drawn.supports and (support := drawn.supports[row]) is not None:
            self.supports.append(support)
        if len(drafted) == self.num_draft_tokens:
            self.result = Proposal(self.committed_len, drafted, self.supports)

    def fails(self, token_id: int, depth: int) -> bool:
        """Whether the request fails, since the logits after its own tokens are not finite.

        What is prepared does not: its first token follows draft tokens that were not judged.
        """
        is_failed = token_id < 0 and depth == 0 and self.parent is None
        if is_failed and self.sequence.grammar is not None:
            self.result = InvalidRequestError("grammar", "set", "allows no token that the draft has")
        elif is_failed:
            self.result = InternalError("the draft's logits are not finite")
        return is_failed


@dataclass(eq=False)
class PeekJob(DraftJob):
    """Finds `num_candidates` tokens that may follow all tokens of a sequence; drafts nothing."""

    def start(self) -> None:
        super().start()
        self.num_rows = 1

    def add(self, drawn: Drawn, row: int) -> None:
        """Keep the candidates; the drawn token is not appended."""
        self.result = drawn.ranked[row][: self.num_candidates]


@dataclass(eq=False)
class TreeJob(DraftJob):
    """Commit tokens, then grow a tree of `num_draft_tokens` nodes, in at most `growth.max_depth` passes.

    Every pass runs the nodes that are expanded next, all at once: they are the sequence's last tokens, as a
    tree. The others are never run.

    Attributes:
        growth: the nodes found so far.
        nodes: those of the proposal, in its order; set with the result.
    """

    growth: TreeGrowth = field(kw_only=True)
    nodes: list[int] = field(init=False, default_factory=list)
    _open: Sequence[int] = field(init=False, default=(-1,))  # run by the next pass; -1 is the prefix
    _num_passes: int = field(init=False, default=0)

    @property
    def num_ranked(self) -> int:
        """Likeliest tokens that it needs of each row: all that may become nodes."""
        return self.num_candidates

    def positions(self) -> Sequence[int]:
        """After each node that was run."""
        return [self.committed_len + self.growth.depth_after(node) for node in self._open]

    def histories(self) -> list[Sequence[int]]:
        """Each node's own path."""
        return [[*self.before, *self.growth.path_to(node)] for node in self._open]

    def add(self, drawn: Drawn, row: int) -> None:
        """The candidates after the nodes that were run become nodes; the next pass runs the best of them."""
        if self.fails(drawn.token_ids[row], self._num_passes):
            return
        self._add_candidates(drawn, row)
        self._num_passes += 1
        is_last = self._num_passes == self.growth.max_depth
        if not is_last and (nodes := self.growth.expand(NUM_EXPANDED)):
            self._run(nodes)
        else:
            self.nodes = self.growth.best()
            self.result = self.growth.proposal(self.committed_len)

    def _add_candidates(self, drawn: Drawn, first: int) -> None:
        """Rows whose logits are not finite have none; others may have more than a job asked for."""
        for row, node in enumerate(self._open, first):
            self.growth.add(node, drawn.ranked[row][:NUM_RANKS], drawn.shares[row][:NUM_RANKS])

    def _run(self, nodes: Sequence[int]) -> None:
        """In the next pass. The sequence holds the expanded nodes in the order of their expansion."""
        self._open, self.num_rows = nodes, len(nodes)
        sequence = self.sequence
        sequence.tokens += self.own_ids([self.growth.token_ids[node] for node in nodes])
        sequence.tree = self.growth.extended(sequence.tree or TokenTree(self.own_len, ()), nodes)


@dataclass(eq=False)
class LeavesJob(TreeJob):
    """Finds what may follow the leaves of a tree: one more pass on its sequence.

    Attributes:
        leaves: the nodes to expand.
    """

    leaves: Sequence[int] = ()

    def start(self) -> None:
        """Nothing is committed: the sequence goes on as it is."""
        self.own_len = len(self.sequence.chain)
        self.growth.expanded += self.leaves
        self._run(self.leaves)

    def add(self, drawn: Drawn, row: int) -> None:
        """The candidates become nodes, outside the proposal."""
        self._add_candidates(drawn, row)
        self.result = True


class Question(NamedTuple):
    """The rows of all jobs.

    Attributes:
        limits: [num_rows], token ids from here on are excluded, 0 for no limit; empty without any.
        num_ranked: likeliest tokens wanted of each row.
        free: rows whose likeliest of all the draft's own tokens is wanted, too; or the likeliest of these.
        draws: of jobs with several chains, the row that the next token of each is drawn from, and its number.
        chains: of jobs that are decoded on the device.
    """

    rows: Rows
    limits: Sequence[int]
    num_ranked: int
    free: Mapping[int, IntArray | None] = NOTHING
    draws: Sequence[tuple[int, int]] = ()
    chains: Chains | None = None


class Chains(NamedTuple):
    """Jobs of a step that all want some more tokens, chosen in one way.

    Attributes:
        num_steps: tokens that all of them want.
    """

    kind: Kind
    caches: Sequence[SequenceCache]
    num_steps: int
    vocab_limit: int


class DraftDecider:
    """Draws draft tokens for all jobs of a step at once.

    Of a draft with another vocabulary, the logits become scores of the target's tokens first. From there on
    all tokens are the target's: biases, penalties, noise, supports. So the draft samples from exactly the
    distribution that is sent.

    Attributes:
        runner: a `ModelRunner`, whose device decodes whole chains; None where the host chooses each token.
        drafting: see `device.Decider`.
    """

    def __init__(self, config: DraftConfig, shared: SharedVocabulary | None = None) -> None:
        self.drafting = NO_DRAFTING
        self.runner: Any = None
        self._scores = SharedScores(shared) if shared else None
        self._support_mass = config.support_mass
        self._max_support = config.max_support
        self._draws_as_usual = (self._support_mass, self._max_support) == (SUPPORT_MASS, MAX_SUPPORT)

    def ask(self, jobs: Sequence[Job]) -> Question:
        drafts = [job for job in jobs if isinstance(job, DraftJob)]
        num_rows = [job.num_rows for job in drafts]
        edited: dict[int, Row] = {}
        free: dict[int, IntArray | None] = {}
        draws: list[tuple[int, int]] = []
        start = 0
        for job in drafts:
            if job.sequence.encoded.traits & EDITED:
                edited |= enumerate(job.rows(), start)
            if self._scores is not None:
                free |= enumerate(job.free_rows(), start)
            draws += [(start + row, chain) for chain, row in enumerate(job.draws)]
            start += job.num_rows
        rows = Rows(
            [job.sequence.encoded for job in drafts],
            num_rows,
            [job.position for job in drafts],
            [job.committed_len for job in drafts],
            {i: job.positions() for i, job in enumerate(drafts) if job.sequence.tree is not None},
            edited,
        )
        limits = [job.vocab_limit for job in drafts]
        num_ranked = max((job.num_ranked for job in drafts), default=0)
        each_limit = np.repeat(limits, num_rows).tolist() if any(limits) else ()
        return Question(rows, each_limit, num_ranked, free, draws, self._chains(drafts))

    def _chains(self, jobs: Sequence[DraftJob]) -> Chains | None:
        """Of jobs that a device can decode together; None where one of them is of another kind."""
        is_plain = all(type(job) is DraftJob and job.committed is None for job in jobs)
        if self.runner is None or not self.runner.can_decode or not jobs or not is_plain:
            return None
        kinds = {chosen.kind_of(job.sequence.encoded) for job in jobs}
        limits = {job.vocab_limit for job in jobs}
        kind = kinds.pop()
        if kinds or len(limits) > 1 or kind is None or not (kind.matched or self._draws_as_usual):
            return None
        num_steps = min(job.num_draft_tokens - len(job.drafted) for job in jobs)
        longest, context_len = max(job.position for job in jobs) + num_steps, self.runner.context_len
        if num_steps < 2 or (context_len is not None and longest > context_len):
            return None
        return Chains(kind, [job.sequence.cache for job in jobs], num_steps, limits.pop())

    def decide(self, question: Question, logits: Tensor) -> list[Drawn]:
        """One draft token for each row of the logits [num_rows, vocab_size], or some one after another."""
        self.drafting = NO_DRAFTING
        if question.chains is not None:
            started_ns = clock.stopwatch_ns()
            kind, caches, num_steps, limit = question.chains
            some = logits[:, : limit or logits.shape[1]]
            found = chosen.decoded(
                self.runner, kind, caches, question.rows, num_steps, some, num_ranked=question.num_ranked
            )
            if found:  # else the host chooses each token
                num_nodes = (num_steps - 1) * len(caches)
                self.drafting = DraftCost(num_steps - 1, num_nodes, 0, clock.stopwatch_ns() - started_ns)
                return found
        if self._scores is None:
            return [self._drawn(question, logits)]
        own_ids = self._scores.likeliest(logits, question.free)
        return [self._drawn(question, self._scores.of_target(logits))._replace(own_ids=own_ids)]

    def _drawn(self, question: Question, logits: Tensor) -> Drawn:
        rows = question.rows
        if any(0 < limit < logits.shape[1] for limit in set(question.limits)):
            # The target lacks tokens of the draft, whose vocabulary is padded further.
            ends = np.array([limit or logits.shape[1] for limit in question.limits], np.int64)
            beyond = (
                torch.arange(logits.shape[1], device=logits.device) >= to_device(ends, logits.device)[:, None]
            )
            logits = logits.masked_fill(beyond, float("-inf"))
        log_probs = sampling.apply_warps(sampling.apply_history(logits, rows), rows)
        matched, sampled = rows.having(MATCHED), rows.having(MATCHED, wanted=False)
        ours, theirs = self._match(question, log_probs, matched), self._draw(question, log_probs, sampled)
        host = to_host(*ours, *theirs)
        of_chains: Mapping[tuple[int, int], int] = NOTHING
        if question.draws:
            of_chains = dict(zip(question.draws, host.pop().tolist(), strict=True))
        if sampled is None:
            return Drawn.matched(*host)
        found = Drawn.supported(*host[len(ours) :], num_ranked=question.num_ranked)
        if matched is not None:
            order = np.argsort(np.concatenate([matched, sampled])).tolist()
            found = _interleaved(Drawn.matched(*host[: len(ours)]), found, order)
        return found._replace(of_chains=of_chains)

    def apply(self, jobs: Sequence[Job], answer: list[Drawn]) -> None:
        drafts = [job for job in jobs if isinstance(job, DraftJob)]
        for drawn in answer:
            row = 0
            for job in drafts:
                num_rows = job.num_rows
                if job.result is None:
                    job.add(drawn, row)
                row += num_rows

    def _match(self, question: Question, log_probs: Tensor, places: Places | None) -> list[Tensor]:
        """What `Drawn.matched` reads; nothing for no rows."""
        if places is None:
            return []
        scores = matched_scores(take_rows(log_probs, places), question.rows.take(places))
        token_ids = scores.argmax(dim=-1).masked_fill(~scores.amax(dim=-1).isfinite(), -1)
        if not question.num_ranked:
            return [token_ids]
        return [token_ids, *likeliest(scores, most=question.num_ranked)]

    def _draw(self, question: Question, log_probs: Tensor, places: Places | None) -> list[Tensor]:
        """What `Drawn.supported` reads. Truncate first, then sample from exactly the numbers that are sent.

        A row without finite logits has the token -1.
        """
        if places is None:
            return []
        some = take_rows(log_probs, places), question.rows.take(places)
        *found, ids = draw_supported(*some, self._support_mass, self._max_support)
        if not question.draws:
            return found
        # A token for each chain of the jobs that have several, each with a number of its own.
        rows, chains = np.array(question.draws, np.int64).T
        drawn_from = question.rows.take(rows)
        numbers = uniforms(drawn_from.seeds, Purpose.DRAFT, drawn_from.positions, drawn_from.bases, chains)
        here = to_device(rows if isinstance(places, slice) else places.searchsorted(rows), ids.device)
        _, _, probs, _ = found
        columns = sampling.draw(probs[here], to_device(numbers, ids.device))
        return [*found, ids[here].gather(1, columns[:, None])[:, 0]]


def _interleaved(ours: Drawn, theirs: Drawn, order: Sequence[int]) -> Drawn:
    """The rows of both in this order; a column that one of them lacks has nothing in its rows."""
    columns: list[Any] = []
    each: Any = zip(ours, theirs, (-1, None, (), ()), strict=False)
    for one, other, nothing in each:
        both = [*(one or [nothing] * len(ours.token_ids)), *(other or [nothing] * len(theirs.token_ids))]
        columns.append([both[i] for i in order])
    return Drawn(*columns)
