"""From the target's logits to verdicts: its probabilities and its own token at every draft position.

The accept rule itself runs in the coordinator (`specwire.rule.acceptance`). Knows no grpc.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specwire.core import NO_TOKEN, Logprobs, Proposal, SamplingParams, Verdict
from specwire.engine.device import NO_DRAFTING, Drafting
from specwire.engine.grammars.matcher import LazyMasks
from specwire.engine.jobs import Job
from specwire.errors import InternalError
from specwire.proposals import tree
from specwire.proposals.estimate import clock
from specwire.proposals.tree import TokenTree
from specwire.rule import sampling
from specwire.rule.columns import EDITED, LOGPROBS, MATCHED, Places, Row, Rows, padded
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

    def case(self) -> Case:
        """What to judge, and the parameters needed for it."""
        sequence, params = self.sequence, self.sequence.params
        return Case(
            params=params,
            prompt_len=sequence.prompt_len,
            history=np.array(sequence.tokens, np.int64) if params.needs_history else _NO_IDS,
            committed_len=self.committed_len,
            seed=sequence.seed,
            proposal=self.proposal,
            masks=self.masks,
        )

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

    def ask_masks(self) -> None:
        """Of its rows."""
        if self.sequence.grammar is not None:
            tokens = self.sequence.tokens[: self.committed_len]
            self.masks = self.sequence.masks(tokens, self.proposal.token_ids, self.proposal.parents)


class Case(NamedTuple):
    """One sequence's rows, one by one: for the committed prefix, and for each draft token.

    Attributes:
        history: int64, all of its tokens, drafts included; empty where the parameters do not need them.
        committed_len: position of its first row.
        masks: of the rows, where there is a grammar.
    """

    params: SamplingParams
    prompt_len: int
    history: IntArray
    committed_len: int
    seed: int
    proposal: Proposal
    masks: LazyMasks | None = None

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return len(self.proposal.token_ids) + 1

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
                masks=self.masks,
                mask_row=i,
            )
            for i, (position, history) in enumerate(self._paths())
        ]

    def _paths(self) -> Iterator[tuple[int, IntArray]]:
        """The position of each row, and the tokens before it."""
        parents = self.proposal.parents
        if not parents:
            for position in range(self.committed_len, self.committed_len + self.num_rows):
                yield position, self.history[:position]
            return
        for node in range(-1, len(parents)):
            path = np.array(tree.path_to(parents, node), np.int64)
            history = self.history
            if len(history):
                history = np.concatenate([history[: self.committed_len], history[self.committed_len + path]])
            yield self.committed_len + len(path), history

    def row_supports(self) -> list[IntArray]:
        """The support at each row; empty at the last row, where nothing was proposed."""
        supports = self.proposal.supports or [NO_SUPPORT] * len(self.proposal.token_ids)
        return [*(support.token_ids for support in supports), _NO_IDS]

    def row_drafts(self) -> list[list[int]]:
        """The draft tokens that may be accepted at each row."""
        token_ids = self.proposal.token_ids
        return [
            [token_ids[child] for child in self.proposal.children(node)] for node in range(-1, len(token_ids))
        ]


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
    reporting: Mapping[int, Case]

    @classmethod
    def of(cls, jobs: Sequence[VerifyJob]) -> Cases:
        """One for each job."""
        encoded = [job.sequence.encoded for job in jobs]
        num_rows = [job.num_rows for job in jobs]
        committed_lens = [job.committed_len for job in jobs]
        supports: list[IntArray] = []
        special: dict[int, Case] = {}
        for i, (job, one) in enumerate(zip(jobs, encoded, strict=True)):
            if not one.traits & MATCHED:
                supports += [*(support.token_ids for support in job.proposal.supports), _NO_IDS]
            if job.proposal.parents or one.traits & (EDITED | LOGPROBS):
                special[i] = job.case()
        paths = {
            i: [row.position for row in case.rows()] for i, case in special.items() if case.proposal.parents
        }
        edited: dict[int, Row] = {}
        for i, case in special.items():
            if encoded[i].traits & EDITED:
                edited |= enumerate(case.rows(), sum(num_rows[:i]))
        return cls(
            rows=Rows(encoded, num_rows, committed_lens, committed_lens, paths, edited),
            support_ids=np.concatenate([_NO_IDS, *supports]),
            support_lens=np.fromiter(map(len, supports), np.int64, len(supports)),
            reporting={i: case for i, case in special.items() if case.params.logprobs is not None},
        )

    @property
    def starts(self) -> list[int]:
        """[num_cases], each one's first row."""
        return [0, *accumulate(self.rows.num_rows[:-1])]


