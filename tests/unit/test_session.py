"""What a client is shown of a round: the source of each token, and the tree with the path that was kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.cost import Cost
from coordinator.tally import Tally
from specwire.completion import Chunk, DraftTree, Token
from specwire.core import Fate
from specwire.http.answers import fates
from specwire.rpc.wire import client as wire
from tests.support.chunks import message_of
from tests.support.rounds import PLAIN, received_chunks


def test_each_draft_token_names_its_source() -> None:
    """Also the rejected ones; recovered, bonus and plain tokens are the target's own."""
    chunks = received_chunks(report_progress=False)
    assert [(token.text, token.fate, token.source) for chunk in chunks for token in chunk.tokens] == [
        (" return", Fate.ACCEPTED, "small"),
        (" n", Fate.ACCEPTED, "small"),
        ("\n", Fate.BONUS, ""),
        ("def", Fate.ACCEPTED, "ngram"),
        (" pop", Fate.RECOVERED, ""),
        ("(", Fate.PLAIN, ""),
    ]
    rejected = [(token.text, token.source) for chunk in chunks for token in chunk.rejected]
    assert rejected == [(" push", "ngram")]
    assert {chunk.tree for chunk in chunks} == {None}, "only who asks pays"


def test_cached_tokens_are_those_of_the_prompt() -> None:
    """A sequence that is opened again finds tokens of the output, too."""
    tally = Tally()
    for num_cached in (2, 0, 64):
        tally.add(replace(PLAIN, verify_cost=Cost(num_cached_tokens=num_cached)))
    assert (tally.num_cached_first, tally.num_cached_tokens) == (2, 66)


def test_progress_has_the_rounds_tree_and_its_path() -> None:
    """Of a tree, a chain and a plain round, to the client and to the page."""
    chunks = received_chunks(report_progress=True)
    assert [chunk.tree for chunk in chunks] == [
        DraftTree(
            source="small",
            token_ids=(0, 1, 2, 3, 4),
            texts=(" return", " if", " self", " n", ".items"),
            parents=(-1, -1, 0, 0, 2),
            path=(0, 3),
        ),
        DraftTree(source="ngram", token_ids=(6, 7), texts=("def", " push"), path=(0,)),
        DraftTree(source="", token_ids=(), texts=()),
    ]
    shown = fates(chunks[0])
    assert shown["tree"]["parents"] == (-1, -1, 0, 0, 2)
    assert [token["source"] for token in shown["tokens"]] == ["small", "small", ""]


def test_tokens_are_rounds_times_their_mean() -> None:
    """With rounds of all kinds, and a round that a stop string has cut."""
    *_, whole = received_chunks(report_progress=True)
    cut, *_ = received_chunks(report_progress=True, stop=" n")
    for chunk, num_tokens, num_rounds, num_drafts in ((whole, 6, 3, 2), (cut, 2, 1, 1)):
        counts = chunk.speculation
        assert counts is not None
        assert (counts.num_rounds, counts.num_drafts) == (num_rounds, num_drafts)
        assert counts.num_tokens == num_tokens
        assert counts.tokens_per_round * counts.num_rounds == num_tokens
        assert counts.mean_acceptance_length == 2.5 if chunk is whole else 3


@pytest.mark.parametrize("sources", [(), ("small",), ("ngram", "small")])
def test_a_chunk_names_each_source_once(sources: tuple[str, ...]) -> None:
    """Tokens that were held back come in one chunk with those of a later round, of another source."""
    tokens = tuple(
        Token(token_id=i, text="", fate=Fate.ACCEPTED, source=source) for i, source in enumerate(3 * sources)
    )
    sent = message_of(tokens, held=tokens[:1])
    assert list(sent.sources) == list(sources)
    assert wire.chunk_from_proto(sent) == Chunk(text="", tokens=tokens, held=tokens[:1])


def test_rounds_that_a_slow_client_gets_in_one_chunk_are_all_there() -> None:
    """Tokens, rejected ones and sources of both rounds, as if they had come one by one."""
    one_by_one = received_chunks(report_progress=False)
    [merged] = received_chunks(report_progress=False, rounds_per_chunk=3)
    assert merged.tokens == tuple(token for chunk in one_by_one for token in chunk.tokens)
    assert merged.rejected == tuple(token for chunk in one_by_one for token in chunk.rejected)
    assert merged.first_index == 0
    assert merged.text == "".join(chunk.text for chunk in one_by_one)


def test_what_waits_for_its_text_is_named_by_the_chunk_of_its_rounds() -> None:
    """Also where an earlier round of the chunk emitted it: who resumes needs every token."""
    held = [chunk.held for chunk in received_chunks(report_progress=False, stop=" n\ndef popx")]
    [merged, last] = received_chunks(report_progress=False, stop=" n\ndef popx", rounds_per_chunk=2)
    assert [[token.token_id for token in tokens] for tokens in held] == [[3, 5], [6, 8], []]
    assert [token.token_id for token in merged.held] == [3, 5, 6, 8]
    assert [token.token_id for token in (*merged.tokens, *last.tokens)] == [0, 3, 5, 6, 8, 9]
