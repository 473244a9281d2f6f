"""A plain model of the memory behind a page pool: a dict from slots to what they hold."""

from __future__ import annotations

from typing import TypeVar

from specwire.engine.cache.kv_cache import PagePool, Run, SequenceCache, runs_of

Content = TypeVar("Content")


def after_copies(pool: PagePool, memory: dict[int, Content]) -> dict[int, Content]:
    """What the memory holds once the pending copies are done."""
    return memory | {dst: memory[src] for dst, src in pool.copies.sources.items()}


def do_copies(pool: PagePool, memory: dict[int, Content]) -> None:
    """What the next pass does first."""
    if (copies := pool.copies.take()) is not None:
        contents = [memory[slot] for slot in copies.src.tolist()]
        memory.update(zip(copies.dst.tolist(), contents, strict=True))


def runs_in(sequence: SequenceCache) -> list[Run]:
    """Of its tokens in consecutive slots, in token order."""
    return runs_of(sequence.pages, sequence.length, sequence.pool.page_size)
