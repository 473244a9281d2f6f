"""Rounds by hand, as a client receives them: a tree of a model, a chain from the text, and a plain round."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from coordinator.cost import Cost
from coordinator.credit import Credit
from coordinator.generation import Round
from coordinator.ledger import Ledger
from coordinator.session import Session
from coordinator.tally import Tally
from specwire.completion import Chunk, ResumeInfo
from specwire.core import ModelInfo, Outcome, Proposal, Rule, SamplingParams, Verdict
from specwire.rpc.wire import client as wire

WORDS = (" return", " if", " self", " n", ".items", "\n", "def", " push", " pop", "(")
#   return ── self ── .items      two children of the prefix; kept is "return n", and "\n" follows
#          └─ n
#   if
TREE = Round(
    Proposal(3, [0, 1, 2, 3, 4], source="small", parents=[-1, -1, 0, 0, 2]),
    Verdict(3, [0, 3, 9, 9, 5, 9]),
    Outcome([0, 3], 5),
    Cost(),
    Cost(),
)
CHAIN = Round(Proposal(6, [6, 7], source="ngram"), Verdict(6, [6, 8, 9]), Outcome([0], 8), Cost(), Cost())
PLAIN = Round(Proposal(8), Verdict(8, [9]), Outcome([], 9), Cost(), Cost())


class _Words:
    """A tokenizer of these words."""

    special_ids = frozenset[int]()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(WORDS[token_id] for token_id in token_ids)


def received_chunks(*, report_progress: bool, stop: str = "", rounds_per_chunk: int = 1) -> list[Chunk]:
    """The chunks of these rounds, over the wire."""
    request: Any = SimpleNamespace(  # what a session reads of one
        prompt_token_ids=[7, 8, 9],
        params=SamplingParams(max_tokens=6, stop=(stop,) if stop else ()),
        target=ModelInfo(name="large", vocab_size=len(WORDS), context_len=64),
        generated_token_ids=[],
        end_ids=frozenset(),
        resume_info=ResumeInfo(seed=1, rule=Rule.GUMBEL, context_digest=""),
        report_progress=report_progress,
    )
    tokenizer: Any = _Words()
    drafter: Any = SimpleNamespace(unavailable="")
    session = Session(
        request=request,
        drafter=drafter,
        tokenizer=tokenizer,
        credit=Credit(0, 65),
        ledger=Ledger(),
        totals=Tally(),
    )

    chunks = []
    rounds = (TREE, CHAIN, PLAIN)
    for number, done in enumerate(rounds, start=1):
        session.add(done)
        if number % rounds_per_chunk == 0 or number == len(rounds):
            chunks.append(wire.chunk_from_proto(session.take().chunk))
    return chunks
