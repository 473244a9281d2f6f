"""Runs one planned step: the forward pass, the decider on its logits, and what to do when either fails."""

from __future__ import annotations

from collections.abc import Sequence

from specwire.engine.batch import Feeds
from specwire.engine.counts import EngineStatus
from specwire.engine.device import NO_DRAFTING, Decider, DeviceLostError, Runner
from specwire.engine.jobs import Job
from specwire.engine.replies import Replies
from specwire.engine.schedule import Step


class StepExecutor:
    """Engine thread only.

    Args:
        prefix_sharing: make complete pages known, so that other sequences find them.

    Attributes:
        drafting: of the last step.
    """

    def __init__(
        self,
        runner: Runner,
        decider: Decider,
        replies: Replies,
        counts: EngineStatus,
        *,
        prefix_sharing: bool,
    ) -> None:
        self._runner = runner
        self._decider = decider
        self._replies = replies
        self._counts = counts
        self._prefix_sharing = prefix_sharing
        self.drafting = NO_DRAFTING

    def run(self, step: Step) -> None:
        """Run all jobs of the step in one pass; if it fails, one by one, so that only jobs at fault fail.

        Raises:
            DeviceLostError: what all caches held is gone.
        """
        self.drafting = NO_DRAFTING
        try:
            self._forward(step.jobs, step.feeds)
        except DeviceLostError:
            raise
        except Exception as error:
            self._isolate(step, error)

    def _forward(self, jobs: Sequence[Job], feeds: Feeds) -> None:
        ready = [job for job, num_rows in zip(jobs, feeds.num_rows, strict=True) if num_rows]
        question = self._decider.ask(ready) if ready else None
        answer = self._runner.run(feeds, question, self._decider.decide)
        self._counts.add_pass(sum(feeds.num_query))
        if self._prefix_sharing:
            for job in jobs:
                sequence = job.sequence
                if sequence.cache.has_unnamed_page:
                    sequence.cache.remember(sequence.chain)
        if ready:
            self._decider.apply(ready, answer)
            self.drafting = self._decider.drafting
        self._runner.end_step()

    def _isolate(self, step: Step, error: Exception) -> None:
        jobs, feeds = step.jobs, step.feeds
        untouched = all(
            job.result is None and len(job.pending) >= len(feed.token_ids)
            for job, feed in zip(jobs, feeds, strict=True)
        )
        if len(jobs) == 1 or not untouched:
            for job in jobs:
                self._replies.fail(job, error)
            return
        for job, feed in zip(jobs, feeds, strict=True):
            try:
                self._forward([job], Feeds.of([feed]))
            except DeviceLostError:
                raise
            except Exception as own_error:
                self._replies.fail(job, own_error)