class Judged(NamedTuple):
    """The results of a step.

    Attributes:
        token_ids: int64 [num_rows], the target's own token where tokens are matched, else one drawn outside
            the support; `NO_TOKEN` where no logit is finite, or one is not a number, whose other fields are
            meaningless.
        target_probs: float32 [num_sampled_rows, longest support], 0 beyond the row's own.
        tail_mass: float64 [num_sampled_rows].
        logprobs: of the cases that report them, by index.
        states: of the rows, on the device, where heads read them.
    """

    token_ids: IntArray
    target_probs: FloatArray
    tail_mass: npt.NDArray[np.float64]
    logprobs: dict[int, list[Logprobs]]
    states: Tensor | None = None


class VerifyDecider:
    """Verdicts for all jobs of a step at once; a `device.Decider`.

    Attributes:
        drafts: what proposes after verdicts; None if nothing does. With heads, each row of logits is followed
            by its state.
        drafting: see `device.Decider`.
    """

    def __init__(self) -> None:
        self.drafts: own.OwnDrafts | None = None
        self.drafting = NO_DRAFTING

    @staticmethod
    def ask(jobs: Sequence[Job]) -> Cases:
        """One case for each job."""
        verifies = [job for job in jobs if isinstance(job, VerifyJob)]
        for job in verifies:
            job.ask_masks()
        return Cases.of(verifies)

    def decide(self, cases: Cases, logits: Tensor) -> Judged:
        """Judge all cases; logits are [sum of (num_draft_tokens + 1), vocab_size]."""
        if self.drafts is None:
            return self._judged(cases, logits)
        logits, states = self.drafts.split(logits)
        return self._judged(cases, logits)._replace(states=states)

    @staticmethod
    def _judged(cases: Cases, logits: Tensor) -> Judged:
        rows = cases.rows
        log_probs = sampling.apply_warps(sampling.apply_history(logits, rows), rows)
        judged = _evaluate(log_probs, cases)
        starts = cases.starts
        for i, case in cases.reporting.items():
            here = slice(starts[i], starts[i] + case.num_rows)
            judged.logprobs[i] = _logprobs(case, logits[here], judged.token_ids[here].tolist())
        return judged

    def apply(self, jobs: Sequence[Job], judged: Judged) -> None:
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
            self.drafts.propose(drafted, judged.states)
            spent_ns, prefill_ns = clock.stopwatch_ns() - started_ns, self.drafts.prefill_ns
            counts = self.drafts.num_passes, self.drafts.num_nodes
            self.drafting = Drafting(*counts, spent_ns - prefill_ns, prefill_ns)
        for job, each in going_on:
            each.judge()
            job.follow()

    @staticmethod
    def _set_verdicts(jobs: Sequence[Job], judged: Judged) -> None:
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
            job.result = error or (verdict if token_ids[start] != NO_TOKEN else _not_finite())
            start = end


def _evaluate(log_probs: Tensor, cases: Cases) -> Judged:
    """Compute all results on the device, and copy them to the host at once."""
    matched, sampled = cases.rows.having(MATCHED), cases.rows.having(MATCHED, wanted=False)
    # A row's maximum is not finite where its logits are not, or where the parameters made them so; single
    # entries of -inf do not show.
    chosen, judged = _choose(log_probs, cases.rows, matched), _judge(log_probs, cases, sampled)
    maxima, *results = to_host(log_probs.amax(dim=1), *chosen, *judged)
    token_ids = np.empty(len(maxima), np.int64)
    target_probs, tail_mass = _NO_PROBS, _NO_MASS
    if matched is not None:
        token_ids[matched] = results[0]
    if sampled is not None:
        target_probs, tail_mass, token_ids[sampled] = results[-3:]
    token_ids[~np.isfinite(maxima)] = NO_TOKEN
    return Judged(token_ids, target_probs, tail_mass, {})


def _choose(log_probs: Tensor, rows: Rows, places: Places | None) -> tuple[Tensor, ...]:
    """Greedy and Gumbel: the target's own choice at each of some rows, int64 [num_places]."""
    return () if places is None else (choose_matched(take_rows(log_probs, places), rows.take(places)),)


def _judge(log_probs: Tensor, cases: Cases, places: Places | None) -> tuple[Tensor, ...]:
    """Rejection sampling: the results of `sampling.judge_support` for the sampled rows."""
    if places is None:
        return ()
    probs = take_rows(log_probs, places).exp()
    uniforms = uniforms_for(cases.rows.take(places), Purpose.TARGET, probs.device)
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
