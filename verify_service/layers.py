"""What a target proposes after its own verdicts, drafted by itself with some of its blocks left out.

    cache   ├── committed, computed by the whole model ──┤├─ next token, draft tokens ─┤
                                                          written by draft passes, then dropped

Draft passes attend to the keys that the whole model has computed. What they write behind these is dropped
before the next pass, which computes it anew with all blocks; it is never known to other sequences. A proposal
is a chain. It ends after a token of which the draft was not sure (`threshold.py`), which the next pass runs
at next to no cost.

Where tokens are matched the draft draws with the target's noise. Under rejection sampling it takes its
likeliest tokens: a function of committed tokens alone, hence a draft that is certain of them, whose length
and delay may depend on them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specwire.core import Proposal
from specwire.engine.batch import Feed, Feeds
from specwire.engine.jobs import TokenSequence
from specwire.engine.layers.blocks import Blocks
from specwire.errors import SpecwireError
from specwire.rule import sampling
from specwire.rule.columns import MATCHED, Row, Rows
from specwire.rule.transfer import to_host
from specwire.support import certain
from verify_service.own import Judged, Noise
from verify_service.threshold import Threshold

log = logging.getLogger(__name__)


class PartialRunner(Protocol):
    """Runs the target, or a part of it."""

    vocab_size: int

    def forward_without(self, left_out: Blocks, feeds: Sequence[Feed]) -> Tensor:
        """See `ModelRunner.forward_without`."""


@dataclass(slots=True, eq=False)
class _Chain:
    """A sequence's proposal while it is drafted.

    Attributes:
        committed: its tokens, those of the outcome included; the last one is not in the cache.
        most: draft tokens.
    """

    sequence: TokenSequence
    committed: list[int]
    most: int
    threshold: Threshold
    token_ids: list[int] = field(default_factory=list)

    @property
    def feed(self) -> Feed:
        """The last token, whose successor is drafted."""
        return Feed(self.sequence.cache, [self.token_ids[-1] if self.token_ids else self.committed[-1]])

    def sampled(self) -> Row:
        """How the next draft token is sampled."""
        sequence, committed = self.sequence, self.committed
        return Row(
            sequence.params,
            sequence.prompt_len,
            [*committed, *self.token_ids] if sequence.params.needs_history else (),
            len(committed) + len(self.token_ids),
            sequence.seed,
            len(committed),
            sequence.masks([*committed, *self.token_ids]) if sequence.grammar else None,
        )

    def add(self, token_id: int, confidence: float) -> bool:
        """One more token; returns whether others are to follow."""
        self.token_ids.append(token_id)
        return confidence >= self.threshold.value and len(self.token_ids) < self.most

    def proposal(self) -> Proposal:
        """Of the tokens so far."""
        supports = () if self.sequence.encoded.traits & MATCHED else certain(self.token_ids)
        return Proposal(len(self.committed), self.token_ids, supports)


class LayersDrafts:
    """See `OwnDrafts`.

    Args:
        runner: of the target.
        left_out: what draft passes leave out.
    """

    def __init__(self, runner: PartialRunner, left_out: Blocks) -> None:
        self._runner, self._left_out = runner, left_out
        self._drafted: WeakKeyDictionary[TokenSequence, _Chain] = WeakKeyDictionary()

    def split(self, logits: Tensor) -> tuple[Tensor, None]:
        """See `OwnDrafts`; it reads no states."""
        return logits, None

    def propose(self, judged: Sequence[Judged], states: Tensor | None) -> None:
        """See `OwnDrafts`."""
        chains: list[_Chain] = []
        try:
            for each in judged:
                chain = self._begin(each)
                if chain is not None:
                    chains.append(chain)
            self._draft(chains)
        except SpecwireError as error:  # such as a cache that is full
            log.debug("no proposals: %s", error)
        except Exception:
            log.exception("drafting without some layers failed")
        for chain in chains:
            cache = chain.sequence.cache
            cache.truncate(min(cache.length, len(chain.committed) - 1))
        by_sequence = {chain.sequence: chain for chain in chains if chain.token_ids}
        for each in judged:
            if (found := by_sequence.get(each.sequence)) is not None:
                each.drafting.proposal = found.proposal()

    def _begin(self, each: Judged) -> _Chain | None:
        """Apply the rule, learn from the outcome, and begin what follows it; None if nothing is to."""
        sequence, drafting, _, verdict = each
        emitted = drafting.judge(sequence, verdict)
        proposal, cache = drafting.judged, sequence.cache
        before = self._drafted.pop(sequence, None)
        threshold = before.threshold if before else Threshold()
        num_drafted = len(proposal.token_ids)
        if before is not None and num_drafted and proposal.base_len == len(before.committed):
            threshold.learn(len(emitted) - 1, num_drafted, was_longest=num_drafted == before.most)
        committed = [*sequence.tokens[: proposal.base_len], *emitted]
        chain = _Chain(sequence, committed, drafting.depth(len(committed)), threshold)
        self._drafted[sequence] = chain
        num_kept = len(committed) - 1
        if not chain.most or proposal.parents or cache.length < num_kept:
            return None
        cache.truncate(num_kept)
        return chain

    def _draft(self, chains: Sequence[_Chain]) -> None:
        """One pass for each token, of all sequences together that are not done."""
        noise: Noise | None = None
        while chains:
            logits = self._runner.forward_without(self._left_out, Feeds.of([each.feed for each in chains]))
            if noise is None:
                noise = Noise(
                    ((each.sequence, len(each.committed), each.most) for each in chains),
                    logits.shape[1],
                    logits.device,
                )
            token_ids, shares = _likeliest(logits, Rows.of([each.sampled() for each in chains]), noise)
            chains = [
                each
                for each, token_id, share in zip(chains, token_ids, shares, strict=True)
                if each.add(token_id, share)
            ]


def _likeliest(logits: Tensor, rows: Rows, noise: Noise) -> tuple[list[int], list[float]]:
    """The token of each row that is drafted, and how likely it is by the draft's scores alone."""
    scores = sampling.apply_warps(sampling.apply_history(logits, rows), rows)
    scores = noise.added(scores, rows)
    best = scores.max(dim=-1)
    shares = torch.exp(best.values - scores.logsumexp(dim=-1))
    token_ids, confidences = to_host(best.indices, shares.nan_to_num(0.0))
    found: tuple[list[int], list[float]] = token_ids.tolist(), confidences.tolist()
    return found
