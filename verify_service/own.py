"""What a target proposes by itself after its own verdicts: what is wanted, the rule, and the noise it shares.

    verdict ─▶ rule ─▶ outcome ─▶ `OwnDrafts`: heads, or the model without some blocks ─▶ proposal

On the engine thread, right after a pass. The coordinator comes to the same outcome or drops the proposal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specwire.core import Outcome, Proposal, Verdict
from specwire.engine.jobs import TokenSequence
from specwire.rule import acceptance
from specwire.rule.columns import GUMBEL, Rows
from specwire.rule.random import gumbel_noise
from specwire.rule.transfer import to_device

_MOST_NOISE = 1 << 24
"""Numbers that are computed at once; 12 bytes each, for a moment."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a sequence's coordinator wants to be proposed after a verdict.

    Attributes:
        num_draft_tokens: none if 0.
        max_depth: longest path of a tree; 0 for a chain.
    """

    num_draft_tokens: int = 0
    max_depth: int = 0


NOTHING = Wanted()


@dataclass(slots=True, eq=False)
class Drafting:
    """What to propose after a job's verdict, and what was proposed.

    Attributes:
        judged: the proposal of the verdict, with what the rule needs.
        end_len: most tokens that the sequence may come to.
        outcome: of the verdict, by the same rule as the coordinator's; set with `proposal`.
        proposal: after the outcome; None if there is none.
    """

    judged: Proposal
    wanted: Wanted
    end_len: int
    outcome: Outcome | None = None
    proposal: Proposal | None = None

    def judge(self, sequence: TokenSequence, verdict: Verdict) -> list[int]:
        """Apply the rule, and set the outcome; returns the tokens that it commits."""
        self.outcome = acceptance.accept(self.judged, verdict, sequence.params, sequence.seed)
        return [*(self.judged.token_ids[node] for node in self.outcome.path), self.outcome.next_token]

    def depth(self, committed_len: int) -> int:
        """Most draft tokens on a path after so many committed ones; 0 if nothing is wanted, or has room."""
        wanted, room = self.wanted, self.end_len - committed_len - 1  # the last token is the target's own
        return max(0, min(wanted.max_depth or wanted.num_draft_tokens, wanted.num_draft_tokens, room))


class Judged(NamedTuple):
    """A sequence that is drafted for; its tokens end with those that the verdict is about.

    Attributes:
        row: the first of the verdict's rows.
    """

    sequence: TokenSequence
    drafting: Drafting
    row: int
    verdict: Verdict


class OwnDrafts(Protocol):
    """Proposes for all sequences of a step at once. Engine thread only.

    Attributes:
        num_passes, num_nodes, prefill_ns: that the last proposals took, see `device.Drafting`.
    """

    num_passes: int
    num_nodes: int
    prefill_ns: int

    def split(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [num_rows, vocab_size], and the states that lie beside them, if it reads any."""

    def propose(self, judged: Sequence[Judged], states: Tensor | None) -> None:
        """Set outcome and proposal of each; a failure costs proposals, never a verdict.

        Args:
            states: [num_rows, state_size] of the step, as of `split`.
        """


class Noise:
    """The target's noise under Gumbel coupling, at the positions of a step's proposals.

    A call costs as much for some positions as for one, so it is computed for all of them at once, or for one
    depth after another where vocabulary and batch are large. Nodes of a depth share it.
    """

    def __init__(
        self, drafted: Iterable[tuple[TokenSequence, int, int]], vocab_size: int, device: torch.device
    ) -> None:
        """Args:
        drafted: each sequence, how many tokens it has, and how many may be drafted after these.
        """
        self._vocab_size, self._device = vocab_size, device
        self._places: dict[tuple[int, ...], int] = {}
        self._noise: Tensor
        keys = [
            (sequence.seed, position)
            for sequence, start, depth in drafted
            if sequence.encoded.traits & GUMBEL
            for position in range(start, start + depth)
        ]
        if keys and len(keys) * vocab_size <= _MOST_NOISE:
            self._compute(keys)

    def added(self, scores: Tensor, rows: Rows) -> Tensor:
        """Scores [num_rows, vocab_size], with noise where tokens are coupled."""
        noisy = rows.having(GUMBEL)
        if noisy is None:
            return scores
        columns = np.stack([rows.seeds[noisy], rows.positions[noisy]])
        keys = [*zip(*columns.tolist(), strict=True)]
        if not self._places.keys() >= set(keys):
            self._compute(list(dict.fromkeys(keys)))
        places = np.array([self._places[key] for key in keys], np.int64)
        noise = self._noise[to_device(places, self._device)]
        if isinstance(noisy, slice):
            return scores + noise
        return scores.index_add(0, to_device(noisy, self._device), noise)

    def _compute(self, keys: Sequence[tuple[int, ...]]) -> None:
        seeds, positions = np.array(keys, np.int64).T
        self._places = {key: place for place, key in enumerate(keys)}
        # Single precision: what is proposed need not be exact.
        noise = gumbel_noise(seeds, positions, self._vocab_size, self._device)
        self._noise = noise.float()
