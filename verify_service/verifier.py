"""From the target's logits to verdicts: its probabilities and its own token at every draft position.

The accept rule itself runs in the coordinator (`specwire.rule.acceptance`). Knows no grpc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specwire import clock
from specwire.core import NO_TOKEN, Logprobs, Proposal, Verdict
from specwire.engine.device import NO_DRAFTING, DraftCost
from specwire.engine.grammars.matcher import LazyMasks
from specwire.engine.jobs import Job
from specwire.errors import InternalError
from specwire.proposals import tree
from specwire.proposals.tree import TokenTree
from specwire.rule import sampling
from specwire.rule.columns import EDITED, LOGPROBS, MATCHED, Row, Rows, padded
from specwire.rule.random import Purpose
from specwire.rule.rows import choose_matched, position_logprobs, take_rows, uniforms_for
from specwire.rule.transfer import to_device, to_host
from specwire.support import NO_SUPPORT, FloatArray, IntArray
from verify_service import own

_NO_IDS: IntArray = np.empty(0, dtype=np.int64)
_NO_PROBS: FloatArray = np.empty((0, 0), dtype=np.float32)
_NO_MASS: npt.NDArray[np.float64] = np.empty(0)


@dataclass(eq=False)
class VerifyJob(Job):
    """Commit tokens, then verify a proposal after them, in one forward pass."""

    proposal: Proposal = field(default_factory=lambda: Proposal(0))
    drafting: own.Drafting | None = None
    following: VerifyJob | None = None
    masks: LazyMasks | None = None

    def start(self) -> None:
        super().start()
        self.sequence.tokens.extend(self.proposal.token_ids)
        if self.proposal.parents:
            self.sequence.tree = TokenTree(self.committed_len, tuple(self.proposal.parents))
        self.num_rows = len(self.proposal.token_ids) + 1

    def positions(self) -> list[int]:
        """Of the tokens that are drawn after the prefix, and after each draft token."""
        parents, start = self.proposal.parents, self.committed_len
        depths = tree.depths(parents) if parents else range(self.num_rows - 1)
        return [start, *(start + depth + 1 for depth in depths)]

    def rows(self) -> list[Row]:
        """How each row is sampled, where the columns of `Rows` are not enough."""
        sequence, parents, start = self.sequence, self.proposal.parents, self.committed_len
        is_read, positions = sequence.params.needs_history, self.positions()
        tokens = np.array(sequence.tokens if is_read else (), np.int64)
        histories = [tokens[:position] for position in positions]
        if parents and is_read:
            paths = (np.array(tree.path_to(parents, node), np.int64) for node in range(-1, len(parents)))
            histories = [np.append(tokens[:start], tokens[start + path]) for path in paths]
        row = Row(sequence.params, sequence.prompt_len, (), start, sequence.seed, start, self.masks)
        return [
            row._replace(history=history, position=position, mask_row=i)  # type: ignore[arg-type]
            for i, (position, history) in enumerate(zip(positions, histories, strict=True))
        ]

    def candidates(self) -> list[IntArray]:
        """Of each row, the tokens that may be emitted besides the target's own: draft tokens, supports."""
        proposal = self.proposal
        token_ids, supports = proposal.token_ids, proposal.supports or [NO_SUPPORT] * len(proposal.token_ids)
        drafted = (
            [token_ids[child] for child in proposal.children(node)] for node in range(-1, len(token_ids))
        )
        both = zip(drafted, [*supports, NO_SUPPORT], strict=True)
        return [np.array([*here, *support.token_ids], np.int64) for here, support in both]

    def follow(self) -> None:
        """Go on with what was drafted after the verdict, or without, if the sequence does so by itself."""
        drafting = self.drafting
        if drafting is None or (begun := drafting.following()) is None:
            return
        judged, outcome = drafting.judged, drafting.outcome
        assert outcome is not None
        self.following = VerifyJob(
            self.sequence,
            judged.base_len,
            [*(judged.token_ids[node] for node in outcome.path), outcome.next_token],
            proposal=begun.judged,
            drafting=begun,
            worth=1.0,
            goes_on=True,
        )


