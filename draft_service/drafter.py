"""From the draft's logits to draft tokens, the supports they were drawn from, and likely alternatives.

Knows no grpc.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specwire.config.services import DraftConfig
from specwire.core import FloatArray, IntArray, Proposal, Support
from specwire.engine.jobs import Job
from specwire.errors import InternalError
from specwire.rule import sampling
from specwire.rule.random import Purpose
from specwire.rule.rows import matched_scores, take_rows, uniforms_for
from specwire.rule.sampling import Row
from specwire.rule.transfer import indices, to_host


@dataclass(eq=False)
class DraftJob(Job):
    """Commit tokens, then decode `num_draft_tokens` more, one forward pass each.

    The last draft token is never run: its keys and values are computed in the next round, if it was
    accepted. That is why a round that accepts everything commits two tokens that the cache lacks.

    The proposal ends before the first position whose logits are not finite. All passes are run nevertheless:
    the time that a proposal takes must not depend on its tokens.

    Attributes:
        vocab_limit: token ids from here on are never drafted; 0 for no limit.
        num_candidates: likeliest tokens to record at each position, besides the drafted one.
        num_usable: draft tokens before the first logits that were not finite; None where all were finite.
        candidates: [num_draft_tokens][num_candidates], likeliest first.
    """

    num_draft_tokens: int = 0
    vocab_limit: int = 0
    num_candidates: int = 0
    num_usable: int | None = None
    drafted: list[int] = field(default_factory=list)
    supports: list[Support] = field(default_factory=list)
    candidates: list[list[int]] = field(default_factory=list)

    def start(self) -> None:
        super().start()
        self.num_rows = 1 if self.num_draft_tokens else 0

    def row(self) -> Row:
        """How to sample the next position."""
        tokens = self.sequence.tokens
        return Row(
            params=self.sequence.params,
            prompt_len=self.sequence.prompt_len,
            history=tokens,
            position=len(tokens),
            seed=self.sequence.seed,
            base_len=self.committed_len,
        )

    def add(self, drawn: Drawn) -> None:
        """Append one draft token; unless it is the last, the next pass runs it."""
        if drawn.token_id < 0 and self.num_usable is None:
            self.num_usable = len(self.drafted)
        token_id = max(0, drawn.token_id)
        self.candidates.append([other for other in drawn.ranked if other != token_id][: self.num_candidates])
        self.sequence.tokens.append(token_id)
        self.drafted.append(token_id)
        if drawn.support is not None:
            self.supports.append(drawn.support)
        if len(self.drafted) == self.num_draft_tokens:
            self.result = self._proposal()

    def _proposal(self) -> Proposal | InternalError:
        if self.num_usable == 0:
            return InternalError("the draft's logits are not finite")
        return Proposal(self.committed_len, self.drafted, self.supports).first(
            len(self.drafted) if self.num_usable is None else self.num_usable
        )


@dataclass(eq=False)
class PeekJob(DraftJob):
    """Finds `num_candidates` tokens that may follow all tokens of a sequence; drafts nothing."""

    def start(self) -> None:
        super().start()
        self.num_rows = 1

    def add(self, drawn: Drawn) -> None:
        """Keep the candidates; the drawn token is not appended."""
        self.result = drawn.ranked[: self.num_candidates]


class Drawn(NamedTuple):
    """The token drawn from one row of logits.

    Attributes:
        token_id: -1 where the logits are not finite.
        support: the support it was drawn from; None where tokens are matched.
        ranked: likeliest tokens, best first; the drawn one may be among them.
    """

    token_id: int
    support: Support | None
    ranked: list[int]


class Question(NamedTuple):
    """One row for each job.

    Attributes:
        limits: [num_rows] token ids from here on are excluded; 0 for no limit.
        num_ranked: likeliest tokens wanted of each row.
    """

    rows: list[Row]
    limits: list[int]
    num_ranked: int


class DraftDecider:
    """Draws draft tokens for all jobs of a step at once."""

    def __init__(self, config: DraftConfig) -> None:
        self._support_mass = config.support_mass
        self._max_support = config.max_support

    def ask(self, jobs: Sequence[Job]) -> Question:
        """See `device.Decider`."""
        drafts = [job for job in jobs if isinstance(job, DraftJob)]
        return Question(
            [job.row() for job in drafts],
            [job.vocab_limit for job in drafts],
            max((job.num_candidates + 1 for job in drafts if job.num_candidates), default=0),
        )

    def decide(self, question: Question, logits: Tensor) -> list[Drawn]:
        """One draft token for each row of the logits [num_rows, vocab_size]."""
        rows = question.rows
        logits = _limit_vocabulary(logits, question.limits)
        log_probs = sampling.apply_warps(sampling.apply_history(logits, rows), rows)
        matched = [i for i, row in enumerate(rows) if row.params.matches_tokens]
        drawn = [i for i, row in enumerate(rows) if not row.params.matches_tokens]
        on_device = [*self._match(question, log_probs, matched), *self._draw(question, log_probs, drawn)]
        found = iter(to_host(*on_device))
        answer: dict[int, Drawn] = {}
        if matched:
            answer |= zip(matched, _matched(*(next(found) for _ in range(3))), strict=True)
        if drawn:
            supports = _supports(*(next(found) for _ in range(4)), num_ranked=question.num_ranked)
            answer |= zip(drawn, supports, strict=True)
        return [answer[i] for i in range(len(rows))]

    def apply(self, jobs: Sequence[Job], answer: list[Drawn]) -> None:
        """See `device.Decider`."""
        drafts = [job for job in jobs if isinstance(job, DraftJob)]
        for job, drawn in zip(drafts, answer, strict=True):
            job.add(drawn)

    def _match(self, question: Question, log_probs: Tensor, places: list[int]) -> list[Tensor]:
        """What `_matched` reads; nothing for no rows."""
        if not places:
            return []
        scores = matched_scores(take_rows(log_probs, places), [question.rows[i] for i in places])
        top = scores.topk(min(question.num_ranked, scores.shape[1]), dim=-1)
        token_ids = sampling.greedy(scores).masked_fill(~scores.amax(dim=-1).isfinite(), -1)
        return [token_ids, top.indices, (top.values > float("-inf")).sum(dim=-1)]

    def _draw(self, question: Question, log_probs: Tensor, places: list[int]) -> list[Tensor]:
        """What `_supports` reads. Truncate first, then sample from exactly the numbers that are sent.

        A row without finite logits has an empty support and the token -1.
        """
        if not places:
            return []
        probs = take_rows(log_probs, places).exp()
        ids, support_probs, lengths = sampling.truncate_support(probs, self._support_mass, self._max_support)
        uniforms = uniforms_for([question.rows[i] for i in places], Purpose.DRAFT, probs.device)
        columns = sampling.draw(support_probs, uniforms)
        return [ids.gather(1, columns[:, None])[:, 0], ids, support_probs, lengths]


def _matched(token_ids: IntArray, ranked: IntArray, lengths: IntArray) -> Iterator[Drawn]:
    """For rows where tokens are matched; ranked [num_rows, num_ranked] by score, lengths [num_rows]."""
    for token_id, ids, n in zip(token_ids.tolist(), ranked.tolist(), lengths.tolist(), strict=True):
        yield Drawn(token_id, None, ids[:n])


def _supports(
    token_ids: IntArray, ids: IntArray, probs: FloatArray, lengths: IntArray, *, num_ranked: int
) -> Iterator[Drawn]:
    """For rows that were sampled from a support, which is sorted by probability, highest first."""
    for row, (token_id, n) in enumerate(zip(token_ids.tolist(), lengths.tolist(), strict=True)):
        ranked = ids[row, : min(n, num_ranked)].tolist()
        yield Drawn(token_id, Support(ids[row, :n], probs[row, :n]), ranked)


def _limit_vocabulary(logits: Tensor, limits: Sequence[int]) -> Tensor:
    """Exclude tokens that the target lacks, where the draft's vocabulary is padded further."""
    width = logits.shape[1]
    if all(not 0 < limit < width for limit in limits):
        return logits
    ends = indices([limit or width for limit in limits], logits.device)
    beyond = torch.arange(width, device=logits.device) >= ends[:, None]
    return logits.masked_fill(beyond, float("-inf"))
