"""One stream of the draft service: proposals when they are asked for, and others before that.

While the target verifies a proposal the stream works ahead: it forks its sequence for the likeliest outcomes
of the round, drafts what would follow them, all together, and hands over each proposal as it is ready. When
it gets ahead of the target, it goes on with the likeliest outcomes of those.

    root        committed tokens, and the proposal that is being verified
    branches    an outcome of the root or of another branch, and the proposal that follows it

The next request commits tokens. If a branch was made for them, it is the root from then on and keeps its
own branches; every other one is closed, and its memory is free before the next forward pass. Proposals are
the same as if they had been asked for: a draft token depends on seed, position and the tokens before alone.
Knows no grpc.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draft_service.drafter import DraftJob, PeekJob
from specwire.core import Preparation, Proposal
from specwire.engine.jobs import TokenSequence
from specwire.engine.loop import Engine
from specwire.errors import SpecwireError
from specwire.estimate.forecast import NUM_RANKS, Forecast, Likely

MIN_WORTH = 0.005
"""Outcomes less likely than this are not worth the work."""


@dataclass(frozen=True, slots=True)
class PreparedBranch:
    """A proposal for whoever commits `path` after the tokens that the stream's last request committed.

    Attributes:
        num_wanted: draft tokens that it was to have.
        started_ns, finished_ns: when it was worked on, by the stopwatch.
    """

    path: tuple[int, ...]
    proposal: Proposal
    num_wanted: int
    started_ns: int
    finished_ns: int


class DraftAnswer(NamedTuple):
    """To one request.

    Attributes:
        job: what committed its tokens.
        proposal: None when no tokens were wanted.
        was_prepared: whether the work began before the request came.
    """

    job: DraftJob
    proposal: Proposal | None
    was_prepared: bool


Push = Callable[[int, Sequence[PreparedBranch]], Awaitable[None]]
"""Takes the committed length that the paths begin at, and proposals, likeliest first."""


@dataclass(eq=False)
class Branch:
    """A proposal, finished or in the making, and the tokens between the root's committed ones and it.

    Attributes:
        worth: estimated probability that it will be asked for.
        peek: what may follow its whole proposal, when known.
        after_all: worth of each of those, the likeliest first.
        outcomes: of its own proposal, the likeliest last; those that were taken have branches, or had.
    """

    job: DraftJob
    future: asyncio.Future[Proposal]
    path: tuple[int, ...] = ()
    worth: float = 1.0
    pushed: bool = False
    peek: asyncio.Future[list[int]] | None = None
    after_all: list[float] = field(default_factory=list)
    outcomes: list[Likely] = field(default_factory=list)
    taken: set[tuple[int, int]] = field(default_factory=set)
    num_listed: int = 0

    @property
    def proposal(self) -> Proposal | None:
        """None while it is in the making, or when that failed."""
        found: Proposal | None = _result(self.future)
        return found

    @property
    def failed(self) -> bool:
        """Whether there will never be a proposal."""
        return self.future.done() and self.proposal is None

    @property
    def candidates(self) -> list[list[int]]:
        """By position of its proposal; and after all of it, where that is known."""
        after = _result(self.peek) if self.peek else None
        return self.job.candidates if after is None else [*self.job.candidates, after]

    @property
    def next_worth(self) -> float:
        """Of its likeliest outcome without a branch."""
        return self.worth * self.outcomes[-1].probability if self.outcomes else 0.0

    @property
    def expected(self) -> list[float]:
        """Worth of each outcome that a peek under way will name."""
        return [] if self.peek is None or self.peek.done() else self.after_all

    def list_outcomes(self, forecast: Forecast) -> None:
        """Anew whenever candidates at another position are known."""
        candidates = self.candidates
        if self.proposal and len(candidates) > self.num_listed:
            self.num_listed = len(candidates)
            likely = forecast.outcomes(len(self.proposal.token_ids), candidates, MIN_WORTH / self.worth)
            self.outcomes = [o for o in reversed(likely) if (o.num_accepted, o.next_token) not in self.taken]

    def take_outcome(self) -> Likely:
        """The likeliest without a branch."""
        likely = self.outcomes.pop()
        self.taken.add((likely.num_accepted, likely.next_token))
        return likely


class Lookahead:
    """Drafts for one stream.

    Args:
        sequence: the stream's own, which lives as long as the stream.
        forecast: of this stream's rounds.
        push: hands over what was prepared.
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
        self._preparation: Preparation | None = None  # what the root asks for; None while a request is served
        self._work: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    async def draft(
        self,
        base_len: int,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        preparation: Preparation | None,
    ) -> DraftAnswer:
        """Commit tokens and draft what follows; then work ahead if asked to, until the next request.

        Args:
            base_len: committed length that the sequence is rolled back to.
            token_ids: committed tokens after it.
            num_draft_tokens: wanted; 0 with a preparation when the proposal was handed over before.

        Raises:
            SpecwireError: the request cannot be served.
        """
        if self._work is not None and self._work.done():
            self._work.result()  # a defect: it ends with the stream
        self._preparation = None
        root = self._follow(base_len, token_ids)
        was_prepared = root is not None and await self._comes(root)
        if root is None or not was_prepared:
            root = self._begin(base_len, token_ids, num_draft_tokens, preparation)
        self._root = root
        proposal: Proposal | None = await root.future
        if proposal is not None and preparation is not None:
            self._go_ahead(preparation)
        if proposal is not None:
            proposal = proposal.first(num_draft_tokens) if num_draft_tokens else None
        return DraftAnswer(root.job, proposal, was_prepared)

    def close(self) -> None:
        """End the work and close all forks; the stream's own sequence is its opener's."""
        if self._work is not None and not self._work.cancel() and not self._work.cancelled():
            self._work.exception()  # of a stream that has ended, most likely
        self._close(self._branches)
        self._branches = []

    async def _comes(self, branch: Branch) -> bool:
        """Whether a branch that somebody waits for now gets its proposal.

        Memory to work ahead in may have run out just before the engine heard that it is waited for.
        """
        if not branch.future.done():
            self._engine.promote(branch.job)
            await asyncio.wait([branch.future])
        return not branch.failed

    def _begin(
        self,
        base_len: int,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        preparation: Preparation | None,
    ) -> Branch:
        """Draft on the stream's own sequence, since nothing was prepared for these tokens."""
        job = DraftJob(
            self._sequence,
            base_len,
            list(token_ids),
            num_draft_tokens=num_draft_tokens,
            vocab_limit=self._vocab_limit,
            num_candidates=NUM_RANKS if preparation else 0,
        )
        return Branch(job, self._engine.submit(job, extra_len=num_draft_tokens))

    def _follow(self, base_len: int, token_ids: Sequence[int]) -> Branch | None:
        """The branch that was made for these tokens, as the new root; all that is out of date is closed."""
        path = self._path_from_root(base_len, token_ids)
        if path is not None:
            self._learn(path)
        found = next((b for b in self._branches if b.path == path and not b.failed), None)
        alive: list[Branch] = []
        if found is not None:
            num = len(found.path)
            alive = [b for b in self._branches if b is not found and b.path[:num] == found.path]
        self._close(b for b in self._branches if b is not found and b not in alive)
        self._branches = alive
        if found is not None:
            self._engine.replace_with_fork(self._sequence, found.job.sequence)
            root_path, root_worth = found.path, found.worth
            for branch in (found, *alive):
                branch.path = branch.path[len(root_path) :]
                branch.worth = branch.job.worth = branch.worth / root_worth
                branch.num_listed = 0  # what was not worth listing may be now
        return found

    def _path_from_root(self, base_len: int, token_ids: Sequence[int]) -> tuple[int, ...] | None:
        """Tokens committed after the root's own; None where they do not build on the root."""
        root = self._root
        proposal = root.proposal if root else None
        if root is None or proposal is None or base_len < root.job.committed_len:
            return None
        return (*proposal.token_ids[: base_len - root.job.committed_len], *token_ids)

    def _learn(self, path: tuple[int, ...]) -> None:
        """Teach the forecast how the root's round ended, if the path is one round's outcome."""
        assert self._root is not None
        proposal, candidates = self._root.proposal, self._root.candidates
        assert proposal is not None
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

    def _go_ahead(self, preparation: Preparation) -> None:
        self._preparation = preparation
        if self._work is None:
            self._work = asyncio.create_task(self._work_ahead())
        self._news.set()

    async def _work_ahead(self) -> None:
        """As long as the stream lives, whenever there is news: branch out, and hand over what is ready.

        One task for all roots, which reads root and branches anew after every wait. A task for each root that
        outlived its root branched out from tokens that were not committed: it drafted with random numbers
        that had been judged, and bent the distribution.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            self._branch_out()
            while (root := self._root) and (prepared := self._take_ready()):
                await self._push(root.job.committed_len, prepared)

    def _take_ready(self) -> list[PreparedBranch]:
        """What is ready and was not handed over yet, likeliest first; nothing while a request is served."""
        if self._preparation is None:
            return []
        prepared = []
        for branch in sorted(self._branches, key=lambda branch: -branch.worth):
            if branch.proposal and not branch.pushed:
                branch.pushed = True
                job = branch.job
                prepared.append(
                    PreparedBranch(
                        branch.path, branch.proposal, job.num_draft_tokens, job.started_ns, job.finished_ns
                    )
                )
        return prepared

    def _branch_out(self) -> None:
        """Begin with the likeliest outcomes that have no branch; nothing while a request is served."""
        root, preparation = self._root, self._preparation
        if root is None or preparation is None:
            return
        failed = [branch for branch in self._branches if branch.failed]
        self._close(failed)
        self._branches = [branch for branch in self._branches if branch not in failed]
        for branch in (root, *self._branches):
            self._peek(branch)
            branch.list_outcomes(self._forecast)
        expected = [worth for branch in (root, *self._branches) for worth in branch.expected]
        while True:
            parent = max((root, *self._branches), key=lambda branch: branch.next_worth)
            # What a peek will show in a moment has its place kept, where it is worth more.
            num_kept = sum(worth > parent.next_worth for worth in expected)
            is_full = len(self._branches) + num_kept >= preparation.num_outcomes
            if is_full or parent.next_worth < MIN_WORTH:
                return
            self._add_branch(parent, preparation.num_draft_tokens)

    def _sequence_of(self, branch: Branch) -> TokenSequence:
        """Where a branch's tokens are: the root's are those of the stream's own sequence."""
        return self._sequence if branch is self._root else branch.job.sequence

    def _peek(self, branch: Branch) -> None:
        """Find out what may follow a whole proposal, once it is there."""
        proposal = branch.proposal
        if proposal is None or branch.peek is not None:
            return
        shares = self._forecast.after_all(len(proposal.token_ids))
        branch.after_all = [branch.worth * share for share in shares]
        job = PeekJob(
            self._sequence_of(branch),
            branch.job.committed_len + len(proposal.token_ids),
            [],
            vocab_limit=self._vocab_limit,
            num_candidates=NUM_RANKS,
            worth=sum(branch.after_all),
        )
        if branch.after_all[0] >= MIN_WORTH:
            branch.peek = self._submit(job, 0)

    def _add_branch(self, parent: Branch, num_draft_tokens: int) -> None:
        worth = parent.next_worth
        outcome = parent.take_outcome()
        assert parent.proposal is not None
        accepted = parent.proposal.token_ids[: outcome.num_accepted]
        job = DraftJob(
            self._engine.open_fork(self._sequence),
            parent.job.committed_len + outcome.num_accepted,
            [outcome.next_token],
            num_draft_tokens=num_draft_tokens,
            vocab_limit=self._vocab_limit,
            num_candidates=NUM_RANKS,
            parent=self._sequence_of(parent),
            worth=worth,
        )
        path = (*parent.path, *accepted, outcome.next_token)
        self._branches.append(Branch(job, self._submit(job, num_draft_tokens), path, worth))

    def _submit(self, job: DraftJob, extra_len: int) -> asyncio.Future[Any]:
        """A background job; what it fails with concerns nobody, since the stream goes on without it."""
        try:
            future = self._engine.submit(job, extra_len, background=True)
        except SpecwireError as error:  # the end of the context, or of the service
            future = asyncio.get_running_loop().create_future()
            future.set_exception(error)
        future.add_done_callback(self._note_end)
        return future

    def _note_end(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()
        self._news.set()


def _result(future: asyncio.Future[Any]) -> Any:
    """What came of it; None as long as nothing did, or when it failed."""
    failed = not future.done() or future.cancelled() or future.exception() is not None
    return None if failed else future.result()
