"""What a target proposes by itself after its own verdicts: what is wanted, the rule, and the noise it shares.

    verdict ─▶ rule ─▶ outcome ─▶ `OwnDrafts`: heads, or the model without some blocks ─▶ proposal

On the engine thread, right after a pass. The coordinator comes to the same outcome or drops the proposal.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specwire.core import NO_TOKEN, Outcome, Proposal, Verdict, Wanted
from specwire.engine.jobs import TokenSequence
from specwire.errors import SpecwireError
from specwire.rule import acceptance
from specwire.rule.columns import GUMBEL, MATCHED, Rows
from specwire.rule.random import gumbel_noise
from specwire.rule.transfer import to_device
from specwire.support import certain

log = logging.getLogger(__name__)

_MAX_UNASKED = 6
"""Rounds with its own proposals that a sequence may be ahead of its coordinator, whose client may pause: as
many as results are held for (`engine/replies.py`), and those on their way."""
_MOST_NOISE = 1 << 24
"""Numbers that are computed at once; 12 bytes each, for a moment."""


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


@dataclass(slots=True, eq=False)
class Drafting:
    """What to propose after a job's verdict, and what was proposed.

    Attributes:
        judged: the proposal of the verdict, with what the rule needs.
        going: of its sequence.
        ahead_id: of the round, if the sequence began it by itself; else 0.
        outcome: of the verdict, by the same rule as the coordinator's; set with `proposal`.
        proposal: after the outcome; None if there is none.
    """

    judged: Proposal
    wanted: Wanted
    going: Going
    ahead_id: int = 0
    outcome: Outcome | None = None
    proposal: Proposal | None = None

    def judge(self, sequence: TokenSequence, verdict: Verdict) -> list[int]:
        """Apply the rule, and set the outcome; returns the tokens that it commits."""
        self.outcome = acceptance.accept(self.judged, verdict, sequence.params, sequence.seed)
        return [*(self.judged.token_ids[node] for node in self.outcome.path), self.outcome.next_token]

    def depth(self, committed_len: int) -> int:
        """Most draft tokens on a path after so many committed ones; 0 if nothing is wanted, or has room."""
        # The last token is the target's own.
        wanted, room = self.wanted, self.going.end_len - committed_len - 1
        return max(0, min(wanted.max_depth or wanted.num_draft_tokens, wanted.num_draft_tokens, room))

    def following(self) -> Drafting | None:
        """The round that the sequence begins by itself now, as the latest wishes say; None if none."""
        going, proposal = self.going, self.proposal
        if self.outcome is None or not going.goes_on:
            return None
        committed_len = self.judged.base_len + self.outcome.num_accepted + 1
        longest_len = committed_len + len(proposal.token_ids if proposal else ())
        most_ahead = _MAX_UNASKED if proposal else going.wanted.num_plain
        if committed_len >= going.end_len or longest_len > going.longest_len:
            return None
        if going.num_begun - going.num_asked >= most_ahead:
            return None
        ahead_id = going.first_id - going.num_begun
        going.num_begun += 1
        return Drafting(proposal or Proposal(committed_len), going.wanted, going, ahead_id)


class Judged(NamedTuple):
    """A sequence that is drafted for; its tokens end with those that the verdict is about.

    Attributes:
        row: the first of the verdict's rows.
    """

    sequence: TokenSequence
    drafting: Drafting
    row: int
    verdict: Verdict

    def judge(self) -> None:
        """Apply the rule, if no drafter has; without an outcome nothing goes on, and the verdict stands."""
        if self.drafting.outcome is None and NO_TOKEN not in self.verdict.target_token_ids:
            try:
                self.drafting.judge(self.sequence, self.verdict)
            except SpecwireError as error:
                log.debug("a verdict cannot be judged: %s", error)
            except Exception:
                log.exception("going on failed")


class OwnDrafts(abc.ABC):
    """Proposes for all sequences of a step at once. Engine thread only.

    Attributes:
        num_passes, num_nodes, num_hosted, prefill_ns: that the last proposals took, see `device.DraftCost`.
    """

    num_passes = num_nodes = num_hosted = prefill_ns = 0

    @abc.abstractmethod
    def propose(self, judged: Sequence[Judged]) -> None:
        """Set outcome and proposal of each; a failure costs proposals, never a verdict."""


class ForcedDrafts(OwnDrafts):
    """What a grammar leaves no choice about, of a target that proposes nothing else ("jump-ahead").

        verdict ─▶ rule ─▶ outcome ─▶ the text that must follow ─▶ its tokens ─▶ proposal

    A text is forced more often than a token: most have several spellings, and the target chooses among them.
    So these tokens are judged like those of any draft that is certain of them.
    """

    def propose(self, judged: Sequence[Judged]) -> None:
        for each in judged:
            try:
                self._propose(each)
            except SpecwireError as error:  # the next pass comes to it too, and says so
                log.debug("nothing is forced: %s", error)
            except Exception:
                log.exception("forced tokens failed")

    @staticmethod
    def _propose(judged: Judged) -> None:
        sequence, drafting, _, verdict = judged
        if sequence.grammar is None:
            return
        committed = [*sequence.tokens[: verdict.base_len], *drafting.judge(sequence, verdict)]
        most = drafting.depth(len(committed))
        token_ids = sequence.grammar.forced(committed[sequence.prompt_len :], most) if most else []
        if token_ids:
            supports = () if sequence.encoded.traits & MATCHED else certain(token_ids)
            drafting.proposal = Proposal(len(committed), token_ids, supports)


class Noise:
    """The target's noise under Gumbel coupling, at the positions of a step's proposals.

    A call costs as much for some positions as for one, so it is computed for all of them at once, or for one
    depth after another where vocabulary and batch are large, or ranks draft. Nodes of a depth share it.
    """

    def __init__(self, drafted: Iterable[tuple[TokenSequence, int, int]] = ()) -> None:
        """Args:
        drafted: each sequence, how many tokens it has, and how many may be drafted after these.
        """
        self._places: dict[tuple[int, ...], int] = {}
        self._noise: Tensor
        self._keys: list[tuple[int, ...]] = [
            (sequence.seed, position)
            for sequence, start, depth in drafted
            if sequence.encoded.traits & GUMBEL
            for position in range(start, start + depth)
        ]

    def __reduce__(self) -> tuple[type[Noise], tuple[()]]:
        """What a rank is sent computes what one pass needs."""
        return Noise, ()

    def added(self, scores: Tensor, rows: Rows) -> Tensor:
        """Scores [num_rows, vocab_size], with noise where tokens are coupled."""
        noisy = rows.having(GUMBEL)
        if noisy is None:
            return scores
        columns = np.stack([rows.seeds[noisy], rows.positions[noisy]])
        keys = [*zip(*columns.tolist(), strict=True)]
        device, vocab_size = scores.device, scores.shape[1]
        if not self._places.keys() >= set(keys):
            later, self._keys = [key for key in self._keys if key not in set(keys)], []
            wanted = [*dict.fromkeys(keys)]
            if len(wanted) + len(later) <= _MOST_NOISE // vocab_size:
                wanted += later
            self._places = {key: place for place, key in enumerate(wanted)}
            # Single precision: what is proposed need not be exact.
            seeds, positions = np.array(wanted, np.int64).T
            self._noise = gumbel_noise(seeds, positions, vocab_size, device).float()
        places = np.array([self._places[key] for key in keys], np.int64)
        noise = self._noise[to_device(places, device)]
        if isinstance(noisy, slice):
            return scores + noise
        return scores.index_add(0, to_device(noisy, device), noise)
