"""A smaller model in the draft's process guesses the draft's tokens, with the draft's own noise.

Each stream has one sequence of the inner model, which keeps keys and values of its committed tokens. Guesses
follow a job's drafted tokens: they are run behind the committed ones and dropped again. Further jobs of a
stream, those that prepare outcomes, run on forks of its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafter import DraftDecider, DraftJob
from draft_service.inner.jobs import InnerJob
from specwire import clock
from specwire.core import SamplingParams
from specwire.engine.batch import Feed, Feeds
from specwire.engine.device import Runner
from specwire.engine.jobs import MAX_CATCH_UP_TOKENS, TokenSequence
from specwire.errors import ResourceExhaustedError
from specwire.proposals.history import Guess

_LOOK = Guess([], [], 0, 0.6)
_RATE, _MAX_JUMP = 0.2, 4.0
"""Of the moving average of `guess_ns`; a single pause of the machine is an outlier."""


@dataclass
class ModelDrafter:
    """See `InnerDrafter`.

    Attributes:
        context_len: most tokens of a sequence.
        vocab_limit: the draft's tokens are below it.
        max_prefill_tokens: most tokens of a prompt that a call runs: passes of the draft wait for it.
    """

    runner: Runner
    decider: DraftDecider
    context_len: int
    vocab_limit: int
    max_prefill_tokens: int
    guess_ns: float = 0.0

    def open(self) -> TokenSequence:
        """Its parameters are those of the stream, once a job of it has come."""
        return TokenSequence(SamplingParams(seed=0), 0, self.runner.new_sequence(), 0)

    def commit(self, memory: TokenSequence, base_len: int, tokens: Sequence[int], length: int) -> None:
        _truncate(memory, base_len)
        memory.tokens += tokens[len(memory.tokens) : length]

    def look(self, job: InnerJob) -> Guess | None:
        """Its guesses are alike, as far as it knows the text so far."""
        memory: TokenSequence = job.inner.memory
        tokens, cache = job.sequence.tokens, memory.cache
        fits = len(memory.tokens) <= len(tokens) <= self.context_len - job.room
        if not fits or max(tokens[cache.length :], default=0) >= self.runner.vocab_size:
            return None
        if len(tokens) - cache.length > self.max_prefill_tokens:
            # Run a part of a long text; the other parts come before later passes.
            if token_ids := memory.tokens[cache.length :][: self.max_prefill_tokens]:
                self.runner.run(Feeds.of([Feed(cache, token_ids, 0)]), None, self.decider.decide)
                self.runner.end_step()
            return None
        return _LOOK

    def guess(
        self, jobs: Sequence[InnerJob], looks: Sequence[Guess], nums: Sequence[int]
    ) -> list[Sequence[int]]:
        memories: list[TokenSequence] = [job.inner.memory for job in jobs]
        lengths = {memory: len(memory.tokens) for memory in memories}
        sequences = _sequences(jobs)
        drafts = [*map(self._draft, jobs, sequences, nums)]
        try:
            for _ in range(max(nums)):
                self._run([draft for draft in drafts if draft.result is None])
        except ResourceExhaustedError:
            for memory in memories:
                memory.cache.truncate(0)
            raise
        finally:
            for memory, sequence in zip(memories, sequences, strict=True):
                _truncate(memory, lengths[memory])
                if sequence is not memory:
                    sequence.cache.release()
        return [draft.drafted for draft in drafts]

    def _draft(self, job: InnerJob, sequence: TokenSequence, num: int) -> DraftJob:
        """So many tokens after the job's."""
        sequence.tokens += job.sequence.tokens[len(sequence.tokens) :]
        length = len(sequence.tokens)
        sequence.cache.truncate(min(sequence.cache.length, length - 1))
        limit = min(job.vocab_limit or self.vocab_limit, self.vocab_limit)
        return DraftJob(sequence, length, [], num_rows=1, num_draft_tokens=num, vocab_limit=limit)

    def _run(self, drafts: Sequence[DraftJob]) -> None:
        """One pass. What those with a part of a prompt cost tells nothing of others."""
        started_ns = clock.stopwatch_ns()
        feeds = Feeds.of([Feed(draft.sequence.cache, draft.pending) for draft in drafts])
        is_usual = max(feeds.num_query) <= MAX_CATCH_UP_TOKENS
        question = self.decider.ask(drafts)
        self.decider.apply(drafts, self.runner.run(feeds, question, self.decider.decide))
        self.runner.end_step()
        if is_usual:
            spent_ns = clock.stopwatch_ns() - started_ns
            usual_ns = self.guess_ns or spent_ns
            self.guess_ns = usual_ns + _RATE * (min(spent_ns, _MAX_JUMP * usual_ns) - usual_ns)

    def release(self, memory: TokenSequence) -> None:
        memory.cache.release()

    def close(self) -> None:
        self.runner.close()


def _truncate(memory: TokenSequence, length: int) -> None:
    del memory.tokens[length:]
    memory.cache.truncate(min(memory.cache.length, length))


def _sequences(jobs: Sequence[InnerJob]) -> list[TokenSequence]:
    """For each job one with the committed tokens: the stream's own, or a fork of it for each further job."""
    found: list[TokenSequence] = []
    for job in jobs:
        ours, theirs = job.inner.memory, job.sequence
        ours.params, ours.prompt_len, ours.encoded = theirs.params, theirs.prompt_len, theirs.encoded
        if ours in found:
            fork = TokenSequence(ours.params, ours.prompt_len, ours.cache.fork(), 0, [*ours.tokens])
            fork.encoded = ours.encoded
            ours = fork
        found.append(ours)
    return found
