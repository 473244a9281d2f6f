"""From the target's logits to verdicts: its probabilities and its own token at every draft position.

The accept rule itself runs in the coordinator (`specwire.rule.acceptance`). Knows no grpc.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from specwire.rule.columns import EDITED, LOGPROBS, MATCHED, Row, Rows, Stack, padded
from specwire.rule.random import Purpose
from specwire.rule.rows import choose_matched, position_logprobs, take_rows, uniforms_for
from specwire.rule.transfer import to_device, to_host
from specwire.tree import TokenTree

_NO_IDS: IntArray = np.empty(0, dtype=np.int64)


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
    """One sequence's rows, one by one: for the committed prefix, and for each draft token.

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


class Cases(NamedTuple):
    """What to judge in a step: one case for each sequence, whose rows lie together.

    Attributes:
        stack: how each case is sampled.
        committed_lens: int64 [num_cases], position of each first row.
        num_rows: int64 [num_cases], one more than there are draft tokens.
        support_ids: int64, the supports of the sampled rows, one after another.
        support_lens: int64 [num_sampled_rows]; 0 at the last row of each case.
        special: by index, the cases that are trees, have penalties or biases, or report log probabilities.
    """

    stack: Stack
    committed_lens: IntArray
    num_rows: IntArray
    support_ids: IntArray
    support_lens: IntArray
    special: Mapping[int, Case]

    @classmethod
    def of(cls, jobs: Sequence[VerifyJob]) -> Cases:
        """One for each job."""
        num = len(jobs)
        stack = Stack.of([job.sequence.encoded for job in jobs])
        is_special, is_sampled = stack.traits & (EDITED | LOGPROBS) != 0, stack.traits & MATCHED == 0
        supports: list[IntArray] = []
        for i in np.flatnonzero(is_sampled).tolist():
            supports += (*jobs[i].supports, _NO_IDS)
        return cls(
            stack,
            committed_lens=np.fromiter((job.committed_len for job in jobs), np.int64, num),
            num_rows=np.fromiter((job.num_rows for job in jobs), np.int64, num),
            support_ids=np.concatenate([_NO_IDS, *supports]),
            support_lens=np.fromiter(map(len, supports), np.int64, len(supports)),
            special={i: job.case() for i, job in enumerate(jobs) if job.parents or is_special[i]},
        )

    @property
    def starts(self) -> IntArray:
        """int64 [num_cases], each one's first row."""
        return np.cumsum(self.num_rows) - self.num_rows

    def rows(self) -> Rows:
        """How each row is sampled."""
        case = np.repeat(np.arange(len(self.num_rows)), self.num_rows)
        starts, base_lens = self.starts, self.committed_lens[case]
        positions = base_lens + np.arange(len(case)) - starts[case]
        edited: dict[int, Row] = {}
        for i, special in self.special.items():
            rows, start = special.rows(), int(starts[i])
            positions[start : start + len(rows)] = [row.position for row in rows]
            if self.stack.traits[i] & EDITED:
                edited |= enumerate(rows, start)
        return Rows.at(self.stack.take(case), positions, base_lens, edited)


class Judged(NamedTuple):
    """The results of a step; the fields of a case whose logits are not finite are meaningless.

    Attributes:
        is_finite: bool [num_cases], whether the logits are.
        token_ids: int64 [num_rows], the target's own token where tokens are matched, else one drawn outside
            the support.
        target_probs: float32 [num_sampled_rows, longest support], 0 beyond the row's own.
        tail_mass: float64 [num_sampled_rows].
        logprobs: of the cases that report them, by index.
    """

    is_finite: npt.NDArray[np.bool_]
    token_ids: IntArray
    target_probs: FloatArray
    tail_mass: npt.NDArray[np.float64]
    logprobs: dict[int, list[Logprobs]]


