"""The draft service with a drafter of its own: before each pass of the draft, guesses of what it will draw.

    jobs before a pass ──▶ look ──▶ how many pay ──▶ guess ──▶ InnerJob.run_also ──▶ draw and compare

Hierarchical speculation: the target judges the draft's tokens, and the draft those of the inner drafter.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from draft_service.inner.jobs import InnerJob
from draft_service.inner.pace import MOST_GUESSES, Look, Pace
from draft_service.inner.stream import InnerDrafter, InnerStream
from specwire.core import SamplingParams
from specwire.engine.boot import ModelService
from specwire.engine.jobs import Job
from specwire.errors import SpecwireError
from specwire.proposals.estimate.costs import CostModel
from specwire.proposals.estimate.rates import Rate

log = logging.getLogger(__name__)


class Hierarchy:
    """One inner drafter for all streams of a service.

    Args:
        name: of the inner drafter, for the handshake.
        load: makes it, given the draft's vocabulary size.

    Attributes:
        drafter: once it is loaded.
    """

    drafter: InnerDrafter

    def __init__(self, name: str, load: Callable[[int], InnerDrafter]) -> None:
        self._name = name
        self._load = load
        self._has_failed = False
        self._rates: defaultdict[bool, dict[int, Rate]] = defaultdict(dict)

    def load(self, vocab_size: int) -> None:
        """See `StepHook`."""
        self.drafter = self._load(vocab_size)

    def described(self, service: ModelService) -> ModelService:
        """The service, with what guesses for it in its handshake."""
        return dataclasses.replace(service, info=dataclasses.replace(service.info, inner=self._name))

    def open(self, params: SamplingParams) -> InnerStream | None:
        """For a new stream; None under rejection sampling, where the number of passes must not depend on
        tokens that are not judged. Any thread."""
        if not params.matches_tokens:
            return None
        return InnerStream(self.drafter.open(), Pace(self._rates[params.greedy]))

    def before_step(self, jobs: Sequence[Job], costs: CostModel) -> None:
        """Give jobs that begin another pass their guesses, if it can; see `StepHook`."""
        if self._has_failed:
            return
        try:
            self._guess(jobs, costs)
        except SpecwireError as error:
            log.debug("no guesses: %s", error)
        except Exception:
            log.exception("%s failed, and guesses no more", self._name)
            self._has_failed = True

    def _guess(self, jobs: Sequence[Job], costs: CostModel) -> None:
        asked: list[InnerJob] = []
        looks: list[Look] = []
        nums: list[int] = []
        for job in jobs:
            if not isinstance(job, InnerJob) or not job.is_open:
                continue
            job.is_open, pace = False, job.inner.pace
            if job.inner.is_closed or not pace.is_due():
                continue
            look = self.drafter.look(job)
            num = pace.num_guesses(look, self._times(min(job.room, MOST_GUESSES), len(jobs), costs))
            if look is not None and num:
                asked.append(job)
                looks.append(look)
                nums.append(num)
        found = self.drafter.guess(asked, looks, nums) if asked else []
        for job, look, token_ids in zip(asked, looks, found, strict=True):
            job.run_also(look.kind, token_ids)

    def _times(self, most: int, num_jobs: int, costs: CostModel) -> list[float]:
        """[most + 1] of a pass in which each job has so many guesses, in ns."""
        least_ns = costs.predict((num_jobs, num_jobs))
        if not least_ns:
            return [1.0] * (most + 1)
        _, token_ns = costs.rates
        return [least_ns + num * (num_jobs * token_ns + self.drafter.guess_ns) for num in range(most + 1)]

    def close(self) -> None:
        """Once nothing runs any more."""
        self.drafter.close()
