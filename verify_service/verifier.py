"""What the target does with its logits: say, at every draft position, what it would have written.

Nothing here decides: the accept rule runs in the coordinator (`specwire.acceptance`). Knows no grpc.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specwire import sampling
from specwire.core import FloatArray, IntArray, Logprobs, Verdict
from specwire.engine.jobs import Job
from specwire.engine.rows import choose_matched, pad_ids, position_logprobs, take_rows, uniforms_for
from specwire.errors import InternalError
from specwire.random import Stream
from specwire.sampling import Row

_EMPTY_SUPPORT: IntArray = np.empty(0, dtype=np.int64)
_NO_PROBS: FloatArray = np.empty(0, dtype=np.float32)


@dataclass(eq=False)
class VerifyJob(Job):
    """Commit tokens, then judge draft tokens after them, in one forward pass."""

    draft_token_ids: Sequence[int] = ()
    supports: Sequence[IntArray] = ()

    def start(self) -> None:
        super().start()
        self.sequence.tokens.extend(self.draft_token_ids)
        self.num_rows = len(self.draft_token_ids) + 1

    def rows(self) -> list[Row]:
        """One row a draft position, and one for the position after them."""
        sequence, tokens = self.sequence, self.sequence.tokens
        needs_history = sequence.params.needs_history
        return [
            Row(
                params=sequence.params,
                prompt_len=sequence.prompt_len,
                history=tokens[:position] if needs_history else (),
                position=position,
                seed=sequence.seed,
            )
            for position in range(self.committed_len, self.committed_len + self.num_rows)
        ]

    def row_supports(self) -> list[IntArray]:
        """The support at each row; at the last one nothing was proposed, so everything is outside it."""
        return [*(self.supports or [_EMPTY_SUPPORT] * len(self.draft_token_ids)), _EMPTY_SUPPORT]


@dataclass(slots=True)
class _Judged:
    """One entry a row; `target_probs` and `tail_mass` stay empty where tokens are matched."""

    token_ids: IntArray
    tail_mass: npt.NDArray[np.float64]
    target_probs: list[FloatArray]


def consume(jobs: Sequence[Job], logits: Tensor) -> None:
    """Verdicts for all jobs of a step; logits are [sum of (num_draft_tokens + 1), vocab_size]."""
    verifies = [job for job in jobs if isinstance(job, VerifyJob)]
    rows = [row for job in verifies for row in job.rows()]
    supports = [support for job in verifies for support in job.row_supports()]
    log_probs = sampling.apply_warps(sampling.apply_history(logits, rows), rows)
    judged = _Judged(np.zeros(len(rows), np.int64), np.zeros(len(rows)), [_NO_PROBS] * len(rows))
    _match_tokens(judged, log_probs, rows)
    _judge_supports(judged, log_probs, rows, supports)
    finite = torch.isfinite(logits.amax(dim=1)).tolist()  # NaN and +inf reach the maximum; -inf may occur
    start = 0
    for job in verifies:
        here = slice(start, start + job.num_rows)
        logprobs = _logprobs(job, logits[here], judged, here)
        job.result = _verdict(job, judged, here, logprobs) if all(finite[here]) else _not_finite()
        start += job.num_rows


def _match_tokens(judged: _Judged, log_probs: Tensor, rows: list[Row]) -> None:
    """Greedy and Gumbel: the target's own choice at each row."""
    indices = [i for i, row in enumerate(rows) if row.params.matches_tokens]
    if indices:
        chosen = choose_matched(take_rows(log_probs, indices), [rows[i] for i in indices])
        judged.token_ids[indices] = chosen.cpu().numpy()


def _judge_supports(judged: _Judged, log_probs: Tensor, rows: list[Row], supports: list[IntArray]) -> None:
    """Rejection: probabilities on the support, and one token drawn from outside it."""
    indices = [i for i, row in enumerate(rows) if not row.params.matches_tokens]
    if not indices:
        return
    probs = take_rows(log_probs, indices).exp()
    uniforms = uniforms_for([rows[i] for i in indices], Stream.TARGET, probs.device)
    on_support, tail_mass, tail_tokens = sampling.judge_support(
        probs,
        torch.from_numpy(pad_ids([supports[i] for i in indices])).to(probs.device),
        uniforms,
    )
    judged.token_ids[indices] = tail_tokens.cpu().numpy()
    judged.tail_mass[indices] = tail_mass.cpu().numpy()
    for i, row_probs in zip(indices, on_support.cpu().numpy(), strict=True):
        judged.target_probs[i] = row_probs[: len(supports[i])]


def _verdict(job: VerifyJob, judged: _Judged, here: slice, logprobs: list[Logprobs]) -> Verdict:
    token_ids = judged.token_ids[here].tolist()
    if job.sequence.params.matches_tokens:
        return Verdict(job.committed_len, token_ids, logprobs=logprobs)
    on_drafts = slice(here.start, here.stop - 1)
    return Verdict(
        job.committed_len,
        token_ids,
        judged.target_probs[on_drafts],
        judged.tail_mass[on_drafts].tolist(),
        logprobs,
    )


def _logprobs(job: VerifyJob, logits: Tensor, judged: _Judged, here: slice) -> list[Logprobs]:
    """Before warps and penalties: for every token that may be emitted, then for the likeliest."""
    num_top = job.sequence.params.logprobs
    if num_top is None:
        return []
    candidates = [
        np.unique([t for t in (token_id, *draft, *support) if t >= 0]).astype(np.int64)
        for token_id, draft, support in zip(
            judged.token_ids[here].tolist(),
            [*([t] for t in job.draft_token_ids), []],
            job.row_supports(),
            strict=True,
        )
    ]
    return position_logprobs(logits, candidates, num_top)


def _not_finite() -> InternalError:
    return InternalError("the target's logits are not finite")
