"""What a client is shown of a round: the source of each token, and the tree with the path that was kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from coordinator.cost import Cost
from coordinator.credit import Credit
from coordinator.generation import Round
from coordinator.ledger import Ledger
from coordinator.requests import GenerationRequest
from coordinator.session import Session
from coordinator.tally import Tally
from specwire.completion import Chunk, DraftTree, ResumeInfo, Token
from specwire.core import Fate, ModelInfo, Outcome, Proposal, Rule, SamplingParams, Verdict
from specwire.http.answers import fates
from specwire.wire import client as wire

#   a ── c ── e        two children of the prefix; a and d are accepted
#     └─ d
#   b
TREE = Round(
    Proposal(3, [0, 1, 2, 3, 4], source="small", parents=[-1, -1, 0, 0, 2]),
    Verdict(3, [0, 3, 9, 9, 25, 9]),
    Outcome([0, 3], 25),
    Cost(),
    Cost(),
)
CHAIN = Round(Proposal(6, [5, 6], source="ngram"), Verdict(6, [5, 24, 9]), Outcome([0], 24), Cost(), Cost())
PLAIN = Round(Proposal(8), Verdict(8, [23]), Outcome([], 23), Cost(), Cost())


class Letters:
    """A tokenizer whose tokens are the letters of the alphabet."""

    special_ids = frozenset[int]()

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


class Replayed:
    """A generation whose rounds are given."""

    async def rounds(self) -> AsyncIterator[Round]:
        for done in (TREE, CHAIN, PLAIN):
            yield done


def chunks_of_the_rounds(*, report_progress: bool) -> list[Chunk]:
    """As the client receives them."""
    params = SamplingParams(max_tokens=6, temperature=0, seed=1, rule=Rule.GUMBEL)
    request = GenerationRequest(
        prompt_token_ids=[7, 8, 9],
        params=params,
        keyed_params=params,
        target=ModelInfo(name="large", vocab_size=26, context_len=64),
        generated_token_ids=[],
        resume_info=ResumeInfo(seed=1, rule=Rule.GUMBEL, context_digest=""),
        report_progress=report_progress,
        num_draft_tokens=None,
    )
    generation: Any = Replayed()
    tokenizer: Any = Letters()
    session = Session(
        request,
        generation,
        tokenizer=tokenizer,
        credit=Credit(0, 65),
        ledger=Ledger(),
        totals=Tally(),
    )

    async def received() -> list[Chunk]:
        return [wire.chunk_from_proto(wire.chunk_to_proto(chunk)) async for chunk in session.chunks()]

    return asyncio.run(received())


def test_each_draft_token_names_its_source() -> None:
    """Also the rejected ones; recovered and bonus tokens are the target's own."""
    chunks = chunks_of_the_rounds(report_progress=False)
    assert [(token.text, token.fate, token.source) for chunk in chunks for token in chunk.tokens] == [
        ("a", Fate.ACCEPTED, "small"),
        ("d", Fate.ACCEPTED, "small"),
        ("z", Fate.BONUS, ""),
        ("f", Fate.ACCEPTED, "ngram"),
        ("y", Fate.RECOVERED, ""),
        ("x", Fate.BONUS, ""),
    ]
    assert [(token.text, token.source) for chunk in chunks for token in chunk.rejected] == [("g", "ngram")]
    assert {chunk.tree for chunk in chunks} == {None}, "only who asks pays"


def test_progress_has_the_rounds_tree_and_its_path() -> None:
    """Of a tree, a chain and a plain round, to the client and to the page."""
    chunks = chunks_of_the_rounds(report_progress=True)
    assert [chunk.tree for chunk in chunks] == [
        DraftTree(
            source="small",
            token_ids=(0, 1, 2, 3, 4),
            texts=("a", "b", "c", "d", "e"),
            parents=(-1, -1, 0, 0, 2),
            path=(0, 3),
        ),
        DraftTree(source="ngram", token_ids=(5, 6), texts=("f", "g"), path=(0,)),
        DraftTree(source="", token_ids=(), texts=()),
    ]
    shown = fates(chunks[0])
    assert shown["tree"]["parents"] == (-1, -1, 0, 0, 2)
    assert [token["source"] for token in shown["tokens"]] == ["small", "small", ""]


@pytest.mark.parametrize("sources", [(), ("small",), ("ngram", "small")])
def test_a_chunk_names_each_source_once(sources: tuple[str, ...]) -> None:
    """Tokens that were held back come in one chunk with those of a later round, of another source."""
    tokens = tuple(
        Token(token_id=i, text="", fate=Fate.ACCEPTED, source=source) for i, source in enumerate(3 * sources)
    )
    sent = wire.chunk_to_proto(Chunk(text="", tokens=tokens, held=tokens[:1]))
    assert list(sent.sources) == list(sources)
    assert wire.chunk_from_proto(sent) == Chunk(text="", tokens=tokens, held=tokens[:1])
