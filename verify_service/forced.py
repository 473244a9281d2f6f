"""What a grammar leaves no choice about: the target proposes it after its own verdicts ("jump-ahead").

    verdict ─▶ rule ─▶ outcome ─▶ the text that must follow ─▶ its tokens ─▶ proposal

A text is forced more often than a token: most have several spellings, and the target chooses among them. So
these tokens are judged like those of any draft that is certain of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from specwire.core import Proposal
from specwire.errors import SpecwireError
from specwire.rule.columns import MATCHED
from specwire.support import certain
from verify_service.own import Judged

log = logging.getLogger(__name__)


class ForcedDrafts:
    """Of a target that proposes nothing else; see `own.OwnDrafts`."""

    num_passes = num_nodes = prefill_ns = 0

    def propose(self, judged: Sequence[Judged]) -> None:
        """See `own.OwnDrafts`."""
        for each in judged:
            try:
                _propose(each)
            except SpecwireError as error:  # the next pass comes to it too, and says so
                log.debug("nothing is forced: %s", error)
            except Exception:
                log.exception("forced tokens failed")


def _propose(judged: Judged) -> None:
    drafting, sequence, verdict = judged.drafting, judged.sequence, judged.verdict
    if sequence.grammar is None:
        return
    committed = [*sequence.tokens[: verdict.base_len], *drafting.judge(sequence, verdict)]
    most = drafting.depth(len(committed))
    token_ids = sequence.grammar.forced(committed[sequence.prompt_len :], most) if most else []
    if token_ids:
        is_matched = bool(sequence.encoded.traits & MATCHED)
        supports = () if is_matched else certain(token_ids)
        drafting.proposal = Proposal(len(committed), token_ids, supports)