class Reported(NamedTuple):
    """Of a request that reports log probabilities.

    Attributes:
        first: of its rows.
        num_top: likeliest tokens to report at each.
        candidates: see `VerifyJob.candidates`.
    """

    first: int
    num_top: int
    candidates: Sequence[IntArray]


class Cases(NamedTuple):
    """What to judge in a step: one case for each sequence.

    Attributes:
        rows: of all cases.
        support_ids: int64, the supports of the sampled rows, one after another.
        support_lens: int64 [num_sampled_rows]; 0 at the last row of each case.
        reporting: by index, the cases that report log probabilities.
    """

    rows: Rows
    support_ids: IntArray
    support_lens: IntArray
    reporting: Mapping[int, Reported]


class Results(NamedTuple):
    """Of a step.

    Attributes:
        token_ids: int64 [num_rows], the target's own token where tokens are matched, else one drawn outside
            the support; `NO_TOKEN` where no logit is finite, or one is not a number, whose other fields are
            meaningless.
        target_probs: float32 [num_sampled_rows, longest support], 0 beyond the row's own.
        tail_mass: float64 [num_sampled_rows].
        logprobs: of the cases that report them, by index.
    """

    token_ids: IntArray
    target_probs: FloatArray
    tail_mass: npt.NDArray[np.float64]
    logprobs: dict[int, list[Logprobs]]


class VerifyDecider:
    """Verdicts for all jobs of a step at once; a `device.Decider`.

    Attributes:
        drafts: what proposes after verdicts; None if nothing does.
        drafting: see `device.Decider`.
    """

    def __init__(self) -> None:
        self.drafts: own.OwnDrafts | None = None
        self.drafting = NO_DRAFTING

    @staticmethod
    def ask(jobs: Sequence[Job]) -> Cases:
        """One case for each job."""
        verifies = [job for job in jobs if isinstance(job, VerifyJob)]
        encoded = [job.sequence.encoded for job in verifies]
        num_rows = [job.num_rows for job in verifies]
        committed_lens = [job.committed_len for job in verifies]
        supports: list[IntArray] = []
        paths: dict[int, list[int]] = {}
        edited: dict[int, Row] = {}
        reporting: dict[int, Reported] = {}
        first = 0
        for i, (job, one) in enumerate(zip(verifies, encoded, strict=True)):
            sequence, proposal = job.sequence, job.proposal
            if sequence.grammar is not None:
                tokens = sequence.tokens[: job.committed_len]
                job.masks = sequence.masks(tokens, proposal.token_ids, proposal.parents)
            if not one.traits & MATCHED:
                supports += [*(support.token_ids for support in proposal.supports), _NO_IDS]
            if proposal.parents:
                paths[i] = job.positions()
            if one.traits & EDITED:
                edited |= enumerate(job.rows(), first)
            if one.traits & LOGPROBS:
                reporting[i] = Reported(first, sequence.params.logprobs or 0, job.candidates())
            first += job.num_rows
        return Cases(
            rows=Rows(encoded, num_rows, committed_lens, committed_lens, paths, edited),
            support_ids=np.concatenate([_NO_IDS, *supports]),
            support_lens=np.fromiter(map(len, supports), np.int64, len(supports)),
            reporting=reporting,
        )

    @staticmethod
    def decide(cases: Cases, logits: Tensor) -> Results:
        """Judge all cases; logits are [sum of (num_draft_tokens + 1), vocab_size]."""
        rows = cases.rows
        log_probs = sampling.apply_warps(sampling.apply_history(logits, rows), rows)
        judged = _evaluate(log_probs, cases)
        for i, reported in cases.reporting.items():
            here = slice(reported.first, reported.first + len(reported.candidates))
            judged.logprobs[i] = _logprobs(reported, logits[here], judged.token_ids[here])
        return judged

    def apply(self, jobs: Sequence[Job], judged: Results) -> None:
        """Verdicts, then what is proposed after them, and the rounds that sequences begin by themselves."""
        self._set_verdicts(jobs, judged)
        self.drafting = NO_DRAFTING
        starts = accumulate((job.num_rows for job in jobs), initial=0)
        going_on = [
            (job, own.Judged(job.sequence, job.drafting, start, job.result))
            for job, start in zip(jobs, starts, strict=False)
            if isinstance(job, VerifyJob) and job.drafting and isinstance(job.result, Verdict)
        ]
        drafted = [each for _, each in going_on if each.drafting.wanted.num_draft_tokens]
        if drafted and self.drafts is not None:
            started_ns = clock.stopwatch_ns()
            self.drafts.propose(drafted)
            spent_ns, prefill_ns = clock.stopwatch_ns() - started_ns, self.drafts.prefill_ns
            counts = self.drafts.num_passes, self.drafts.num_nodes, self.drafts.num_hosted
            self.drafting = DraftCost(*counts, spent_ns - prefill_ns, prefill_ns)
        for job, each in going_on:
            each.judge()
            job.follow()

    @staticmethod
    def _set_verdicts(jobs: Sequence[Job], judged: Results) -> None:
        token_ids, tail_mass = judged.token_ids.tolist(), judged.tail_mass.tolist()
        probs, support_len = [*judged.target_probs], judged.target_probs.shape[1]
        start = sampled = 0
        verifies = (job for job in jobs if isinstance(job, VerifyJob))
        for i, job in enumerate(verifies):
            end, num_drafts = start + job.num_rows, job.num_rows - 1
            target_probs: Sequence[FloatArray] = ()
            tails: Sequence[float] = ()
            if not job.sequence.encoded.traits & MATCHED:
                on_drafts = slice(sampled, sampled + num_drafts)
                target_probs, tails = probs[on_drafts], tail_mass[on_drafts]
                lengths = [len(support.token_ids) for support in job.proposal.supports]
                if min(lengths, default=support_len) < support_len:
                    target_probs = [row[:n] for row, n in zip(target_probs, lengths, strict=True)]
                sampled += job.num_rows
            logprobs = judged.logprobs.get(i, ())
            verdict = Verdict(job.committed_len, token_ids[start:end], target_probs, tails, logprobs)
            error = job.masks.error if job.masks is not None else None
            # Of rows that the rule does not reach nothing may be told: see `acceptance.accept`.
            if error is None and token_ids[start] == NO_TOKEN:
                error = InternalError("the target's logits are not finite")
            job.result = error or verdict
            start = end


