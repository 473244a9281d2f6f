"""Invariants of a pool of pages, checked against all sequences that hold some."""

from __future__ import annotations

from collections import Counter

from specwire.engine.cache.kv_cache import PagePool, SequenceCache
from specwire.engine.cache.prefix import ROOT, PrefixIndex


class IntegrityError(AssertionError):
    """The bookkeeping is inconsistent."""


def _noted(self: SequenceCache, pool: PagePool) -> None:
    _init(self, pool)
    pool.__dict__.setdefault("_made", []).append(self)


_init = SequenceCache.__init__
SequenceCache.__init__ = _noted  # type: ignore[assignment, method-assign]


def open_sequences(pool: PagePool) -> list[SequenceCache]:
    """Those that were not released."""
    made = pool.__dict__.get("_made", ())
    pool.__dict__["_made"] = found = [each for each in made if not each.released]
    return found


def check_integrity(pool: PagePool) -> None:
    """Check that free + cached + held = total and that each count equals the tables holding the page.

    Raises:
        IntegrityError: naming what is wrong.
    """
    held: Counter[int] = Counter()
    for table in open_sequences(pool):
        _check_sequence(table)
        held.update(table.pages)
    for page, count in enumerate(pool._references):
        if count != held[page]:
            raise IntegrityError(f"page {page}: {count} references, {held[page]} tables hold it")
    if (num_shared := sum(count > 1 for count in pool._references)) != pool.num_shared_pages:
        raise IntegrityError(f"{pool.num_shared_pages} pages counted shared, {num_shared} are")
    _check_free(pool, held)
    unfinished = {slot // pool.page_size for slot in pool.copies.sources}
    if findable := [page for page in unfinished if pool._index.knows(page)]:
        raise IntegrityError(f"pages {findable[:8]} are findable before their copies are done")


def _check_free(pool: PagePool, held: Counter[int]) -> None:
    free = [page for start, end in pool._free.ends.items() for page in range(start, end)]
    if len(free) != pool._num_free or len(set(free)) != len(free):
        raise IntegrityError(f"{pool._num_free} pages counted free, {len(free)} listed")
    if clash := held.keys() & set(free):
        raise IntegrityError(f"pages {sorted(clash)[:8]} are both free and held")
    if findable := [page for page in free if pool._index.knows(page)]:
        raise IntegrityError(f"pages {findable[:8]} are both free and findable")
    _check_index(pool._index)
    cached = pool._index.num_idle
    if pool._num_free + cached + len(held) != pool.num_pages:
        raise IntegrityError(
            f"{pool._num_free} free + {cached} cached + {len(held)} held pages, not {pool.num_pages}"
        )


def _check_index(index: PrefixIndex) -> None:
    names = {page: digest for digest, page in index._pages.items()}
    if {page: known.digest for page, known in index._known.items()} != names:
        raise IntegrityError("pages and digests do not name each other")
    if stray := index._idle.keys() - index._known.keys():
        raise IntegrityError(f"pages {sorted(stray)[:8]} are cached without a name")
    for page, (_, parent) in index._known.items():
        if len(parent) != len(ROOT) and parent not in index._pages:
            raise IntegrityError(f"page {page} cannot be reached: its parent is not known")
        if page not in index._children[parent]:
            raise IntegrityError(f"page {page} is not a child of its parent")


def _check_sequence(table: SequenceCache) -> None:
    size, pool = table.pool.page_size, table.pool
    if len(table.pages) != -(-table.length // size):
        raise IntegrityError(f"{len(table.pages)} pages of {size} tokens for length {table.length}")
    if 0 < table.length < table.encoder_len:
        raise IntegrityError(f"{table.length} of the {table.encoder_len} tokens of an input are held")
    if pool.keeps_states and table.length != (table.states[-1][0] if table.states else 0):
        raise IntegrityError(f"length {table.length}, but states after {[n for n, _ in table.states]}")
    if len(set(table.pages)) != len(table.pages):
        raise IntegrityError(f"a page occurs twice in {table.pages}")
    if table.writable_len > table.length and not (
        table.writable_len == len(table.pages) * size and _is_private(pool, table.pages[-1])
    ):
        raise IntegrityError(f"growth to {table.writable_len} would change the last page for others")


def _is_private(pool: PagePool, page: int) -> bool:
    """One sequence holds the page and no other can find it: it may be written as it is."""
    return pool._references[page] == 1 and not pool._index.knows(page)
