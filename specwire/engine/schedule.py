"""What goes into the next step: pure choice, no thread, no model.

    step  | oldest sequence | rounds of running streams | prompts, in chunks | background |  <= max_num_tokens

Rounds come before prompts, and prompts get at most `max_prefill_tokens` beside them, so that a long prompt
does not hold up running streams, those included that will be back in a moment; without any, prompts get the
whole step. The oldest sequence that has work comes first whatever it has, and takes memory from all others:
so somebody always gets on. Background jobs get what costs the others next to nothing, and nobody's memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field

from specwire.engine.batch import Feed
from specwire.engine.jobs import Job, TokenSequence

_BACK_WITHIN_NS = 1_000_000_000


@dataclass(slots=True)
class Step:
    """Jobs and what each contributes, side by side.

    Attributes:
        budget: tokens that still fit.
        num_pages: pages that the feeds will take from the pool.
    """

    budget: int
    jobs: list[Job] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    num_pages: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens to be run."""
        return sum(len(feed.token_ids) for feed in self.feeds)


class Scheduler:
    """Plans steps within a token budget and the memory there is.

    Args:
        sequences: all open ones; the caller's own, and it may change.
        max_num_tokens: in one step.
        max_prefill_tokens: of prompts, in a step that has rounds of running streams too.
        prefix_sharing: begin an empty cache with pages that are known.

    Attributes:
        num_preemptions: sequences that lost their cache to another one.
        num_hit_tokens: tokens found in the cache instead of being run.
    """

    def __init__(
        self,
        sequences: Collection[TokenSequence],
        *,
        max_num_tokens: int,
        max_prefill_tokens: int,
        prefix_sharing: bool,
    ) -> None:
        self._sequences = sequences
        self._max_num_tokens = max_num_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._prefix_sharing = prefix_sharing
        self.num_preemptions = 0
        self.num_hit_tokens = 0

    def plan(self, jobs: Sequence[Job], now_ns: int) -> Step:
        """The next step for these jobs, first come first served within each kind; empty without any."""
        step = Step(self._max_num_tokens)
        if not jobs:
            return step
        waiting = {job.sequence.order for job in jobs}
        oldest = min(jobs, key=lambda job: job.sequence.order)
        rounds = [job for job in jobs if job is not oldest and not job.is_prefill]
        prompts = [job for job in jobs if job is not oldest and job.is_prefill]
        disturbs = bool(rounds) or not oldest.is_prefill or self._anyone_runs(waiting, now_ns)
        prefill = self._max_prefill_tokens if disturbs else self._max_num_tokens
        self._add(step, oldest, prefill if oldest.is_prefill else step.budget, waiting)
        if oldest.is_prefill:
            prefill -= step.num_tokens
        for job in rounds:
            self._add(step, job, step.budget, waiting)
        prefill = min(prefill, step.budget)
        for job in prompts:
            left = step.budget
            if prefill <= 0 or not self._add(step, job, prefill, waiting):
                break  # those behind it would only be looked up in the cache in vain, step after step
            prefill -= left - step.budget
        return step

    def fill(self, step: Step, background: Sequence[Job], num_tokens: int) -> None:
        """Add background jobs, the worthiest first, up to so many tokens; an empty step takes one anyway."""
        waiting = {job.sequence.order for job in step.jobs}
        for job in sorted(background, key=lambda job: -job.worth):
            limit = min(step.budget, num_tokens if step.jobs else step.budget)
            left = step.budget
            if limit <= 0 or not self._add(step, job, limit, waiting, may_evict=False):
                break
            num_tokens -= left - step.budget

    def _anyone_runs(self, waiting: Set[int], now_ns: int) -> bool:
        """Whether a stream was answered of late, and is likely to be back during the step."""
        sequences = list(self._sequences)  # at once: others are opened and closed meanwhile
        since_ns = now_ns - _BACK_WITHIN_NS
        return any(s.answered_ns > since_ns and s.order not in waiting for s in sequences)

    def _add(self, step: Step, job: Job, limit: int, waiting: Set[int], *, may_evict: bool = True) -> bool:
        """Put the job, or a piece of it, into the step; False when there is no budget or no memory for it."""
        cache, num_found = job.sequence.cache, self._adopt_prefix(job)
        if num_found:  # a page that a job before was to write in place may be shared since
            step.num_pages = sum(feed.cache.pages_needed(len(feed.token_ids)) for feed in step.feeds)
        feed = _next_feed(job, min(limit, step.budget))
        num_pages = cache.pages_needed(len(feed.token_ids)) if feed else 0
        fits = cache.pool.num_free_pages >= step.num_pages + num_pages
        if feed is None or not (
            fits or (may_evict and self._make_room(job.sequence, step, num_pages, waiting))
        ):
            cache.truncate(cache.length - num_found)
            return False
        step.jobs.append(job)
        step.feeds.append(feed)
        step.budget -= len(feed.token_ids)
        step.num_pages += num_pages
        job.num_cached_tokens += num_found
        self.num_hit_tokens += num_found
        return True

    def _adopt_prefix(self, job: Job) -> int:
        """Begin an empty cache with what is known of its tokens; returns how many were found.

        The rows whose logits are wanted are run in any case, and so is at least one token.
        """
        sequence = job.sequence
        if not self._prefix_sharing or sequence.cache.length:
            return 0
        return sequence.cache.adopt(sequence.tokens, len(sequence.tokens) - max(1, job.num_rows))

    def _make_room(self, sequence: TokenSequence, step: Step, num_pages: int, waiting: Set[int]) -> bool:
        """Free pages by taking the cache of others, youngest first; they run their tokens again later.

        A sequence gives way to older ones only, unless it idles between rounds. So the oldest one that
        has work always gets on, and nobody waits for a stream that does nothing.
        """
        pool, wanted = sequence.cache.pool, step.num_pages + num_pages
        running = {job.sequence.order for job in step.jobs}
        for victim in sorted(self._sequences, key=lambda other: -other.order):
            gives_way = victim.order > sequence.order or victim.order not in waiting
            if victim is sequence or victim.order in running or not gives_way or not victim.cache.length:
                continue
            victim.cache.truncate(0)
            self.num_preemptions += 1
            if pool.num_free_pages >= wanted:
                return True
        return False


def _next_feed(job: Job, budget: int) -> Feed | None:
    """The job's next piece within the budget: all of it, or a chunk that leaves the wanted rows whole."""
    pending = job.pending
    if len(pending) <= budget:
        return Feed(job.sequence.cache, pending, job.num_rows)
    size = min(budget, len(pending) - job.num_rows)
    return Feed(job.sequence.cache, pending[:size], 0) if size > 0 else None
