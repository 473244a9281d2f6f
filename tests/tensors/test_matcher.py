"""Masks of a grammar are a function of the output, wherever the matcher was before."""

from __future__ import annotations

import random
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import xgrammar

from specwire.engine.grammars import helper
from specwire.engine.grammars.compiler import Grammars
from specwire.engine.grammars.matcher import GrammarMatcher
from specwire.errors import InvalidRequestError
from specwire.text.grammar import Grammar
from tests.support.languages import END_ID, REGEX, TEXTS, allowed


@pytest.fixture
def matcher() -> GrammarMatcher:
    texts = [text.encode() or None for text in TEXTS]
    info = helper.tokenizer_info(helper.GrammarVocabulary(texts, len(TEXTS), (END_ID,)))
    compiled: Future[Any] = Future()
    compiled.set_result(xgrammar.GrammarCompiler(info, max_threads=1).compile_regex(REGEX))
    return GrammarMatcher(compiled, len(TEXTS), texts)


def test_masks_after_rollbacks(matcher: GrammarMatcher) -> None:
    """Outputs that share some tokens with the one before, as after rounds that were judged or taken back."""
    rng, output = random.Random(0), list[int]()
    for _ in range(200):
        output = output[: rng.randint(0, len(output))]
        for _ in range(rng.randint(0, 4)):
            options = np.flatnonzero(allowed(output)[1:]) + 1
            if len(options):
                output.append(int(rng.choice(options.tolist())))
        found = np.unpackbits(matcher.fill(list(output), (), ())[0], bitorder="little")[: len(TEXTS)]
        assert found.astype(bool).tolist() == allowed(output).tolist(), output


def test_what_no_token_can_follow(matcher: GrammarMatcher) -> None:
    """After a draft token that is not allowed the mask is empty; an output with it is refused."""
    assert [bool(mask.any()) for mask in matcher.fill([], [1, 3], ())] == [True, True, False]
    with pytest.raises(InvalidRequestError, match="does not match the grammar"):
        matcher.fill([1, 3], (), ())


def test_what_is_kept_counts_with_its_automata_and_what_nobody_waits_for_is_not_compiled() -> None:
    """Strings of limited length are automata, which `memory_size_bytes` leaves out."""
    texts = [bytes([i]) for i in range(1, 256)] + [None]
    grammars = Grammars(helper.GrammarVocabulary(texts, len(texts), (255,)))
    limited = {f"p{i}": {"type": "string", "maxLength": 2000} for i in range(30)}
    large, waiting = (
        Grammar(json_schema={"type": "object", "properties": limited, "required": list(limited)}),
        Grammar(regex="ab"),
    )
    with closing(grammars):
        matcher, other = grammars.open(large), grammars.open(waiting)
        grammars.close_stream(waiting)
        assert other.compiled.cancelled()
        compiled = matcher.compiled.result()
        assert grammars._sizes[large] > 4 * compiled.memory_size_bytes
        grammars.close_stream(large)
        assert grammars.open(large).compiled is matcher.compiled, "it is kept for others"
