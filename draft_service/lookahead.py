"""One sequence of the draft service: proposals on request, and others prepared ahead of requests.

While the target verifies a proposal the draft works ahead: it forks the sequence for the likeliest outcomes
of the round, drafts what would follow each, all in the same forward passes, and hands over each proposal when
it is ready. When it gets ahead of the target, it continues with the likeliest outcomes of those proposals.

    root        committed tokens, and the proposal that is being verified
    branches    an outcome of the root or of another branch, and the proposal that follows it

The next request commits tokens. If a branch was made for them, it becomes the root and keeps its own
branches; every other branch is closed, and its memory is free before the next forward pass. Proposals are the
same as if they had been requested: a draft token depends only on seed, position and the tokens before it, and
under block verification on the committed length that the branch is for.

It never waits: each call does what can be done now, and the engine's results continue it. Knows no grpc.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from draft_service.chains import ChainsJob
from draft_service.drafter import DraftJob, LeavesJob, PeekJob, TreeJob
from draft_service.forecast import Forecast, Likely
from draft_service.inner.jobs import InnerJob, InnerStream
from draft_service.lessons import Lesson
from draft_service.strings import StringJob
from draft_service.translation import Committed, Transcript
from specwire.core import MAX_TREE_NODES, Preparation, Proposal
from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.loop import Engine
from specwire.engine.replies import Sink
from specwire.errors import ResourceExhaustedError, SpecwireError
from specwire.proposals.growth import NUM_EXPANDED, NUM_RANKS, TreeGrowth
from specwire.rpc.wire.draft import DraftOrder
from specwire.rule.columns import EDITED
from specwire.telemetry.tracing import Span

MAX_REQUESTS = 64
"""Most requests of a sequence that are queued or served. A coordinator has one or two at a time."""
MIN_WORTH = 0.005
"""Outcomes less likely than this are not prepared."""


@dataclass(eq=False, slots=True)
class Branch:
    """A proposal, finished or in progress, and the tokens between the root's committed ones and it.

    Attributes:
        path: these tokens; empty for the root.
        worth: estimated probability that the proposal will be requested.
        done: its job has ended.
        proposal: None while it is in progress, when it failed, and where no tokens were wanted.
        error: what its job failed with.
        pushed: the proposal was handed over.
        peeked: a job was submitted that finds the candidates after the whole proposal.
        bonus_worths: worth of each of them while that job runs.
        outcomes: outcomes of its own proposal without a branch, likeliest last.
        taken: the tokens of the outcomes that have a branch, or had one.
        num_listed: positions whose candidates are in `outcomes`; nodes of a tree.
    """

    job: DraftJob
    path: tuple[int, ...] = ()
    worth: float = 1.0
    done: bool = False
    proposal: Proposal | None = None
    error: SpecwireError | None = None
    pushed: bool = False
    peeked: bool = False
    bonus_worths: list[float] = field(default_factory=list)
    outcomes: list[Likely] = field(default_factory=list)
    taken: set[tuple[int, ...]] = field(default_factory=set)
    num_listed: int = 0

    def settle(self, job: Job, result: Any) -> None:
        """The result of its job, or of the one that looked at what follows."""
        error = result if isinstance(result, SpecwireError) else None
        if job is self.job:
            self.done, self.error = True, error
            self.proposal = None if error else result
        else:
            self.bonus_worths = []
            if isinstance(job, PeekJob) and not error:
                self.job.candidates.append(result)

    @property
    def next_worth(self) -> float:
        """Worth of its likeliest outcome without a branch."""
        return self.worth * self.outcomes[-1].probability if self.outcomes else 0.0

    def list_outcomes(self, forecast: Forecast) -> None:
        """List the outcomes again if candidates of another position are known by now."""
        job = self.job
        num_known = job.growth.num_nodes if isinstance(job, TreeJob) else len(job.candidates)
        if self.proposal is None or num_known <= self.num_listed:
            return
        self.num_listed, least = num_known, MIN_WORTH / self.worth
        if isinstance(job, TreeJob):
            likely = _of_tree(job, least)
        else:
            likely = forecast.outcomes(self.proposal.token_ids, job.candidates, least)
        self.outcomes = [outcome for outcome in reversed(likely) if outcome.token_ids not in self.taken]

    def leaves(self) -> list[int]:
        """Nodes of its tree whose candidates are not known, best first."""
        if not isinstance(self.job, TreeJob):
            return []
        growth = self.job.growth
        known = set(growth.expanded)
        room = min(NUM_EXPANDED, MAX_TREE_NODES - len(known))
        leaves = [node for node in self.job.nodes if node not in known]
        return [node for node in leaves if growth.worths[node] * self.worth >= MIN_WORTH][:room]


@dataclass(eq=False, slots=True)
class Request:
    """A request that is queued, served, or answered.

    Attributes:
        received_ns: when it arrived, by the stopwatch.
        span: around it.
        root: the branch that is its answer, once it is served.
        was_prepared: the work on it had begun before.
        ahead_ns: passes for it that had ended when its turn came.
    """

    order: DraftOrder
    received_ns: int
    span: Span
    root: Branch | None = None
    was_prepared: bool = False
    ahead_ns: int = 0

    @property
    def job(self) -> DraftJob:
        """The job that committed its tokens."""
        assert self.root is not None
        return self.root.job

    @property
    def proposal(self) -> Proposal:
        """Its answer; empty where no tokens were wanted."""
        assert self.root is not None
        found, num_wanted = self.root.proposal, self.order.num_wanted
        if found is None or not num_wanted:
            return Proposal(self.root.job.committed_len)
        return found if len(found.token_ids) <= num_wanted else found.first(num_wanted)


@dataclass(eq=False)
class Lookahead:
    """Drafts for one sequence.

    Attributes:
        sequence: it lives longer than this.
        vocab_limit: token ids from here on are never proposed; 0 for no limit.
        forecast: of this sequence's rounds.
        transcript: of a draft with another vocabulary than the target.
        lesson: collects the committed tokens for a draft that learns.
        sink: gets the results of all jobs, to pass each on to `settle`; the tag of a job is the id of the
            sequence, and the branch that it is for.
        answer: called with every request that was served.
        inner: of a draft with a drafter of its own, for this sequence.
        requests: the one that is served, and those that wait for it.
    """

    engine: Engine
    sequence: TokenSequence
    _: KW_ONLY
    sequence_id: int
    vocab_limit: int
    forecast: Forecast
    sink: Sink
    answer: Callable[[Request], None]
    transcript: Transcript | None = None
    inner: InnerStream | None = None
    lesson: Lesson | None = None
    requests: deque[Request] = field(init=False, default_factory=deque)
    _root: Branch | None = field(init=False, default=None)
    _branches: list[Branch] = field(init=False, default_factory=list)
    # For the root; None while a request is served.
    _preparation: Preparation | None = field(init=False, default=None)

    @property
    def works_ahead(self) -> bool:
        """Whether something is to be prepared now."""
        return self._preparation is not None

    def request(self, request: Request) -> None:
        """Commit its tokens and draft what follows; then work ahead if asked to, until the next request.

        Raises:
            SpecwireError: it cannot be served, or too many wait; the sequence cannot be continued.
        """
        self.requests.append(request)
        if len(self.requests) > MAX_REQUESTS:
            raise ResourceExhaustedError(f"{MAX_REQUESTS} requests of a sequence are not answered")
        if len(self.requests) == 1:
            self._serve()

    def settle(self, branch: Branch, job: Job, result: Any) -> None:
        """The result of a job, or the error that it failed with.

        Errors of background jobs are not reported, since the sequence works without them.

        Raises:
            SpecwireError: a request cannot be served.
        """
        branch.settle(job, result)
        if self.requests and self.requests[0].root is branch:
            self._serve()

    def close(self) -> None:
        """Close all forks; the sequence itself belongs to the caller."""
        self._follow(None)
        self._preparation = None
        if self.inner is not None:
            self.engine.run_soon(self.inner.close)
        if self.lesson is not None:
            self.lesson.close()

    # --- requests -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Serve requests in their order, up to the first one whose proposal is not there yet."""
        while self.requests:
            request = self.requests[0]
            if request.root is None:
                self._begin(request)
            if not self._is_served(request):
                return
            self.requests.popleft()
            if request.root and request.root.proposal:
                self._preparation = request.order.prepare
            self.answer(request)

    def _begin(self, request: Request) -> None:
        """Take the branch that was made for its tokens, if there is one, else draft them."""
        self._preparation = None
        if self.lesson is not None:
            self.lesson.commit(request.order.base_len, request.order.token_ids, self._drafted)
        branch = self._prepared(request.order)
        if branch is None:
            branch = self._draft_unprepared(request.order)
        else:
            request.was_prepared, request.ahead_ns = True, branch.job.forward_ns
            if not branch.done:
                self.engine.promote(branch.job)
        request.root = self._root = branch
        if self.inner is not None:  # once the sequence holds what is committed
            base_len, length = request.order.base_len, request.order.base_len + len(request.order.token_ids)
            self.engine.run_soon(partial(self.inner.commit, self.sequence, base_len, length))

    def _is_served(self, request: Request) -> bool:
        """Whether its proposal is there.

        A branch may fail for lack of memory to work ahead in, just before the engine promotes its job: then
        the request gets a job of its own.
        """
        branch = request.root
        assert branch is not None
        if branch.error and request.was_prepared:
            request.was_prepared, request.ahead_ns = False, 0
            request.root = self._root = self._draft_unprepared(request.order)
            return False
        if branch.error:
            raise branch.error
        return branch.done

    def _prepared(self, order: DraftOrder) -> Branch | None:
        """The branch that was made for these tokens, which is the root from now on."""
        root = self._root
        if root is None or not root.job.num_candidates:  # nothing is prepared without candidates
            return None
        path = _path_from(root, order)
        if path:
            self._learn(root, path)
        return self._follow(path)

    def _draft_unprepared(self, order: DraftOrder) -> Branch:
        """Draft on the sequence itself, where nothing was prepared for these tokens.

        Raises:
            SpecwireError: it cannot be run at all.
        """
        committed = None
        if self.transcript is not None:
            committed = self.transcript.commit(order.base_len, order.token_ids, self._drafted)
        branch = Branch(
            self._job(
                self.sequence,
                order.base_len,
                order.token_ids,
                committed=committed,
                num_draft_tokens=order.num_draft_tokens,
                max_depth=order.max_depth,
                num_candidates=NUM_RANKS if order.prepare or order.max_depth else 0,
                num_chains=order.num_chains,
            )
        )
        self._submit(branch, branch.job, order.num_wanted)
        return branch

    def _job(
        self,
        sequence: TokenSequence,
        base_len: int,
        token_ids: Sequence[int],
        *,
        max_depth: int,
        committed: Committed | None,
        num_chains: int = 1,
        **fields: Any,
    ) -> DraftJob:
        """Drafts a tree, or a chain or several if its depth is 0; other arguments as of `DraftJob`."""
        fields |= {"vocab_limit": self.vocab_limit, "committed": committed}
        if committed is not None:  # the target may have more tokens than its tokenizer: padding
            fields["num_translated"] = self.vocab_limit
        kind: type[DraftJob] = DraftJob
        num_wanted = fields["num_draft_tokens"]
        # What a token of text is worth is known where nothing changes the logits of single tokens.
        is_text = committed is not None and sequence.params.greedy and not sequence.encoded.traits & EDITED
        if num_wanted and num_chains > 1:
            kind, fields["num_chains"] = ChainsJob, num_chains
        elif num_wanted and max_depth:
            kind, fields["growth"] = TreeJob, TreeGrowth(num_wanted, max_depth, self.forecast.calibration)
        elif self.inner is not None:
            kind, fields["inner"] = InnerJob, self.inner
        elif num_wanted and is_text:
            kind = StringJob
        return kind(sequence, base_len, token_ids, **fields)

    @property
    def _drafted(self) -> Sequence[int]:
        """The root's proposal, if it is a chain."""
        root = self._root
        return root.proposal.token_ids if root and root.proposal and not root.proposal.parents else ()

    def _followed(self, path: Sequence[int]) -> Committed | None:
        """The root's committed tokens and others after them; None as above."""
        return self.transcript.followed(path) if self.transcript else None

    def _submit(self, branch: Branch, job: DraftJob, extra_len: int, *, background: bool = False) -> None:
        job.tag = self.sequence_id, branch
        self.engine.submit(job, self.sink, extra_len, background=background)

    def _follow(self, path: tuple[int, ...] | None) -> Branch | None:
        """Make the branch of this path the new root, if there is one; close all that do not continue it."""
        before, self._branches = self._branches, []
        found = next((branch for branch in before if branch.path == path and not branch.error), None)
        for branch in before:
            if found is not None and branch is not found and branch.path[: len(found.path)] == path:
                self._branches.append(branch)
            elif branch is not found:
                self.engine.close_sequence(branch.job.sequence)
        if found is None:
            return None
        self.engine.replace_with_fork(self.sequence, found.job.sequence)
        if self.transcript is not None:
            self.transcript.follow(found.path)
        path_len, worth = len(found.path), found.worth
        for branch in (found, *self._branches):  # path and worth are measured from the new root
            branch.path = branch.path[path_len:]
            branch.worth = branch.job.worth = branch.worth / worth
            branch.num_listed = 0  # outcomes below the minimum worth may be above it now
        return found

    def _learn(self, root: Branch, path: tuple[int, ...]) -> None:
        """Tell the forecast how the root's round ended, if the path is an outcome of that one round."""
        assert root.proposal is not None
        if isinstance(root.job, TreeJob):
            root.job.growth.learn(path)
            return
        candidates, drafted = root.job.candidates, tuple(root.proposal.token_ids)
        num_accepted, next_token = len(path) - 1, path[-1]
        is_outcome = num_accepted <= len(drafted) and path[:-1] == drafted[:num_accepted]
        if is_outcome and num_accepted < len(candidates):
            known = candidates[num_accepted]
            rank = known.index(next_token) if next_token in known else None
            self.forecast.add(len(drafted), num_accepted, rank)

    # --- ahead of the next request --------------------------------------------------------------------

    def take_ready(self) -> Iterator[Branch]:
        """Finished proposals, each once, likeliest first; nothing while a request is served.

        Those that are not taken are found again next time, if they are still of use.
        """
        if self._preparation is None:
            return
        for branch in sorted(self._branches, key=lambda branch: -branch.worth):
            if branch.proposal and not branch.pushed:
                branch.pushed = True
                yield branch

    def work_ahead(self) -> None:
        """Branch out, where jobs have ended since the last time; nothing while a request is served.

        A result only marks its branch. What to do next is decided here, for all roots, from root and branches
        as they are now. A task for each root that outlived its root once branched out from tokens that were
        not committed: it drafted with random numbers that had been judged already, which biases the output
        distribution.
        """
        root, preparation = self._root, self._preparation
        if root is None or preparation is None:
            return
        for branch in (root, *self._branches):
            self._peek(branch)
            branch.list_outcomes(self.forecast)
        worths_to_come = [worth for branch in (root, *self._branches) for worth in branch.bonus_worths]
        while parent := self._next_parent(root, preparation.num_outcomes, worths_to_come):
            self._add_branch(parent, preparation)

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
        return self.sequence if branch is self._root else branch.job.sequence

    def _peek(self, branch: Branch) -> None:
        """Once a proposal is finished, find the candidates after all of it, or after leaves of its tree."""
        if branch.proposal is None or branch.peeked:
            return
        made, leaves, drafted = branch.job, branch.leaves(), list[int]()
        kind: type[PeekJob | LeavesJob] = PeekJob
        fields: dict[str, Any] = {"vocab_limit": self.vocab_limit, "num_candidates": NUM_RANKS}
        if isinstance(made, TreeJob):
            worths = [branch.worth * made.growth.worths[node] for node in leaves]
            kind = LeavesJob
            fields |= {"growth": made.growth, "leaves": leaves}
        else:
            drafted += branch.proposal.token_ids
            worths = [branch.worth * share for share in self.forecast.bonus_probabilities(len(drafted))]
        if not worths or worths[0] < MIN_WORTH:
            return
        fields |= {"worth": sum(worths), "committed": self._followed((*branch.path, *drafted))}
        job = kind(self._sequence_of(branch), made.committed_len + len(drafted), [], **fields)
        branch.peeked, branch.bonus_worths = True, worths
        try:
            self._submit(branch, job, len(leaves), background=True)
        except SpecwireError as error:  # the end of the context, or of the service
            branch.settle(job, error)

    def _add_branch(self, parent: Branch, preparation: Preparation) -> None:
        worth, token_ids = parent.next_worth, parent.outcomes.pop().token_ids
        parent.taken.add(token_ids)
        # What a fork shares of a tree is its prefix: the path in it is run again.
        num_shared = 0 if isinstance(parent.job, TreeJob) else len(token_ids) - 1
        path = (*parent.path, *token_ids)
        job = self._job(
            self.engine.open_fork(self.sequence),
            parent.job.committed_len + num_shared,
            token_ids[num_shared:],
            num_draft_tokens=preparation.num_draft_tokens,
            max_depth=preparation.max_depth,
            committed=self._followed(path),
            num_candidates=NUM_RANKS,
            parent=self._sequence_of(parent),
            worth=worth,
        )
        branch = Branch(job, path, worth)
        try:
            self._submit(branch, job, preparation.num_draft_tokens, background=True)
        except SpecwireError:  # the end of the context, or of the service
            self.engine.close_sequence(job.sequence)
        else:
            self._branches.append(branch)


def _path_from(root: Branch, order: DraftOrder) -> tuple[int, ...] | None:
    """Tokens committed after the root's own; None where they do not build on the root."""
    proposal, num_accepted = root.proposal, order.base_len - root.job.committed_len
    if proposal is None or num_accepted < 0 or (proposal.parents and num_accepted > 0):
        return None
    return (*proposal.token_ids[:num_accepted], *order.token_ids)


def _of_tree(job: TreeJob, least: float) -> list[Likely]:
    """The likely outcomes of a tree, likeliest first: nodes that follow it, or its prefix, outside of it."""
    growth, inside = job.growth, {-1, *job.nodes}
    likely = [
        Likely(growth.worths[node], tuple(growth.path_to(node)))
        for node in range(growth.num_nodes)
        if growth.worths[node] >= least and growth.parents[node] in inside and node not in inside
    ]
    return sorted(likely, key=lambda outcome: -outcome.probability)
