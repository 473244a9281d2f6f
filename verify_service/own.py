"""What a target proposes by itself after its own verdicts, and the noise that it shares with them.

    verdict ─▶ rule ─▶ outcome ─▶ `OwnDrafts`: heads, or the model without some blocks ─▶ proposal

On the engine thread, right after a pass. The coordinator comes to the same outcome or drops the proposal.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from specwire.core import Proposal
from specwire.engine.jobs import TokenSequence
from specwire.errors import SpecwireError
from specwire.rule.columns import GUMBEL, MATCHED, Rows
from specwire.rule.random import gumbel_noise
from specwire.rule.transfer import to_device
from specwire.support import certain
from verify_service.verifier import VerifyJob

log = logging.getLogger(__name__)

_MOST_NOISE = 1 << 24
"""Numbers that are computed at once; 12 bytes each, for a moment."""


class OwnDrafts(abc.ABC):
    """Proposes for all sequences of a step at once. Engine thread only.

    Attributes:
        num_passes, num_nodes, num_hosted, prefill_ns: that the last proposals took, see `device.DraftCost`.
    """

    num_passes = num_nodes = num_hosted = prefill_ns = 0

    @abc.abstractmethod
    def propose(self, jobs: Sequence[VerifyJob]) -> None:
        """Apply the rule to each verdict, and set `drafted`; a failure costs proposals, never a verdict."""


class ForcedDrafts(OwnDrafts):
    """What a grammar leaves no choice about, of a target that proposes nothing else ("jump-ahead").

        verdict ─▶ rule ─▶ outcome ─▶ the text that must follow ─▶ its tokens ─▶ proposal

    A text is forced more often than a token: most have several spellings, and the target chooses among them.
    So these tokens are judged like those of any draft that is certain of them.
    """

    def propose(self, jobs: Sequence[VerifyJob]) -> None:
        for job in jobs:
            try:
                self._propose(job)
            except SpecwireError as error:  # the next pass comes to it too, and says so
                log.debug("nothing is forced: %s", error)
            except Exception:
                log.exception("forced tokens failed")

    @staticmethod
    def _propose(job: VerifyJob) -> None:
        sequence = job.sequence
        if sequence.grammar is None:
            return
        committed = [*sequence.tokens[: job.committed_len], *job.judge()]
        most = job.draft_depth(len(committed))
        token_ids = sequence.grammar.forced(committed[sequence.prompt_len :], most) if most else []
        if token_ids:
            supports = () if sequence.encoded.traits & MATCHED else certain(token_ids)
            job.drafted = Proposal(len(committed), token_ids, supports)


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
