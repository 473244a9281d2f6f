"""Which keys are read together on a CPU, and that it changes nothing."""

from __future__ import annotations

import pytest
import torch

from specwire.engine.attention import views
from specwire.engine.batch import Segment
from specwire.engine.cache.kv_cache import Run
from specwire.engine.cache.layer_cache import LayerCache, Scoring
from specwire.proposals.tree import TokenTree

_NUM_HEADS, _NUM_KV_HEADS, _DIM = 4, 2, 8
_OWN_SLOT = 500


def _segments(num_shared: int, num_own: list[int], num_queries: list[int]) -> list[Segment]:
    """Sequences whose first tokens are the same, or the first of them; of the last one, two are a tree."""
    segments, offset = [], 0
    for i, (own, num_query) in enumerate(zip(num_own, num_queries, strict=True)):
        runs = [Run(0, num_shared - i % 2), *([Run(_OWN_SLOT + 100 * i, own)] if own else [])]
        length = sum(run.num_tokens for run in runs)
        is_tree = i == len(num_own) - 1
        tree = TokenTree(length - num_query, (-1, 0, 0)[:num_query]) if is_tree else None
        segments.append(Segment(offset, num_query, length, runs, (), tree))
        offset += num_query
    return segments


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("num_shared", "num_own", "num_queries", "num_reads"),
    [
        (50, [3, 4, 0, 7, 5], [1, 2, 1, 1, 3], 1),
        (9, [60, 50, 2, 1, 3], [1, 3, 1, 1, 3], 3),
        (50, [3, 70, 4], [1, 65, 3], 3),
    ],
)
def test_sequences_that_begin_alike_are_read_together(
    num_shared: int,
    num_own: list[int],
    num_queries: list[int],
    num_reads: int,
    softcap: float | None,
    window: int | None,
) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = LayerCache(*(torch.randn(1000, _NUM_KV_HEADS, _DIM, generator=generator) for _ in range(2)))
    query = torch.randn(sum(num_queries), _NUM_HEADS, _DIM, generator=generator)
    scoring, kind = Scoring(0.4, window, softcap), (window, 2, layer.keys)
    segments = _segments(num_shared, num_own, num_queries)
    plan = views.plan_reads(segments, *kind)
    assert window is not None or len(plan.reads) == num_reads
    alone = [
        views.view_attention(views.plan_reads([each._replace(query_offset=0)], *kind), layer, some, scoring)
        for each, some in zip(segments, query.split(num_queries), strict=True)
    ]
    found = views.view_attention(plan, layer, query, scoring)
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-5, atol=1e-5)
