"""Index of pages by their tokens: finds prefixes computed before. No torch, no device.

A complete page is named by a digest of its tokens and of the page before it, so one name stands for all
tokens up to the page's end, and a known chain is found by walking it from its start:

    digest(page i) = blake2b(digest(page i - 1), tokens of page i)

Keys and values depend only on the tokens up to theirs: not on the stream that computed them, nor on whether
the tokens were accepted later. With an encoder they depend on its whole input too, so a chain begins at a
root derived from that; with an adapter, on that one. And a hit reveals that a prefix was computed before, so
the root is derived from a salt, and a chain is never found under another salt.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

_PAGE_BYTES = 16
_ROOT_BYTES = 32


def root(salt: str, encoder_input: Sequence[int] = (), version: int = 0, adapter: int = 0) -> bytes:
    """Parent of the first page of sequences with this salt; never equal to the name of a page.

    Args:
        encoder_input: all that the encoder reads, which every key depends on; empty without an encoder.
        version, adapter: of the model's weights, and that the tokens are run with; other pages are never
            found.
    """
    key = version.to_bytes(8, "little") + adapter.to_bytes(8, "little") if version or adapter else b""
    own = blake2b(salt.encode(), digest_size=_ROOT_BYTES, key=key).digest()
    if not encoder_input:
        return own
    return blake2b(array("q", encoder_input).tobytes(), key=own, digest_size=_ROOT_BYTES).digest()


ROOT = root("")
"""The root of sequences without a salt."""


def page_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a page with these tokens after the page named `parent`; 16 bytes."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=_PAGE_BYTES).digest()


class _Known(NamedTuple):
    digest: bytes
    parent: bytes


class PrefixIndex:
    """The pages whose content is known, and the eviction order of those that no sequence holds.

    The parent of a known page is known too: pages that can no longer be reached are forgotten at once.
    """

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._known: dict[int, _Known] = {}
        self._children: defaultdict[bytes, set[int]] = defaultdict(set)
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_idle(self) -> int:
        """Known pages that no sequence holds."""
        return len(self._idle)

    def knows(self, page: int) -> bool:
        """True while the page's content can be found."""
        return page in self._known

    def find(self, digest: bytes) -> int | None:
        """The page of this name; None when it is not known."""
        return self._pages.get(digest)

    def add(self, parent: bytes, digest: bytes, page: int) -> None:
        """Name a held page of known parent; of two pages with the same content the first one stays known."""
        if digest in self._pages:
            return
        self._pages[digest] = page
        self._known[page] = _Known(digest, parent)
        self._children[parent].add(page)

    def mark_idle(self, page: int) -> None:
        """No sequence holds this known page any more; it is now the most recently used."""
        self._idle[page] = None

    def mark_used(self, page: int) -> None:
        """A sequence holds this page, which may be a known one."""
        self._idle.pop(page, None)

    def oldest(self) -> int:
        """The least recently used page that no sequence holds. Must not be called when there is none."""
        return next(iter(self._idle))

    def forget(self, page: int) -> list[int]:
        """Forget a page, if it is known, and all that follow it; returns those that no sequence holds."""
        idle, todo = [], [page] if page in self._known else []
        while todo:
            page = todo.pop()
            digest, parent = self._known.pop(page)
            del self._pages[digest]
            self._children[parent].discard(page)
            if not self._children[parent]:
                del self._children[parent]
            todo.extend(self._children.get(digest, ()))
            if page in self._idle:
                del self._idle[page]
                idle.append(page)
        return idle
