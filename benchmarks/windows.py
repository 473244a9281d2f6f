"""Many distinct prompts of one kind: windows cut from Python sources that the embedded pair never saw."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.embedded import corpus
from specwire.tokenizer import Tokenizer

LEAST_TOKENS = 64
MOST_TOKENS = 100
"""A window's tokens; the leading token of `fresh` comes on top."""
_FIRST_LEAD = 300
"""Leading tokens are taken from here on: ordinary tokens, neither special ones nor single bytes."""


def cut(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Token ids of `count` windows of `LEAST_TOKENS` to `MOST_TOKENS`, the same for the same interpreter.

    They come from the standard library's files that were held out when the embedded pair was trained.
    """
    _, held_out = corpus.split(corpus.read_library())
    text = [token for document in held_out for token in tokenizer.encode(document.text)]
    stride = len(text) // count
    lengths = [LEAST_TOKENS + 7 * i % (MOST_TOKENS - LEAST_TOKENS + 1) for i in range(count)]
    return [text[i * stride : i * stride + length] for i, length in enumerate(lengths)]


def fresh(windows: Sequence[Sequence[int]], run: int) -> list[list[int]]:
    """The windows behind a leading token that only this run has: no prefix cache knows any of them."""
    return [[_FIRST_LEAD + run, *window] for window in windows]
