"""Chooses what goes into the next step: pure, no thread, no model.

    step  | oldest sequence | rounds of running streams | prompts, in chunks | background |  <= max_num_tokens

Rounds come before prompts, and prompts get at most `max_prefill_tokens` beside them, so that a long prompt
does not delay running streams, those included that will send their next round in a moment; without running
streams, prompts get the whole step. The oldest sequence that has work always comes first, and may evict the
caches of all others, which guarantees progress. Background jobs get the time that costs the others next to
nothing, and evict no cache.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from specwire.engine.batch import Feed, Feeds
from specwire.engine.jobs import MAX_CATCH_UP_TOKENS, Job, TokenSequence

_ACTIVE_WITHIN_NS = 1_000_000_000
"""A stream answered within this time is likely to send its next round during the step."""


@dataclass(slots=True)
class Step:
    """Jobs, and what each contributes to the pass, in the same order.

    Attributes:
        budget: tokens that still fit.
        num_tokens: to be run.
        num_pages: that the feeds will allocate.
    """

    budget: int
    jobs: list[Job] = field(default_factory=list)
    feeds: Feeds = field(default_factory=Feeds)
    num_tokens: int = 0
    num_pages: int = 0


@dataclass
class Scheduler:
    """Plans steps within a token budget and the memory there is.

    Attributes:
        sequences: all open ones; the caller's own, and it may change.
        max_num_tokens: limit of a step.
        max_prefill_tokens: limit of prompt tokens in it while other streams are running.
        prefix_sharing: fill an empty cache with known pages first.
        num_preemptions: sequences that lost their cache to another one.
        num_hit_tokens: tokens found in the cache instead of being run.
    """

    sequences: Collection[TokenSequence]
    max_num_tokens: int
    max_prefill_tokens: int
    prefix_sharing: bool
    num_preemptions: int = 0
    num_hit_tokens: int = 0

    def plan(self, jobs: Sequence[Job], now_ns: int) -> Step:
        """The next step for these jobs, first come first served within each kind; empty without any."""
        if not jobs:
            return Step(self.max_num_tokens)
        return self._whole(jobs) or self._chosen(jobs, now_ns)

    def _whole(self, jobs: Sequence[Job]) -> Step | None:
        """All jobs, if nothing is to be chosen: none is a prompt, and there is room for all."""
        sequences, num_rows = [job.sequence for job in jobs], [job.num_rows for job in jobs]
        caches = [sequence.cache for sequence in sequences]
        lengths, pool = [cache.length for cache in caches], caches[0].pool
        num_query = [*map(operator.sub, [len(each.tokens) for each in sequences], lengths)]
        num_tokens = sum(num_query)
        longest = max(map(operator.sub, num_query, num_rows))
        if not all(lengths) or longest > MAX_CATCH_UP_TOKENS or num_tokens > self.max_num_tokens:
            return None
        num_pages = sum(
            cache.pages_needed(num)
            for cache, length, num in zip(caches, lengths, num_query, strict=True)
            if length + num > cache.writable_len
        )
        if num_pages > pool.num_free_pages:
            return None
        token_ids = [each.tokens[length:] for each, length in zip(sequences, lengths, strict=True)]
        feeds = Feeds(caches, [*token_ids], num_rows, [each.tree for each in sequences])
        return Step(self.max_num_tokens - num_tokens, [*jobs], feeds, num_tokens, num_pages)

    def _chosen(self, jobs: Sequence[Job], now_ns: int) -> Step:
        step = Step(self.max_num_tokens)
        oldest = min(jobs, key=_order)
        rounds: list[Job] = []
        prompts: list[Job] = []
        for job in jobs:
            if job is not oldest:
                (prompts if job.is_prefill else rounds).append(job)
        is_prompt = oldest.is_prefill
        delays_others = bool(rounds) or not is_prompt or self._others_active(jobs, now_ns)
        prefill = self.max_prefill_tokens if delays_others else self.max_num_tokens
        self._add(step, oldest, prefill if is_prompt else step.budget, jobs)
        if is_prompt:
            prefill -= step.num_tokens
        for job in rounds:
            self._add(step, job, step.budget, jobs)
        prefill = min(prefill, step.budget)
        for job in prompts:
            left = step.budget
            if prefill <= 0 or not self._add(step, job, prefill, jobs):
                break  # looking the later ones up in the prefix cache would be wasted work in every step
            prefill -= left - step.budget
        return step

    def fill(self, step: Step, background: Sequence[Job], num_tokens: int) -> None:
        """Add background jobs by worth, up to `num_tokens`; an empty step takes at least one."""
        for job in sorted(background, key=lambda job: -job.worth):
            limit = min(step.budget, num_tokens if step.jobs else step.budget)
            left = step.budget
            if limit <= 0 or not self._add(step, job, limit, (), may_evict=False):
                break
            num_tokens -= left - step.budget

    def _others_active(self, jobs: Sequence[Job], now_ns: int) -> bool:
        """Whether a stream without a job was answered recently, and is likely to return during the step."""
        waiting = set(map(_order, jobs))
        sequences = list(self.sequences)  # a copy, since the event loop opens and closes sequences meanwhile
        since_ns = now_ns - _ACTIVE_WITHIN_NS
        return any(s.answered_ns > since_ns and s.order not in waiting for s in sequences)

    def _add(
        self, step: Step, job: Job, limit: int, waiting: Sequence[Job], *, may_evict: bool = True
    ) -> bool:
        """Add the job, or a chunk of it, to the step; False when there is no budget or no memory for it."""
        sequence = job.sequence
        cache = sequence.cache
        num_found = 0 if cache.length else self._reuse_prefix(job)
        if num_found:  # an earlier job may have to copy a page that is shared from now on
            needs = zip(step.feeds.caches, step.feeds.num_query, strict=True)
            step.num_pages = sum(cache.pages_needed(num) for cache, num in needs)
        feed = _next_feed(job, min(limit, step.budget))
        num_tokens = len(feed.token_ids) if feed else 0
        num_pages = cache.pages_needed(num_tokens)
        fits = num_pages <= 0 or cache.pool.num_free_pages >= step.num_pages + num_pages
        if feed is None or not (fits or (may_evict and self._make_room(sequence, step, num_pages, waiting))):
            cache.truncate(cache.length - num_found)
            return False
        step.jobs.append(job)
        step.feeds.add(feed)
        step.budget -= num_tokens
        step.num_tokens += num_tokens
        step.num_pages += num_pages
        if num_found:
            job.num_cached_tokens += num_found
            self.num_hit_tokens += num_found
        return True

    def _reuse_prefix(self, job: Job) -> int:
        """Fill an empty cache with the known pages of its tokens; returns how many tokens were found.

        The rows whose logits are wanted are always run, at least one token is, and nodes of a tree are.
        """
        sequence = job.sequence
        if not self.prefix_sharing:
            return 0
        chain = sequence.chain
        num_tokens = min(len(chain), len(sequence.tokens) - max(1, job.num_rows))
        return sequence.cache.reuse_prefix(chain, num_tokens)

    def _make_room(self, sequence: TokenSequence, step: Step, num_pages: int, waiting: Sequence[Job]) -> bool:
        """Free pages by evicting the caches of other sequences, youngest first; they run their tokens again.

        A sequence is evicted for older ones only, unless it has no job. So the oldest one with work always
        makes progress, and no job waits for a stream that is idle.
        """
        pool, wanted = sequence.cache.pool, step.num_pages + num_pages
        running, has_job = set(map(_order, step.jobs)), set(map(_order, waiting))
        for victim in sorted(self.sequences, key=lambda other: -other.order):
            is_evictable = victim.order > sequence.order or victim.order not in has_job
            if victim is sequence or victim.order in running or not is_evictable or not victim.cache.length:
                continue
            victim.cache.truncate(0)
            self.num_preemptions += 1
            if pool.num_free_pages >= wanted:
                return True
        return False


def _order(job: Job) -> int:
    return job.sequence.order


def _next_feed(job: Job, budget: int) -> Feed | None:
    """The job's next feed within the budget: all its tokens, or a chunk before the rows that need logits.

    The input of an encoder is run at once, and a token after it, whatever is left of the budget.
    """
    sequence, cache = job.sequence, job.sequence.cache
    pending = sequence.tokens[cache.length :]
    num_free, num_read = len(pending) - job.num_rows, 0 if cache.length else cache.encoder_len
    if num_read and budget > 0:
        budget = max(budget, num_read + 1)
        if num_read >= num_free:
            return Feed(cache, pending, job.num_rows, sequence.tree)
    if len(pending) <= budget:
        return Feed(cache, pending, job.num_rows, sequence.tree)
    size = min(budget, num_free)
    return Feed(cache, pending[:size], 0, sequence.tree) if size > 0 else None
