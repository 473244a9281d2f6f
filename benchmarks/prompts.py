"""What every system continues: beginnings of Python modules, written for this benchmark, and many windows of
Python that the embedded pair never saw."""

from __future__ import annotations

from collections.abc import Sequence

from specwire import embedded
from specwire.text.tokenizer import Tokenizer, load

LEAST_TOKENS, MOST_TOKENS = 64, 100
"""A window's tokens; the leading token of `fresh` comes on top."""
_FIRST_LEAD = 300
"""Leading tokens are taken from here on: ordinary tokens, neither special ones nor single bytes."""
PROMPTS = (
    '''"""Read and write simple configuration files."""

import os
import re
import sys


class ConfigReader:
    """Parse lines of the form ``name = value``."""

    def __init__(self, filename, encoding=None):
        self.filename = filename
''',
    '''def merge_intervals(intervals):
    """Return the intervals sorted, with overlapping ones joined."""
    result = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
''',
    '''import threading
import time
from collections import deque


class BoundedQueue:
    """A queue that blocks when it is full.

    All methods may be called from any thread.
    """

    def __init__(self, maxsize):
        self._items = deque()
        self._lock = threading.Lock()

    def put(self, item, timeout=None):
''',
    '''def parse_header(line):
    """Split a header line into its name and its value.

    >>> parse_header("Content-Type: text/plain")
    ('Content-Type', 'text/plain')
    """
    if not isinstance(line, str):
        raise TypeError("line must be a string, not %s" % type(line).__name__)
''',
)


def own_tokenizer() -> Tokenizer:
    """The embedded pair's."""
    loaded = load(embedded.TARGET_DIR)
    assert loaded is not None
    return loaded


def python_windows(count: int) -> list[list[int]]:
    """Token ids of `count` windows of `LEAST_TOKENS` to `MOST_TOKENS`, the same for the same interpreter.

    They come from the standard library's files that were held out when the embedded pair was trained.
    """
    from benchmarks.embedded import corpus

    _, held_out = corpus.split(corpus.read_library())
    text = [token for document in held_out for token in own_tokenizer().encode(document.text)]
    stride = len(text) // count
    lengths = [LEAST_TOKENS + 7 * i % (MOST_TOKENS - LEAST_TOKENS + 1) for i in range(count)]
    return [text[i * stride : i * stride + length] for i, length in enumerate(lengths)]


def fresh(windows: Sequence[Sequence[int]], run: int) -> list[list[int]]:
    """The windows behind a leading token that only this run has: no prefix cache knows any of them."""
    return [[_FIRST_LEAD + run, *window] for window in windows]
