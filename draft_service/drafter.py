"""What the draft does with its logits: draw a token, remember what it was drawn from. Knows no grpc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specwire import sampling
from specwire.config import DraftConfig
from specwire.core import Proposal, Support
from specwire.engine.jobs import Job
from specwire.engine.rows import choose_matched, take_rows, uniforms_for
from specwire.random import Stream
from specwire.sampling import Row


@dataclass(eq=False)
class DraftJob(Job):
    """Commit tokens, then decode `num_draft_tokens` more, one forward pass each.

    The last draft token is never run: its keys and values are computed in the next round, if it was
    accepted. That is why a round that accepts everything commits two tokens that the cache lacks.
    """

    num_draft_tokens: int = 0
    vocab_limit: int = 0
    drafted: list[int] = field(default_factory=list)
    supports: list[Support] = field(default_factory=list)

    def start(self) -> None:
        super().start()
        self.num_rows = 1 if self.num_draft_tokens else 0

    def row(self) -> Row:
        """The next position: that of the token to be drawn."""
        tokens = self.sequence.tokens
        return Row(
            params=self.sequence.params,
            prompt_len=self.sequence.prompt_len,
            history=tokens,
            position=len(tokens),
            seed=self.sequence.seed,
        )

    def add(self, token_id: int, support: Support | None) -> None:
        """Take one draft token; unless it is the last, it is run next, as the cache lacks it."""
        self.sequence.tokens.append(token_id)
        self.drafted.append(token_id)
        if support is not None:
            self.supports.append(support)
        if len(self.drafted) == self.num_draft_tokens:
            self.result = Proposal(self.committed_len, self.drafted, self.supports)


class Drafter:
    """Draws draft tokens for all jobs of a step at once."""

    def __init__(self, config: DraftConfig) -> None:
        self._support_mass = config.support_mass
        self._max_support = config.max_support

    def consume(self, jobs: Sequence[Job], logits: Tensor) -> None:
        """One draft token for each job; logits are [num_jobs, vocab_size]."""
        drafts = [job for job in jobs if isinstance(job, DraftJob)]
        rows = [job.row() for job in drafts]
        logits = _limit_vocabulary(logits, [job.vocab_limit for job in drafts])
        log_probs = sampling.apply_warps(sampling.apply_history(logits, rows), rows)
        matched = [i for i, row in enumerate(rows) if row.params.matches_tokens]
        drawn = [i for i, row in enumerate(rows) if not row.params.matches_tokens]
        self._add_matched(drafts, rows, log_probs, matched)
        self._add_drawn(drafts, rows, log_probs, drawn)

    def _add_matched(
        self, jobs: list[DraftJob], rows: list[Row], log_probs: Tensor, indices: list[int]
    ) -> None:
        if indices:
            picked = [rows[i] for i in indices]
            token_ids = choose_matched(take_rows(log_probs, indices), picked).tolist()
            for i, token_id in zip(indices, token_ids, strict=True):
                jobs[i].add(token_id, None)

    def _add_drawn(
        self, jobs: list[DraftJob], rows: list[Row], log_probs: Tensor, indices: list[int]
    ) -> None:
        """Truncate first, then sample from exactly the numbers that are sent."""
        if not indices:
            return
        probs = take_rows(log_probs, indices).exp()
        ids, support_probs, lengths = sampling.truncate_support(probs, self._support_mass, self._max_support)
        uniforms = uniforms_for([rows[i] for i in indices], Stream.DRAFT, probs.device)
        columns = sampling.draw(support_probs, uniforms)
        token_ids = ids.gather(1, columns[:, None])[:, 0].tolist()
        ids_host, probs_host = ids.cpu().numpy(), support_probs.cpu().numpy()
        for row, (i, n) in enumerate(zip(indices, lengths.tolist(), strict=True)):
            jobs[i].add(token_ids[row], Support(ids_host[row, :n], probs_host[row, :n]))


def _limit_vocabulary(logits: Tensor, limits: Sequence[int]) -> Tensor:
    """Never propose what the target cannot say (a draft whose vocabulary is padded further)."""
    width = logits.shape[1]
    if all(not 0 < limit < width for limit in limits):
        return logits
    ends = torch.tensor([limit or width for limit in limits], device=logits.device)
    beyond = torch.arange(width, device=logits.device) >= ends[:, None]
    return logits.masked_fill(beyond, float("-inf"))
