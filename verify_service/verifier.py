"""From the target's logits to verdicts: its probabilities and its own token at every draft position.

The accept rule itself runs in the coordinator (`specwire.rule.acceptance`). Knows no grpc.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specwire import clock
from specwire.core import NO_TOKEN, Logprobs, Outcome, Proposal, Verdict, Wanted
from specwire.engine.device import NO_DRAFTING, DraftCost
from specwire.engine.grammars.matcher import LazyMasks
from specwire.engine.jobs import Job
from specwire.errors import InternalError, SpecwireError
from specwire.proposals import tree
from specwire.proposals.tree import TokenTree
from specwire.rule import acceptance, sampling
from specwire.rule.columns import EDITED, LOGPROBS, MATCHED, Row, Rows, padded
from specwire.rule.random import Purpose
from specwire.rule.rows import choose_matched, position_logprobs, take_rows, uniforms_for
from specwire.rule.transfer import to_device, to_host
from specwire.support import NO_SUPPORT, FloatArray, IntArray

if TYPE_CHECKING:
    from verify_service.own import OwnDrafts

log = logging.getLogger(__name__)

_MAX_UNASKED = 6
"""Rounds with its own proposals that a sequence may be ahead of its coordinator, whose client may pause: as
many as results are held for (`engine/replies.py`), and those on their way."""
_NO_IDS: IntArray = np.empty(0, dtype=np.int64)
_NO_PROBS: FloatArray = np.empty((0, 0), dtype=np.float32)
_NO_MASS: npt.NDArray[np.float64] = np.empty(0)


@dataclass(slots=True, eq=False)
class Going:
    """How a sequence goes on by itself. Two threads share it, and each attribute is written by one of them.

    Attributes:
        end_len: most tokens that it may come to.
        longest_len: most tokens that it may have, drafts included.
        goes_on: whether it begins rounds that it was not asked for.
        wanted: after verdicts from now on; by the event loop.
        num_asked: rounds that it had begun and was asked for since; by the event loop.
        first_id: of its rounds; they count down from there.
        num_begun: rounds that it began; by the engine thread.
    """

    end_len: int
    longest_len: int
    goes_on: bool
    wanted: Wanted = field(default_factory=Wanted)
    num_asked: int = 0
    first_id: int = -1
    num_begun: int = 0

    def again(self) -> Going:
        """For a sequence that was asked for another round than it had begun: none counts any more.

        The engine may be about to begin one; its id is not used again.
        """
        first_id = self.first_id - self.num_begun - 1
        return Going(self.end_len, self.longest_len, self.goes_on, self.wanted, first_id=first_id)


@dataclass(eq=False)
class VerifyJob(Job):
    """Commit tokens, then verify a proposal after them, in one forward pass.

    Attributes:
        ahead_id: of the round, if the sequence began it by itself; else 0.
        going: of its sequence, which proposes after the verdict or goes on; None if it does neither.
        wanted: to be proposed after the verdict.
        first_row: of its rows in the step.
        outcome: of the verdict, by the same rule as the coordinator's; None until the rule is applied.
        drafted: the sequence's own proposal after the outcome; None if there is none.
    """

    proposal: Proposal = field(default_factory=lambda: Proposal(0))
    ahead_id: int = 0
    going: Going | None = None
    wanted: Wanted = field(default_factory=Wanted)
    first_row: int = 0
    outcome: Outcome | None = None
    drafted: Proposal | None = None
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

    def judge(self) -> list[int]:
        """Apply the rule to the verdict, and set the outcome; returns the tokens that it commits."""
        sequence = self.sequence
        self.outcome = acceptance.accept(self.proposal, self.result, sequence.params, sequence.seed)
        return self._emitted(self.outcome)

    def _emitted(self, outcome: Outcome) -> list[int]:
        return [*(self.proposal.token_ids[node] for node in outcome.path), outcome.next_token]

    def draft_depth(self, committed_len: int) -> int:
        """Most draft tokens on a path after so many committed ones; 0 if nothing is wanted, or has room."""
        assert self.going is not None
        # The last token is the target's own.
        wanted, room = self.wanted, self.going.end_len - committed_len - 1
        return max(0, min(wanted.max_depth or wanted.num_draft_tokens, wanted.num_draft_tokens, room))

    def go_on(self) -> None:
        """Apply the rule, if no drafter has, and begin the next round, if the sequence does so by itself.

        Without an outcome nothing goes on, and the verdict stands.
        """
        if self.outcome is None and NO_TOKEN not in self.result.target_token_ids:
            try:
                self.judge()
            except SpecwireError as error:
                log.debug("a verdict cannot be judged: %s", error)
            except Exception:
                log.exception("going on failed")
        self.following = self._begun()

    def _begun(self) -> VerifyJob | None:
        """The next round, with what was drafted or without, as the latest wishes say; None if none."""
        going, outcome = self.going, self.outcome
        if going is None or outcome is None or not going.goes_on:
            return None
        committed_len = self.committed_len + outcome.num_accepted + 1
        proposal = self.drafted or Proposal(committed_len)
        most_ahead = _MAX_UNASKED if self.drafted else going.wanted.num_plain
        if committed_len >= going.end_len or committed_len + len(proposal.token_ids) > going.longest_len:
            return None
        if going.num_begun - going.num_asked >= most_ahead:
            return None
        ahead_id = going.first_id - going.num_begun
        going.num_begun += 1
        return VerifyJob(
            self.sequence,
            self.committed_len,
            self._emitted(outcome),
            proposal=proposal,
            ahead_id=ahead_id,
            going=going,
            wanted=going.wanted,
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
        self.drafts: OwnDrafts | None = None
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
        going_on = [
            job
            for job in jobs
            if isinstance(job, VerifyJob) and job.going and isinstance(job.result, Verdict)
        ]
        drafting = [job for job in going_on if job.wanted.num_draft_tokens]
        if drafting and self.drafts is not None:
            started_ns = clock.stopwatch_ns()
            self.drafts.propose(drafting)
            spent_ns, prefill_ns = clock.stopwatch_ns() - started_ns, self.drafts.prefill_ns
            counts = self.drafts.num_passes, self.drafts.num_nodes, self.drafts.num_hosted
            self.drafting = DraftCost(*counts, spent_ns - prefill_ns, prefill_ns)
        for job in going_on:
            job.go_on()

    @staticmethod
    def _set_verdicts(jobs: Sequence[Job], judged: Results) -> None:
        token_ids, tail_mass = judged.token_ids.tolist(), judged.tail_mass.tolist()
        probs, support_len = [*judged.target_probs], judged.target_probs.shape[1]
        start = sampled = 0
        verifies = (job for job in jobs if isinstance(job, VerifyJob))
        for i, job in enumerate(verifies):
            job.first_row, end, num_drafts = start, start + job.num_rows, job.num_rows - 1
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
