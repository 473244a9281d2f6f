"""One stream of the draft service: proposals on request, and others prepared ahead of requests.

While the target verifies a proposal the stream works ahead: it forks its sequence for the likeliest outcomes
of the round, drafts what would follow each, all in the same forward passes, and hands over each proposal when
it is ready. When it gets ahead of the target, it continues with the likeliest outcomes of those proposals.

    root        committed tokens, and the proposal that is being verified
    branches    an outcome of the root or of another branch, and the proposal that follows it

The next request commits tokens. If a branch was made for them, it becomes the root and keeps its own
branches; every other branch is closed, and its memory is free before the next forward pass. Proposals are the
same as if they had been requested: a draft token depends only on seed, position and the tokens before it, and
under block verification on the committed length that the branch is for.
Knows no grpc.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draft_service.drafter import NUM_EXPANDED, DraftJob, LeavesJob, PeekJob, TreeJob
from specwire.core import MAX_TREE_NODES, Preparation, Proposal, SamplingParams
from specwire.engine.jobs import TokenSequence
from specwire.engine.loop import Engine
from specwire.errors import SpecwireError
from specwire.estimate.calibration import NUM_RANKS, Calibration
from specwire.estimate.forecast import Forecast

MIN_WORTH = 0.005
"""Outcomes less likely than this are not prepared."""


@dataclass(frozen=True, slots=True)
class PreparedBranch:
    """A proposal for the case that `path` follows the tokens which the stream's last request committed.

    Attributes:
        num_wanted: draft tokens that were asked for; the proposal may have fewer.
        started_ns, finished_ns: when it was worked on, by the stopwatch.
        forward_ns: its passes.
    """

    path: tuple[int, ...]
    proposal: Proposal
    num_wanted: int
    started_ns: int
    finished_ns: int
    forward_ns: int


class Kind(NamedTuple):
    """What a proposal is to be.

    Attributes:
        max_depth: longest path of a tree; 0 for a chain.
        num_candidates: likeliest tokens to record at each position.
        calibration: of a tree's candidates.
    """

    num_draft_tokens: int
    max_depth: int
    num_candidates: int
    calibration: Calibration

    @property
    def extra_len(self) -> int:
        """Tokens that its job may add to the sequence."""
        return min(self.num_draft_tokens, MAX_TREE_NODES) if self.max_depth else self.num_draft_tokens

    def job(self, *args: Any, **fields: Any) -> DraftJob:
        """Drafts it; arguments as of `Job`."""
        fields |= {"num_draft_tokens": self.num_draft_tokens, "num_candidates": self.num_candidates}
        if not (self.max_depth and self.num_draft_tokens):
            return DraftJob(*args, **fields)
        fields |= {"max_depth": self.max_depth, "calibration": self.calibration}
        return TreeJob(*args, **fields)


class DraftAnswer(NamedTuple):
    """The answer to one request.

    Attributes:
        job: the job that committed its tokens.
        proposal: None when no tokens were wanted.
        was_prepared: whether the work began before the request arrived.
        ahead_ns: passes that had ended when it arrived.
    """

    job: DraftJob
    proposal: Proposal | None
    was_prepared: bool
    ahead_ns: int


class Likely(NamedTuple):
    """An outcome of a proposal: the tokens that are committed, and how likely they are."""

    probability: float
    token_ids: tuple[int, ...]


Push = Callable[[int, Sequence[PreparedBranch]], Awaitable[None]]
"""Sends prepared proposals, given the committed length that their paths begin at; likeliest first."""


@dataclass(eq=False)
class Branch:
    """A proposal, finished or in progress, and the tokens between the root's committed ones and it.

    Attributes:
        path: these tokens; empty for the root.
        worth: estimated probability that the proposal will be requested.
        peek: the job that finds the candidates after the whole proposal, once it was submitted.
        bonus_worths: worth of each of these candidates, likeliest first.
        outcomes: outcomes of its own proposal without a branch, likeliest last.
        taken: the tokens of the outcomes that have a branch, or had one.
        num_listed: positions whose candidates are in `outcomes`; nodes of a tree.
    """

    job: DraftJob
    future: asyncio.Future[Proposal]
    path: tuple[int, ...] = ()
    worth: float = 1.0
    pushed: bool = False
    peek: asyncio.Future[Any] | None = None
    bonus_worths: list[float] = field(default_factory=list)
    outcomes: list[Likely] = field(default_factory=list)
    taken: set[tuple[int, ...]] = field(default_factory=set)
    num_listed: int = 0

    @property
    def proposal(self) -> Proposal | None:
        """None while it is in progress, or when it failed."""
        found: Proposal | None = _result(self.future)
        return found

    @property
    def failed(self) -> bool:
        """Whether there will never be a proposal."""
        return self.future.done() and self.proposal is None

    @property
    def candidates(self) -> list[list[int]]:
        """By position of its proposal, and for the position after it where that is known."""
        bonus = _result(self.peek) if self.peek else None
        return self.job.candidates if bonus is None else [*self.job.candidates, bonus]

    @property
    def next_worth(self) -> float:
        """Worth of its likeliest outcome without a branch."""
        return self.worth * self.outcomes[-1].probability if self.outcomes else 0.0

    @property
    def worths_to_come(self) -> list[float]:
        """Worth of each outcome that a running peek will list."""
        return [] if self.peek is None or self.peek.done() else self.bonus_worths

    def list_outcomes(self, forecast: Forecast) -> None:
        """List the outcomes again if candidates of another position are known by now."""
        if self.proposal is None:
            return
        tree = self.job if isinstance(self.job, TreeJob) else None
        num_known = tree.growth.num_nodes if tree else len(self.candidates)
        if num_known > self.num_listed:
            self.num_listed = num_known
            least = MIN_WORTH / self.worth
            likely = _of_tree(tree, least) if tree else self._of_chain(forecast, least)
            self.outcomes = [outcome for outcome in reversed(likely) if outcome.token_ids not in self.taken]

    def _of_chain(self, forecast: Forecast, least: float) -> list[Likely]:
        assert self.proposal is not None
        drafted = tuple(self.proposal.token_ids)
        likely = forecast.outcomes(len(drafted), self.candidates, least)
        return [Likely(o.probability, (*drafted[: o.num_accepted], o.next_token)) for o in likely]

    def take_outcome(self) -> Likely:
        """Remove the likeliest outcome, to make a branch for it."""
        likely = self.outcomes.pop()
        self.taken.add(likely.token_ids)
        return likely

    def leaves(self) -> list[int]:
        """Nodes of its tree whose candidates are not known, best first."""
        if not isinstance(self.job, TreeJob):
            return []
        growth = self.job.growth
        known = set(growth.expanded)
        room = min(NUM_EXPANDED, MAX_TREE_NODES - len(known))
        leaves = [node for node in self.job.nodes if node not in known]
        return [node for node in leaves if growth.worths[node] * self.worth >= MIN_WORTH][:room]

    def move_to_root(self, root_path_len: int, root_worth: float) -> None:
        """Measure path and worth from a branch that is the root from now on, given its own path and worth."""
        self.path = self.path[root_path_len:]
        self.worth = self.job.worth = self.worth / root_worth
        self.num_listed = 0  # outcomes below the minimum worth may be above it now


class Lookahead:
    """Drafts for one stream.

    Args:
        sequence: the stream's own, which lives as long as the stream.
        vocab_limit: token ids from here on are never proposed; 0 for no limit.
        forecast: of this stream's rounds.
        push: sends prepared proposals.
    """

    def __init__(
        self, engine: Engine, sequence: TokenSequence, *, vocab_limit: int, forecast: Forecast, push: Push
    ) -> None:
        self._engine = engine
        self._sequence = sequence
        self._vocab_limit = vocab_limit
        self._forecast = forecast
        self._push = push
        self._root: Branch | None = None
        self._branches: list[Branch] = []
        self._preparation: Preparation | None = None  # for the root; None while a request is served
        self._work: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def params(self) -> SamplingParams:
        """Of the stream."""
        return self._sequence.params

    async def draft(
        self,
        base_len: int,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        preparation: Preparation | None,
        max_depth: int = 0,
    ) -> DraftAnswer:
        """Commit tokens and draft what follows; then work ahead if asked to, until the next request.

        Args:
            base_len: committed length that the sequence is rolled back to.
            token_ids: committed tokens after it.
            num_draft_tokens: wanted; 0 with a preparation when the proposal was pushed before.
            preparation: what to prepare ahead of the next request; None for nothing.
            max_depth: longest path of a tree; 0 for a chain.

        Raises:
            SpecwireError: the request cannot be served.
        """
        if self._work is not None and self._work.done():
            self._work.result()  # it only ends with an exception, a defect, which ends the stream too
        self._preparation = None
        path = self._path_from_root(base_len, token_ids)
        if path:
            self._learn(path)
        root = self._follow(path)
        ahead_ns = root.job.forward_ns if root else 0
        was_prepared = root is not None and await self._finishes(root)
        if root is None or not was_prepared:
            num_candidates = NUM_RANKS if preparation or max_depth else 0
            kind = Kind(num_draft_tokens, max_depth, num_candidates, self._forecast.calibration)
            root, ahead_ns = self._draft_unprepared(base_len, token_ids, kind), 0
        self._root = root
        proposal: Proposal | None = await root.future
        if proposal is not None and preparation is not None:
            self._start_working_ahead(preparation)
        if proposal is not None:
            proposal = proposal.first(num_draft_tokens) if num_draft_tokens else None
        return DraftAnswer(root.job, proposal, was_prepared, ahead_ns)

    def close(self) -> None:
        """Stop working ahead and close all forks; the stream's own sequence belongs to the caller."""
        if self._work is not None and not self._work.cancel() and not self._work.cancelled():
            self._work.exception()  # retrieved: most likely the stream it pushed to has ended
        self._close(self._branches)
        self._branches = []

    async def _finishes(self, branch: Branch) -> bool:
        """Wait for the proposal of a branch that was requested; False if it fails.

        It may fail for lack of memory to work ahead in, just before the engine promotes its job.
        """
        if not branch.future.done():
            self._engine.promote(branch.job)
            await asyncio.wait([branch.future])
        return not branch.failed

    def _draft_unprepared(self, base_len: int, token_ids: Sequence[int], kind: Kind) -> Branch:
        """Draft on the stream's own sequence, where nothing was prepared for these tokens."""
        job = kind.job(self._sequence, base_len, list(token_ids), vocab_limit=self._vocab_limit)
        return Branch(job, self._engine.submit(job, kind.extra_len))

    def _path_from_root(self, base_len: int, token_ids: Sequence[int]) -> tuple[int, ...] | None:
        """Tokens committed after the root's own; None where they do not build on the root."""
        root = self._root
        proposal = root.proposal if root else None
        if root is None or proposal is None or base_len < root.job.committed_len:
            return None
        if proposal.parents and base_len > root.job.committed_len:
            return None
        return (*proposal.token_ids[: base_len - root.job.committed_len], *token_ids)

    def _follow(self, path: tuple[int, ...] | None) -> Branch | None:
        """Make the branch of this path the new root, if there is one; close all that do not continue it."""
        found = next((b for b in self._branches if b.path == path and not b.failed), None)
        kept: list[Branch] = []
        if found is not None:
            kept = [b for b in self._branches if b is not found and b.path[: len(found.path)] == path]
        self._close(b for b in self._branches if b is not found and b not in kept)
        self._branches = kept
        if found is not None:
            self._engine.replace_with_fork(self._sequence, found.job.sequence)
            path_len, worth = len(found.path), found.worth
            for branch in (found, *kept):
                branch.move_to_root(path_len, worth)
        return found

    def _learn(self, path: tuple[int, ...]) -> None:
        """Tell the forecast how the root's round ended, if the path is an outcome of that one round."""
        assert self._root is not None
        proposal = self._root.proposal
        assert proposal is not None
        if isinstance(self._root.job, TreeJob):
            self._root.job.growth.learn(path)
            return
        candidates = self._root.candidates
        drafted, num_accepted, next_token = tuple(proposal.token_ids), len(path) - 1, path[-1]
        is_outcome = num_accepted <= len(drafted) and path[:-1] == drafted[:num_accepted]
        if is_outcome and num_accepted < len(candidates):
            known = candidates[num_accepted]
            rank = known.index(next_token) if next_token in known else None
            self._forecast.add(len(drafted), num_accepted, rank)

    def _close(self, branches: Iterable[Branch]) -> None:
        for branch in branches:
            self._engine.close_sequence(branch.job.sequence)

    # --- ahead of the next request ---

    def _start_working_ahead(self, preparation: Preparation) -> None:
        self._preparation = preparation
        if self._work is None:
            self._work = asyncio.create_task(self._work_ahead())
        self._changed.set()

    async def _work_ahead(self) -> None:
        """For the life of the stream: whenever something changed, branch out, and push what is ready.

        One task serves all roots, and reads root and branches again after every await. A task for each root
        that outlived its root branched out from tokens that were not committed: it drafted with random
        numbers that had been judged already, which biases the output distribution.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._branch_out()
            while (root := self._root) and (prepared := self._take_ready()):
                await self._push(root.job.committed_len, prepared)

    def _take_ready(self) -> list[PreparedBranch]:
        """Finished proposals, each once, likeliest first; nothing while a request is served."""
        if self._preparation is None:
            return []
        prepared = []
        for branch in sorted(self._branches, key=lambda branch: -branch.worth):
            if branch.proposal and not branch.pushed:
                branch.pushed = True
                job = branch.job
                prepared.append(
                    PreparedBranch(
                        path=branch.path,
                        proposal=branch.proposal,
                        num_wanted=job.num_draft_tokens,
                        started_ns=job.started_ns,
                        finished_ns=job.finished_ns,
                        forward_ns=job.forward_ns,
                    )
                )
        return prepared

    def _branch_out(self) -> None:
        """Add branches for the likeliest outcomes without one; nothing while a request is served."""
        root, preparation = self._root, self._preparation
        if root is None or preparation is None:
            return
        self._close_failed()
        for branch in (root, *self._branches):
            self._peek(branch)
            branch.list_outcomes(self._forecast)
        kind = Kind(
            preparation.num_draft_tokens, preparation.max_depth, NUM_RANKS, self._forecast.calibration
        )
        worths_to_come = [worth for branch in (root, *self._branches) for worth in branch.worths_to_come]
        while parent := self._next_parent(root, preparation.num_outcomes, worths_to_come):
            self._add_branch(parent, kind)

    def _close_failed(self) -> None:
        failed = [branch for branch in self._branches if branch.failed]
        self._close(failed)
        self._branches = [branch for branch in self._branches if branch not in failed]

    def _next_parent(self, root: Branch, max_branches: int, worths_to_come: list[float]) -> Branch | None:
        """The branch whose next outcome is the likeliest; None when no further branch is worth it or fits.

        Outcomes that running peeks will list have places reserved, where they are worth more.
        """
        parent = max((root, *self._branches), key=lambda branch: branch.next_worth)
        num_reserved = sum(worth > parent.next_worth for worth in worths_to_come)
        is_full = len(self._branches) + num_reserved >= max_branches
        return None if is_full or parent.next_worth < MIN_WORTH else parent

    def _sequence_of(self, branch: Branch) -> TokenSequence:
        """The sequence of a branch's tokens; that of the root is the stream's own."""
        return self._sequence if branch is self._root else branch.job.sequence

    def _peek(self, branch: Branch) -> None:
        """Once a proposal is finished, find the candidates that may follow all of it."""
        proposal = branch.proposal
        if proposal is None or branch.peek is not None:
            return
        if isinstance(branch.job, TreeJob):
            self._peek_at_leaves(branch, branch.job)
            return
        shares = self._forecast.bonus_probabilities(len(proposal.token_ids))
        branch.bonus_worths = [branch.worth * share for share in shares]
        job = PeekJob(
            self._sequence_of(branch),
            branch.job.committed_len + len(proposal.token_ids),
            [],
            vocab_limit=self._vocab_limit,
            num_candidates=NUM_RANKS,
            worth=sum(branch.bonus_worths),
        )
        if branch.bonus_worths[0] >= MIN_WORTH:
            branch.peek = self._submit(job, 0)

    def _peek_at_leaves(self, branch: Branch, tree: TreeJob) -> None:
        leaves = branch.leaves()
        if not leaves:
            return
        branch.bonus_worths = [branch.worth * tree.growth.worths[node] for node in leaves]
        job = LeavesJob(
            self._sequence_of(branch),
            tree.committed_len,
            [],
            vocab_limit=self._vocab_limit,
            num_candidates=NUM_RANKS,
            worth=sum(branch.bonus_worths),
            growth=tree.growth,
            leaves=leaves,
        )
        branch.peek = self._submit(job, len(leaves))

    def _add_branch(self, parent: Branch, kind: Kind) -> None:
        worth = parent.next_worth
        token_ids = parent.take_outcome().token_ids
        # What a fork shares of a tree is its prefix: the path in it is run again.
        num_shared = 0 if isinstance(parent.job, TreeJob) else len(token_ids) - 1
        job = kind.job(
            self._engine.open_fork(self._sequence),
            parent.job.committed_len + num_shared,
            token_ids[num_shared:],
            vocab_limit=self._vocab_limit,
            parent=self._sequence_of(parent),
            worth=worth,
        )
        path = (*parent.path, *token_ids)
        self._branches.append(Branch(job, self._submit(job, kind.extra_len), path, worth))

    def _submit(self, job: DraftJob, extra_len: int) -> asyncio.Future[Any]:
        """Submit a background job; its errors are not reported, since the stream works without it."""
        try:
            future = self._engine.submit(job, extra_len, background=True)
        except SpecwireError as error:  # the end of the context, or of the service
            future = asyncio.get_running_loop().create_future()
            future.set_exception(error)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()
        self._changed.set()


def _result(future: asyncio.Future[Any]) -> Any:
    """None while it is pending, or when it failed."""
    failed = not future.done() or future.cancelled() or future.exception() is not None
    return None if failed else future.result()


def _of_tree(job: TreeJob, least: float) -> list[Likely]:
    """The likely outcomes of a tree, likeliest first: nodes that follow it, or its prefix, outside of it."""
    growth, inside = job.growth, {-1, *job.nodes}
    likely = [
        Likely(growth.worths[node], tuple(growth.path_to(node)))
        for node in range(growth.num_nodes)
        if growth.worths[node] >= least and growth.parents[node] in inside and node not in inside
    ]
    return sorted(likely, key=lambda outcome: -outcome.probability)
