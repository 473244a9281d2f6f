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
from specwire.forecast import NUM_RANKS, Forecast, Likely

MIN_WORTH = 0.005
"""Outcomes less likely than this are not worth the work."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A proposal for whoever commits `path` after the tokens that the stream's last request committed.

    Attributes:
        started_ns, finished_ns: when it was worked on, by the stopwatch.
    """

    path: tuple[int, ...]
    proposal: Proposal
    started_ns: int
    finished_ns: int


class Answer(NamedTuple):
    """To one request.

    Attributes:
        job: what committed its tokens.
        proposal: None when no tokens were wanted.
        was_prepared: whether the work began before the request came.
    """

    job: DraftJob
    proposal: Proposal | None
    was_prepared: bool


Push = Callable[[int, Sequence[Prepared]], Awaitable[None]]
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
        self._work: asyncio.Task[None] | None = None
        self._num_requests = 0

    async def draft(
        self,
        base_len: int,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        preparation: Preparation | None,
    ) -> Answer:
        """Commit tokens and draft what follows; then work ahead if asked to, until the next request.

        Args:
            base_len: committed length that the sequence is rolled back to.
            token_ids: committed tokens after it.
            num_draft_tokens: wanted; 0 with a preparation when the proposal was handed over before.

        Raises:
            SpecwireError: the request cannot be served.
        """
        self._num_requests += 1
        root = self._follow(base_len, token_ids)
        was_prepared = root is not None and await self._comes(root)
        if root is None or not was_prepared:
            root = self._begin(base_len, token_ids, num_draft_tokens, preparation)
        self._root = root
        proposal: Proposal | None = await root.future
        if proposal is not None and preparation is not None:
            self._work = asyncio.create_task(self._work_ahead(self._num_requests, root, preparation))
        if proposal is not None:
            proposal = proposal.first(num_draft_tokens) if num_draft_tokens else None
        return Answer(root.job, proposal, was_prepared)

    def close(self) -> None:
        """End the work and close all forks; the stream's own sequence is its opener's."""
        if self._work is not None:
            self._work.cancel()
        self._close(self._branches)
        self._branches = []

    async def _comes(self, branch: Branch) -> bool:
        """Whether a branch that somebody waits for now gets its proposal.

        Memory to work ahead in may have run out just before the engine heard that it is waited for.
        """
        if not branch.future.done():
            self._engine.hurry(branch.job)
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
        committed = self._committed_since(base_len, token_ids)
        found = next((b for b in self._branches if b.path == committed and not b.failed), None)
        alive: list[Branch] = []
        if found is not None:
            num = len(found.path)
            alive = [b for b in self._branches if b is not found and b.path[:num] == found.path]
        self._close(b for b in self._branches if b is not found and b not in alive)
        self._branches = alive
        if found is not None:
            self._engine.adopt(self._sequence, found.job.sequence)
            root_path, root_worth = found.path, found.worth
            for branch in (found, *alive):
                branch.path = branch.path[len(root_path) :]
                branch.worth = branch.job.worth = branch.worth / root_worth
                branch.num_listed = 0  # what was not worth listing may be now
        return found

    def _committed_since(self, base_len: int, token_ids: Sequence[int]) -> tuple[int, ...] | None:
        """Tokens committed after the root's own, if the root is what they build on; teaches the forecast."""
        root = self._root
        proposal = root.proposal if root else None
        if root is None or proposal is None or base_len < root.job.committed_len:
            return None
        committed = (*proposal.token_ids[: base_len - root.job.committed_len], *token_ids)
        num_accepted, drafted = len(committed) - 1, tuple(proposal.token_ids)
        if 0 <= num_accepted <= len(drafted) and committed[:-1] == drafted[:num_accepted]:
            self._learn(root, len(drafted), num_accepted, committed[-1])
        return committed

    def _learn(self, root: Branch, num_drafted: int, num_accepted: int, next_token: int) -> None:
        candidates = root.candidates
        if num_accepted < len(candidates):
            known = candidates[num_accepted]
            rank = known.index(next_token) if next_token in known else None
            self._forecast.add(num_drafted, num_accepted, rank)

    def _close(self, branches: Iterable[Branch]) -> None:
        for branch in branches:
            self._engine.close_sequence(branch.job.sequence)

    # --- ahead of the next request ---

    async def _work_ahead(self, number: int, root: Branch, preparation: Preparation) -> None:
        """Until the next request comes, or until nothing more is worth the work."""
        while waits := self._branch_out(root, preparation):
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if number != self._num_requests:
                return
            ready = [branch for branch in self._branches if branch.proposal and not branch.pushed]
            ready.sort(key=lambda branch: -branch.worth)
            prepared = [
                Prepared(b.path, b.proposal, b.job.started_ns, b.job.finished_ns) for b in ready if b.proposal
            ]
            for branch in ready:
                branch.pushed = True
            if prepared:
                await self._push(root.job.committed_len, prepared)

    def _branch_out(self, root: Branch, preparation: Preparation) -> list[asyncio.Future[Any]]:
        """Begin with the likeliest outcomes that have no branch; returns what is being worked on."""
        failed = [branch for branch in self._branches if branch.failed]
        self._close(failed)
        self._branches = [branch for branch in self._branches if branch not in failed]
        for branch in (root, *self._branches):
            self._peek(branch, root)
            branch.list_outcomes(self._forecast)
        expected = [worth for branch in (root, *self._branches) for worth in branch.expected]
        while True:
            parent = max((root, *self._branches), key=lambda branch: branch.next_worth)
            # What a peek will show in a moment has its place kept, where it is worth more.
            num_kept = sum(worth > parent.next_worth for worth in expected)
            is_full = len(self._branches) + num_kept >= preparation.num_outcomes
            if is_full or parent.next_worth < MIN_WORTH:
                break
            self._add_branch(parent, root, preparation.num_draft_tokens)
        futures = [future for b in (root, *self._branches) for future in (b.future, b.peek) if future]
        return [future for future in futures if not future.done()]

    def _peek(self, branch: Branch, root: Branch) -> None:
        """Find out what may follow a whole proposal, once it is there."""
        proposal = branch.proposal
        if proposal is None or branch.peek is not None:
            return
        shares = self._forecast.after_all(len(proposal.token_ids))
        branch.after_all = [branch.worth * share for share in shares]
        job = PeekJob(
            self._sequence if branch is root else branch.job.sequence,
            branch.job.committed_len + len(proposal.token_ids),
            [],
            vocab_limit=self._vocab_limit,
            num_candidates=NUM_RANKS,
            worth=sum(branch.after_all),
        )
        if branch.after_all[0] >= MIN_WORTH:
            branch.peek = self._submit(job, 0)

    def _add_branch(self, parent: Branch, root: Branch, num_draft_tokens: int) -> None:
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
            parent=self._sequence if parent is root else parent.job.sequence,
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
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future


def _result(future: asyncio.Future[Any]) -> Any:
    """What came of it; None as long as nothing did, or when it failed."""
    failed = not future.done() or future.cancelled() or future.exception() is not None
    return None if failed else future.result()
