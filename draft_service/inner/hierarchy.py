"""The draft service with a drafter of its own: before each pass of the draft, guesses of what it will draw.

    jobs before a pass ──▶ look ──▶ how many pay ──▶ guess ──▶ InnerJob.run_also ──▶ draw and compare

Hierarchical speculation: the target judges the draft's tokens, and the draft those of the inner drafter.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from draft_service.drafter import DraftDecider
from draft_service.inner.jobs import InnerJob, InnerStream
from draft_service.inner.model import ModelDrafter
from draft_service.inner.pace import MOST_GUESSES, Pace
from specwire.config.services import DraftConfig
from specwire.config.speculative import INNER_METHODS, NGRAM, SpeculativeConfig
from specwire.core import SamplingParams
from specwire.engine import boot
from specwire.engine.jobs import Job
from specwire.errors import ModelLoadError, SpecwireError
from specwire.proposals.estimate.costs import CostModel
from specwire.proposals.estimate.rates import Rate
from specwire.proposals.history import MAX_CONTINUATIONS, Guess, History
from specwire.text.tokenizer import load as load_tokenizer

log = logging.getLogger(__name__)


class InnerDrafter(Protocol):
    """Guesses what the draft will draw next. Engine thread only.

    Attributes:
        guess_ns: measured time of one further guess of all jobs of a pass.
    """

    guess_ns: float

    def open(self) -> Any:
        """What it keeps of a new stream's committed tokens; any thread."""

    def commit(self, memory: Any, base_len: int, tokens: Sequence[int], length: int) -> None:
        """Roll back to a base; then the first so many of these tokens are committed.

        If they are not, guesses are poor and nothing else is wrong: every one is compared.
        """

    def look(self, job: InnerJob) -> Guess | None:
        """What is known of the tokens that follow the job's, at no cost to speak of."""

    def guess(
        self, jobs: Sequence[InnerJob], looks: Sequence[Guess], nums: Sequence[int]
    ) -> list[Sequence[int]]:
        """At most so many tokens for each job.

        Raises:
            SpecwireError: it cannot guess now.
        """

    def release(self, memory: Any) -> None:
        """Free what it keeps of a stream."""

    def close(self) -> None:
        """Free its device; nothing runs any more."""


class TextGuesser:
    """An `InnerDrafter`: guesses from the stream's own text, as `ngram` and `suffix` guess the target's.

    Args:
        method: one of these. Earlier outputs are not read.
    """

    guess_ns = 0.0

    def __init__(self, method: str) -> None:
        self._config = SpeculativeConfig(method=method)
        self._num_counted = 1 if method == NGRAM else MAX_CONTINUATIONS

    def open(self) -> History:
        return History(self._config.prompt_lookup_min, self._config.prompt_lookup_max)

    def commit(self, memory: History, base_len: int, tokens: Sequence[int], length: int) -> None:
        memory.truncate(base_len)
        memory.extend(tokens[memory.length : length])

    def look(self, job: InnerJob) -> Guess | None:
        memory: History = job.inner.memory
        num_committed = memory.length
        memory.extend(job.sequence.tokens[num_committed:])
        found = memory.guess(min(job.room, MOST_GUESSES), self._num_counted)
        memory.truncate(num_committed)
        return found

    def guess(
        self, jobs: Sequence[InnerJob], looks: Sequence[Guess], nums: Sequence[int]
    ) -> list[Sequence[int]]:
        return [look.token_ids[:num] for look, num in zip(looks, nums, strict=True)]

    def release(self, memory: History) -> None: ...

    def close(self) -> None: ...


class Hierarchy:
    """One inner drafter for all streams of a service: a `StepHook`.

    Attributes:
        name: of the inner drafter, for the handshake.
        drafter: once it is loaded.
    """

    drafter: InnerDrafter

    def __init__(self, config: DraftConfig) -> None:
        """What `--inner` asks for."""
        self._config, inner = config, config.inner
        self.name = Path(inner).name if Path(inner).exists() else inner
        self._has_failed = False
        self._rates: defaultdict[bool, dict[int, Rate]] = defaultdict(dict)

    def load(self, vocab_size: int) -> None:
        """See `StepHook`.

        Raises:
            ModelLoadError: the model cannot be loaded, or its tokenizer is not the draft's.
        """
        config = self._config
        if config.inner in INNER_METHODS:
            self.drafter = TextGuesser(config.inner)
            return
        source = boot.resolve(config.inner, "draft")
        found = map(load_tokenizer, (source, boot.resolve(config.model, "draft")))
        ours, theirs = (tokenizer.fingerprint if tokenizer else "" for tokenizer in found)
        if ours != theirs:
            raise ModelLoadError(
                f"--inner {config.inner}: its tokenizer is not that of --model {config.model}"
            )
        own = dataclasses.replace(
            config,
            model=config.inner,
            inner="",
            batch_invariant=False,
            kv_cache_memory=0.0,
            gpu_memory_utilization=0.0,
            least_pass_ms=0.0,
        )
        from specwire.engine import models  # takes seconds to import, and text needs none of it

        try:
            runner, description = models.make_runner(own, source)
        except ModelLoadError as error:
            raise ModelLoadError(f"--inner {error}") from error
        if runner.pool.keeps_states:
            raise ModelLoadError(f"--inner {source}: has recurrent layers, which guess for no draft")
        self.drafter = ModelDrafter(
            runner,
            DraftDecider(own),
            context_len=min(description["context_len"], own.num_kv_tokens),
            vocab_limit=vocab_size,
            max_prefill_tokens=own.max_prefill_tokens,
        )

    def open(self, params: SamplingParams) -> InnerStream | None:
        """For a new stream; None under rejection sampling, where the number of passes must not depend on
        tokens that are not judged. Any thread."""
        if not params.matches_tokens:
            return None
        return InnerStream(self.drafter, Pace(self._rates[params.greedy]))

    def before_step(self, jobs: Sequence[Job], costs: CostModel) -> None:
        """Give jobs that begin another pass their guesses, if it can; see `StepHook`."""
        if self._has_failed:
            return
        try:
            self._guess(jobs, costs)
        except SpecwireError as error:
            log.debug("no guesses: %s", error)
        except Exception:
            log.exception("%s failed, and guesses no more", self.name)
            self._has_failed = True

    def _guess(self, jobs: Sequence[Job], costs: CostModel) -> None:
        asked: list[InnerJob] = []
        looks: list[Guess] = []
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
