"""From the target's logits to verdicts: its probabilities and its own token at every draft position.

The accept rule itself runs in the coordinator (`specwire.rule.acceptance`). Knows no grpc.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specwire import tree
from specwire.core import FloatArray, IntArray, Logprobs, SamplingParams, Verdict
from specwire.engine.jobs import Job
from specwire.errors import InternalError
from specwire.rule import sampling
from specwire.rule.random import Purpose
from specwire.rule.rows import choose_matched, pad_ids, position_logprobs, take_rows, uniforms_for
from specwire.rule.sampling import Row
from specwire.rule.transfer import to_device, to_host
from specwire.tree import TokenTree

_NO_IDS: IntArray = np.empty(0, dtype=np.int64)
_NO_PROBS: FloatArray = np.empty(0, dtype=np.float32)


@dataclass(eq=False)
class VerifyJob(Job):
    """Commit tokens, then verify draft tokens after them, in one forward pass."""

    draft_token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    supports: Sequence[IntArray] = ()

    def start(self) -> None:
        super().start()
        self.sequence.tokens.extend(self.draft_token_ids)
        if self.parents:
            self.sequence.tree = TokenTree(self.committed_len, tuple(self.parents))
        self.num_rows = len(self.draft_token_ids) + 1

    def case(self) -> Case:
        """What to judge, and the parameters needed for it."""
        sequence, params = self.sequence, self.sequence.params
        return Case(
            params=params,
            prompt_len=sequence.prompt_len,
            history=np.array(sequence.tokens, np.int64) if params.needs_history else _NO_IDS,
            committed_len=self.committed_len,
            seed=sequence.seed,
            draft_token_ids=self.draft_token_ids,
            parents=self.parents,
            supports=self.supports,
        )


class Case(NamedTuple):
    """One sequence's rows: one for the committed prefix, and one for each draft token.

    Attributes:
        history: int64, all of its tokens, drafts included; empty where the parameters do not need them.
        committed_len: position of its first row.
        parents: of the draft tokens in a tree; empty for a chain.
        supports: one for each draft token; empty where tokens are matched.
    """

    params: SamplingParams
    prompt_len: int
    history: IntArray
    committed_len: int
    seed: int
    draft_token_ids: Sequence[int]
    parents: Sequence[int]
    supports: Sequence[IntArray]

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return len(self.draft_token_ids) + 1

    def rows(self) -> list[Row]:
        """How each row is sampled."""
        return [
            Row(
                params=self.params,
                prompt_len=self.prompt_len,
                history=history,  # type: ignore[arg-type]
                position=position,
                seed=self.seed,
                base_len=self.committed_len,
            )
            for position, history in self._paths()
        ]

    def _paths(self) -> Iterator[tuple[int, IntArray]]:
        """The position of each row, and the tokens before it."""
        if not self.parents:
            for position in range(self.committed_len, self.committed_len + self.num_rows):
                yield position, self.history[:position]
            return
        for node in range(-1, len(self.parents)):
            path = np.array(tree.path_to(self.parents, node), np.int64)
            history = self.history
            if len(history):
                history = np.concatenate([history[: self.committed_len], history[self.committed_len + path]])
            yield self.committed_len + len(path), history

    def row_supports(self) -> list[IntArray]:
        """The support at each row; empty at the last row, where nothing was proposed."""
        return [*(self.supports or [_NO_IDS] * len(self.draft_token_ids)), _NO_IDS]

    def row_drafts(self) -> list[list[int]]:
        """The draft tokens that may be accepted at each row."""
        if not self.parents:
            return [*([token_id] for token_id in self.draft_token_ids), []]
        drafts: list[list[int]] = [[] for _ in range(self.num_rows)]
        for token_id, parent in zip(self.draft_token_ids, self.parents, strict=True):
            drafts[parent + 1].append(token_id)
        return drafts


class Judged(NamedTuple):
    """The result for a case, one entry a row; probabilities and masses for draft positions only.

    Attributes:
        is_finite: whether the logits are finite; if not, the other fields are meaningless.
        token_ids: the target's own token where tokens are matched, else one drawn outside the support.
    """

    is_finite: bool
    token_ids: list[int]
    target_probs: Sequence[FloatArray] = ()
    tail_mass: Sequence[float] = ()
    logprobs: Sequence[Logprobs] = ()


class VerifyDecider:
    """Verdicts for all jobs of a step at once; a `device.Decider`."""

    @staticmethod
    def ask(jobs: Sequence[Job]) -> list[Case]:
        """One case for each job."""
        return [job.case() for job in jobs if isinstance(job, VerifyJob)]

    @staticmethod
    def decide(cases: list[Case], logits: Tensor) -> list[Judged]:
        """Judge all cases; logits are [sum of (num_draft_tokens + 1), vocab_size]."""
        rows = [row for case in cases for row in case.rows()]
        supports = [support for case in cases for support in case.row_supports()]
        log_probs = sampling.apply_warps(sampling.apply_history(logits, rows), rows)
        found = _evaluate(log_probs, rows, supports)
        judged, start = [], 0
        for case in cases:
            here = slice(start, start + case.num_rows)
            judged.append(_judged(case, found, here, logits[here]))
            start += case.num_rows
        return judged

    @staticmethod
    def apply(jobs: Sequence[Job], answer: list[Judged]) -> None:
        """Verdicts."""
        verifies = [job for job in jobs if isinstance(job, VerifyJob)]
        for job, judged in zip(verifies, answer, strict=True):
            if judged.is_finite:
                job.result = Verdict(
                    job.committed_len,
                    judged.token_ids,
                    judged.target_probs,
                    judged.tail_mass,
                    judged.logprobs,
                )
            else:
                job.result = _not_finite()


class _RowResults(NamedTuple):
    """One entry a row; `target_probs` and `tail_mass` are unset where tokens are matched.

    Attributes:
        maxima: of the log probabilities, or of a greedy row's logits. Not finite where the logits are not,
            or where the parameters made them so; single entries of -inf do not show here.
    """

    token_ids: IntArray
    maxima: FloatArray
    tail_mass: npt.NDArray[np.float64]
    target_probs: list[FloatArray]


def _evaluate(log_probs: Tensor, rows: list[Row], supports: list[IntArray]) -> _RowResults:
    """Compute all results on the device, and copy them to the host at once."""
    matched = [i for i, row in enumerate(rows) if row.params.matches_tokens]
    sampled = [i for i, row in enumerate(rows) if not row.params.matches_tokens]
    chosen = _chosen(log_probs, rows, matched)
    on_support, tail_mass, tail_tokens = _judge(log_probs, rows, supports, sampled)
    host = to_host(chosen, on_support, tail_mass, tail_tokens, log_probs.amax(dim=1))
    found = _RowResults(np.zeros(len(rows), np.int64), host[4], np.zeros(len(rows)), [_NO_PROBS] * len(rows))
    found.token_ids[matched], found.token_ids[sampled] = host[0], host[3]
    found.tail_mass[sampled] = host[2]
    for i, row_probs in zip(sampled, host[1], strict=True):
        found.target_probs[i] = row_probs[: len(supports[i])]
    return found


def _chosen(log_probs: Tensor, rows: list[Row], places: list[int]) -> Tensor:
    """Greedy and Gumbel: the target's own choice at each of some rows, int64 [num_places]."""
    if not places:
        return torch.zeros(0, dtype=torch.int64, device=log_probs.device)
    return choose_matched(take_rows(log_probs, places), [rows[i] for i in places])