def _evaluate(log_probs: Tensor, cases: Cases) -> Results:
    """Compute all results on the device, and copy them to the host at once."""
    matched, sampled = cases.rows.having(MATCHED), cases.rows.having(MATCHED, wanted=False)
    # A row's maximum is not finite where its logits are not, or where the parameters made them so; single
    # entries of -inf do not show.
    found = [log_probs.amax(dim=1)]
    if matched is not None:
        found.append(choose_matched(take_rows(log_probs, matched), cases.rows.take(matched)))
    if sampled is not None:
        probs = take_rows(log_probs, sampled).exp()
        uniforms = uniforms_for(cases.rows.take(sampled), Purpose.TARGET, probs.device)
        support_ids = to_device(padded(cases.support_ids, cases.support_lens, -1), probs.device)
        found += sampling.judge_support(probs, support_ids, uniforms)
    maxima, *results = to_host(*found)
    token_ids = np.empty(len(maxima), np.int64)
    target_probs, tail_mass = _NO_PROBS, _NO_MASS
    if matched is not None:
        token_ids[matched] = results[0]
    if sampled is not None:
        target_probs, tail_mass, token_ids[sampled] = results[-3:]
    token_ids[~np.isfinite(maxima)] = NO_TOKEN
    return Results(token_ids, target_probs, tail_mass, {})


def _logprobs(reported: Reported, logits: Tensor, token_ids: IntArray) -> list[Logprobs]:
    """Log probabilities before warps and penalties, of every token that may be emitted and the likeliest."""
    each = zip(token_ids, reported.candidates, strict=True)
    candidates = [np.unique(found[found >= 0]) for own, ids in each for found in [np.append(ids, own)]]
    return position_logprobs(logits, candidates, reported.num_top)