class VerifyDecider:
    """Verdicts for all jobs of a step at once; a `device.Decider`."""

    @staticmethod
    def ask(jobs: Sequence[Job]) -> Cases:
        """One case for each job."""
        return Cases.of([job for job in jobs if isinstance(job, VerifyJob)])

    @staticmethod
    def decide(cases: Cases, logits: Tensor) -> Judged:
        """Judge all cases; logits are [sum of (num_draft_tokens + 1), vocab_size]."""
        rows = cases.rows()
        log_probs = sampling.apply_warps(sampling.apply_history(logits, rows), rows)
        judged = _evaluate(log_probs, rows, cases)
        reporting = {i: case for i, case in cases.special.items() if case.params.logprobs is not None}
        starts = cases.starts
        for i, case in reporting.items():
            here = slice(starts[i], starts[i] + case.num_rows)
            judged.logprobs[i] = _logprobs(case, logits[here], judged.token_ids[here].tolist())
        return judged

    @staticmethod
    def apply(jobs: Sequence[Job], judged: Judged) -> None:
        """Verdicts."""
        token_ids, tail_mass = judged.token_ids.tolist(), judged.tail_mass.tolist()
        start = sampled = 0
        verifies = (job for job in jobs if isinstance(job, VerifyJob))
        for i, (job, is_finite) in enumerate(zip(verifies, judged.is_finite.tolist(), strict=True)):
            end, num_drafts = start + job.num_rows, job.num_rows - 1
            target_probs: Sequence[FloatArray] = ()
            tails: Sequence[float] = ()
            if not job.sequence.encoded.traits & MATCHED:
                on_drafts = slice(sampled, sampled + num_drafts)
                target_probs = _on_supports(judged.target_probs[on_drafts], job.supports)
                tails = tail_mass[on_drafts]
                sampled += job.num_rows
            logprobs = judged.logprobs.get(i, ())
            verdict = Verdict(job.committed_len, token_ids[start:end], target_probs, tails, logprobs)
            job.result = verdict if is_finite else _not_finite()
            start = end


def _on_supports(probs: FloatArray, supports: Sequence[IntArray]) -> list[FloatArray]:
    """Each row of the padded probabilities, as long as its support."""
    return [row[: len(support)] for row, support in zip(probs, supports, strict=True)]


def _evaluate(log_probs: Tensor, rows: Rows, cases: Cases) -> Judged:
    """Compute all results on the device, and copy them to the host at once."""
    is_matched = rows.traits & MATCHED != 0
    matched, sampled = np.flatnonzero(is_matched), np.flatnonzero(~is_matched)
    chosen = _chosen(log_probs, rows, matched)
    on_support, tail_mass, tail_tokens = _judge(log_probs, rows, cases, sampled)
    # A row's maximum is not finite where its logits are not, or where the parameters made them so; single
    # entries of -inf do not show.
    host = to_host(chosen, on_support, tail_mass, tail_tokens, log_probs.amax(dim=1))
    token_ids = np.empty(len(rows), np.int64)
    token_ids[matched], token_ids[sampled] = host[0], host[3]
    is_finite = np.logical_and.reduceat(np.isfinite(host[4]), cases.starts)
    return Judged(is_finite, token_ids, host[1], host[2], {})


def _chosen(log_probs: Tensor, rows: Rows, places: IntArray) -> Tensor:
    """Greedy and Gumbel: the target's own choice at each of some rows, int64 [num_places]."""
    if not len(places):
        return torch.zeros(0, dtype=torch.int64, device=log_probs.device)
    return choose_matched(take_rows(log_probs, places), rows.take(places))


def _judge(log_probs: Tensor, rows: Rows, cases: Cases, places: IntArray) -> tuple[Tensor, Tensor, Tensor]:
    """Rejection sampling: the results of `sampling.judge_support` for the sampled rows."""
    if not len(places):
        none = torch.zeros(0, device=log_probs.device)
        return none, none, none
    probs = take_rows(log_probs, places).exp()
    uniforms = uniforms_for(rows.take(places), Purpose.TARGET, probs.device)
    support_ids = to_device(padded(cases.support_ids, cases.support_lens, -1), probs.device)
    return sampling.judge_support(probs, support_ids, uniforms)


def _logprobs(case: Case, logits: Tensor, token_ids: list[int]) -> list[Logprobs]:
    """Log probabilities before warps and penalties, of every token that may be emitted and the likeliest."""
    assert case.params.logprobs is not None
    candidates = [
        np.unique([t for t in (token_id, *draft, *support) if t >= 0]).astype(np.int64)
        for token_id, draft, support in zip(
            token_ids,
            case.row_drafts(),
            case.row_supports(),
            strict=True,
        )
    ]
    return position_logprobs(logits, candidates, case.params.logprobs)


def _not_finite() -> InternalError:
    return InternalError("the target's logits are not finite")