def _judge(
    log_probs: Tensor, rows: list[Row], supports: list[IntArray], places: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rejection sampling: the results of `sampling.judge_support` for some rows."""
    if not places:
        none = torch.zeros(0, device=log_probs.device)
        return none, none, none
    probs = take_rows(log_probs, places).exp()
    uniforms = uniforms_for([rows[i] for i in places], Purpose.TARGET, probs.device)
    padded = to_device(pad_ids([supports[i] for i in places]), probs.device)
    return sampling.judge_support(probs, padded, uniforms)


def _judged(case: Case, found: _RowResults, here: slice, logits: Tensor) -> Judged:
    is_finite = bool(np.isfinite(found.maxima[here]).all())
    token_ids = found.token_ids[here].tolist()
    logprobs = _logprobs(case, logits, token_ids)
    if case.params.matches_tokens:
        return Judged(is_finite, token_ids, logprobs=logprobs)
    on_drafts = slice(here.start, here.stop - 1)
    tail_mass = found.tail_mass[on_drafts].tolist()
    return Judged(is_finite, token_ids, found.target_probs[on_drafts], tail_mass, logprobs)


def _logprobs(case: Case, logits: Tensor, token_ids: list[int]) -> list[Logprobs]:
    """Log probabilities before warps and penalties, of every token that may be emitted and the likeliest."""
    num_top = case.params.logprobs
    if num_top is None:
        return []
    candidates = [
        np.unique([t for t in (token_id, *draft, *support) if t >= 0]).astype(np.int64)
        for token_id, draft, support in zip(
            token_ids,
            case.row_drafts(),
            case.row_supports(),
            strict=True,
        )
    ]
    return position_logprobs(logits, candidates, num_top)


def _not_finite() -> InternalError:
    return InternalError("the target's logits are not finite")
