"""Padded, bucketed and recorded steps give the logits of steps that are neither.

`Traced` stands in for CUDA graphs: it records the tensor operations of a step once and replays only those. A
number that was taken from the host, or read back to it, would stay what it was or could not be recorded.
"""

from __future__ import annotations

import functools
import inspect
import logging
import random
from array import array
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from specwire.engine.attention import dense, varlen
from specwire.engine.batch import Batch, Feed, Segments
from specwire.engine.cache.kv_cache import SequenceCache
from specwire.engine.model import graphs
from specwire.engine.model.graphs import TOKEN_SIZES, Bucket, Buckets
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ModelLoadError
from specwire.rule.captured import EagerReplay, Replay
from tests.support.integrity import check_integrity
from tests.support.tiny_models import VOCAB_SIZE, build


class Traced:
    """Records what a step does to tensors, and does that again."""

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        return make_fx(run)()


@functools.cache
def _model(family: str, dtype: torch.dtype) -> Any:
    return build(family).to(dtype)


def _runner(
    family: str, replay: Replay | None, dtype: torch.dtype = torch.float32, page_size: int = 4, **options: Any
) -> ModelRunner:
    options = {"num_pages": 512 // page_size} | options
    return ModelRunner(_model(family, dtype), page_size=page_size, replay=replay, **options)


class _Twins:
    """The same sequences in two runners."""

    def __init__(self, family: str, replay: Replay, page_size: int = 4) -> None:
        self.plain = _runner(family, None, page_size=page_size)
        self.padded = _runner(family, replay, page_size=page_size)
        self.pairs: list[tuple[SequenceCache, SequenceCache]] = []
        self.rng = random.Random(family)

    def open(self, num: int) -> None:
        self.pairs += [(self.plain.new_sequence(), self.padded.new_sequence()) for _ in range(num)]

    def step(self, sizes: list[int]) -> None:
        """As many tokens as `sizes` says for each sequence, none where 0; all logits must agree."""
        feeds: tuple[list[Feed], list[Feed]] = ([], [])
        for pair, size in zip(self.pairs, sizes, strict=False):
            tokens = [self.rng.randrange(3, VOCAB_SIZE) for _ in range(size)]
            num_rows = self.rng.randint(0, size)
            if size:
                for cache, of_one in zip(pair, feeds, strict=True):
                    of_one.append(Feed(cache, tokens, num_rows))
        wanted, got = (r.forward(f) for r, f in zip((self.plain, self.padded), feeds, strict=True))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)

    def truncate(self, index: int, num_tokens: int) -> None:
        for cache in self.pairs[index]:
            cache.truncate(cache.length - num_tokens)

    def fork(self, index: int) -> None:
        plain, other = self.pairs[index]
        self.pairs.append((plain.fork(), other.fork()))


def _history(twins: _Twins) -> None:
    """Prefill, decode, verify, rollback and forks, with sizes that come again."""
    twins.open(3)
    twins.step([11, 0, 0])
    twins.step([1, 7, 5])
    for _ in range(3):
        for sizes in ([1], [5], [4, 0, 3], [1, 1, 1], [6, 1, 2]):
            twins.step(sizes)
        twins.truncate(0, 5)
        twins.truncate(2, 2)
    twins.fork(0)
    for _ in range(3):
        twins.step([1, 1, 1, 1])
        twins.step([2, 0, 0, 5])


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_recorded_step_equals_one_that_is_not(family: str) -> None:
    twins = _Twins(family, Traced(), page_size=16)
    _history(twins)
    assert twins.padded.num_graphs >= 4
    check_integrity(twins.padded.pool)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_neox", "qwen3"])
def test_a_padded_step_equals_one_that_is_not(family: str) -> None:
    _history(_Twins(family, EagerReplay()))


def test_a_model_that_cannot_be_recorded_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """GPT-2 looks at its input on the host in every pass, which waits for the device."""
    twins = _Twins("gpt2", Traced())
    with caplog.at_level(logging.WARNING, logger=graphs.__name__):
        _history(twins)
    assert twins.padded.num_graphs == 0
    assert sum("without CUDA graphs" in record.message for record in caplog.records) == 1


def test_large_steps_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "QUERY_SIZES", (1, 8))
    twins = _Twins("llama", EagerReplay())
    assert twins.padded._padded is not None
    monkeypatch.setattr(twins.padded._padded, "run_model", lambda *_: pytest.fail("padded"))
    twins.open(2)
    twins.step([9, 3])  # more queries of one sequence than a bucket has


@pytest.mark.slow
def test_warming_up_records_what_one_stream_needs_and_touches_no_sequence() -> None:
    twins = _Twins("llama", Traced(), page_size=16)
    twins.open(1)
    twins.step([9])
    twins.padded.warm()
    recorded = twins.padded.num_graphs
    assert recorded >= 5
    for size in (1, 2, 3, 6, 8, 1, 5, 6, 6):
        twins.step([size])
    assert twins.padded.num_graphs > recorded  # the cache grew out of the first bucket of keys
    _runner("llama", None).warm()  # nothing to do


class _Stuck:
    """A replay that goes on giving what came first."""

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        output = run().clone()
        return lambda: output


def test_a_replay_that_is_wrong_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    twins = _Twins("llama", _Stuck(), page_size=16)
    with caplog.at_level(logging.WARNING):
        twins.padded.warm()
    assert "not replayed" in caplog.text
    assert twins.padded.num_graphs == 0
    _history(twins)


def test_the_logits_are_the_callers_own() -> None:
    runner = _runner("llama", EagerReplay())
    with runner.new_sequence() as cache:
        first = runner.forward([Feed(cache, [5])])
        copy = first.clone()
        for token in range(6, 12):
            runner.forward([Feed(cache, [token])])
    assert torch.equal(first, copy)


# --- one size for all -----------------------------------------------------------------------------


def _rows_by_chunks(runner: ModelRunner, tokens: list[int], sizes: list[int], company: int) -> Tensor:
    """Logits of every token, run in chunks beside other sequences of the given number."""
    rng, rows, start = random.Random(company), [], 0
    caches = [runner.new_sequence() for _ in range(company + 1)]
    for size in sizes:
        others = [
            Feed(c, [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 9))]) for c in caches[1:]
        ]
        mine = Feed(caches[0], tokens[start : start + size], size)
        place = rng.randint(0, company)
        logits = runner.forward([*others[:place], mine, *others[place:]])
        rows.append(logits[place : place + size])
        start += size
    for cache in caches:
        cache.release()
    return torch.cat(rows)


def _check_any_company(runner: ModelRunner, family: str, sizes: list[int], company: int) -> None:
    """In one piece, in small ones, and in pieces of these sizes beside so many others."""
    rng, dtype, num_tokens = random.Random(0), runner.model.dtype, sum(sizes)
    tokens = [rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]
    alone = _rows_by_chunks(runner, tokens, [num_tokens], company=0)
    small = [20, *[1] * 10, *[6] * ((num_tokens - 30) // 6)]
    assert torch.equal(_rows_by_chunks(runner, tokens, small, company=0), alone)
    assert torch.equal(_rows_by_chunks(runner, tokens, sizes, company), alone)
    reference = _rows_by_chunks(_runner(family, None, dtype=dtype), tokens, [num_tokens], company=0)
    loose = 2e-5 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(alone, reference, rtol=loose, atol=loose)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_rows_are_bitwise_the_same_in_any_company(dtype: torch.dtype) -> None:
    runner = _runner("llama", EagerReplay(), batch_invariant=True, dtype=dtype, num_pages=400)
    _check_any_company(runner, "llama", [3, 70, 7, 1, 9], company=12)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_rows_are_bitwise_the_same_in_any_company(family: str, dtype: torch.dtype) -> None:
    """Sequences grow side by side, so that their caches lie in many runs."""
    runner = _runner(family, None, batch_invariant=True, dtype=dtype, num_pages=400)
    runner.warm()
    _check_any_company(runner, family, [3, 40, 7, 1, 9], company=5)


def test_batch_invariance_that_is_none_is_refused() -> None:
    """Where a layer looks at all tokens of a pass, as one that balances experts does, no size helps."""
    runner = ModelRunner(build("llama"), num_pages=128, page_size=4, batch_invariant=True)
    runner.model.lm_head.register_forward_hook(lambda _, rows, out: out + 1e-6 * rows[0].mean())
    with pytest.raises(ModelLoadError, match="--batch-invariant: a token's logits depend"):
        runner.warm()


def test_batch_invariance_that_would_copy_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_MAX_GATHERED_KEYS", 512)
    with pytest.raises(ModelLoadError, match="--batch-invariant with a context of 512 tokens"):
        _runner("llama", EagerReplay(), batch_invariant=True)


# --- sizes ----------------------------------------------------------------------------------------


def _row(lengths: list[int], num_pages: int = 1, num_rows: int | None = None) -> Batch:
    offsets = np.cumsum([0, *lengths]).tolist()
    segments = Segments(offsets, lengths, [array("i", [0] * num_pages) for _ in lengths], 256, {})
    numbers = np.zeros(sum(lengths), dtype=np.int64)
    return Batch(numbers, numbers, numbers, segments, numbers[:num_rows])


def test_sizes_of_buckets() -> None:
    buckets = Buckets(page_size=256, max_pages=512)
    assert buckets.fit(_row([1])) == Bucket(1, 1, 1, 16)
    assert buckets.fit(_row([6])) == Bucket(8, 1, 8, 16)
    assert buckets.fit(_row([1] * 5)) == Bucket(8, 8, 1, 16)
    assert buckets.fit(_row([5, 6, 1], num_pages=17)) == Bucket(16, 4, 8, 128)
    assert buckets.fit(_row([6] * 64)) == Bucket(384, 64, 8, 16)
    assert buckets.fit(_row([9] * 64)) is None
    prompt = buckets.fit(_row([300], num_rows=1))
    assert prompt == Bucket(384, 1, 384, 16, has_few_rows=True)
    assert (prompt.num_rows, Bucket(384, 64, 8, 16).num_rows) == (16, 384)
    assert buckets.fit(_row([513], num_rows=1)) is None
    sizes = (1, 2, 3, 6, 12, 30, 60, 65, 100, 150, 200, 300, 500)
    assert set(buckets.single_stream()) == {buckets.fit(_row([n], num_rows=1)) for n in sizes}
    gathering = Buckets(page_size=256, max_pages=8, gathers=True)
    assert gathering.fit(_row([6], num_pages=3)) == Bucket(8, 1, 8, 4)
    assert gathering.fit(_row([1] * 128, num_pages=8)) is None


def test_every_step_fits_its_bucket() -> None:
    rng, buckets = random.Random(0), Buckets(page_size=16, max_pages=128)
    for _ in range(100):
        row = _row([rng.randint(1, 9) for _ in range(rng.randint(1, 40))], rng.randint(1, 128))
        bucket = buckets.fit(row)
        assert bucket is not None
        assert bucket.num_tokens in TOKEN_SIZES
        assert bucket.num_tokens >= len(row.token_ids)
        assert bucket.num_segments >= len(row.segments)
        assert bucket.max_query >= max(segment.num_query for segment in row.segments)
        assert bucket.num_pages >= len(row.segments[0].pages)


# --- torch's paged kernel, played by one written down from its documentation ----------------------


def _documented(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None,
    max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int],
    enable_gqa: bool = False, seqused_k: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """`torch.nn.attention.varlen.varlen_attn`; rows that no sequence claims stay not a number."""
    assert enable_gqa
    assert query.is_contiguous()
    output = torch.full((len(query), query.shape[1], value.shape[-1]), torch.nan, dtype=query.dtype)
    group = query.shape[1] // key.shape[-2]
    for i, (start, end) in enumerate(zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False)):
        if block_table is not None and seqused_k is not None:
            assert {t.dtype for t in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
            pages, num_keys = block_table[i].long(), int(seqused_k[i])
            keys, values = (t[pages].flatten(0, 1)[:num_keys] for t in (key, value))
        else:
            assert cu_seq_k is not None
            assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
            keys, values = (t[cu_seq_k[i] : cu_seq_k[i + 1]] for t in (key, value))
            num_keys = len(keys)
        assert end - start <= max_q
        assert num_keys <= max_k
        keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
        distance = torch.arange(num_keys - (end - start), num_keys)[:, None] - torch.arange(num_keys)
        hidden = distance < 0
        if window_size[0] >= 0:
            hidden |= distance > window_size[0]
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys.float()) * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(query.dtype)
    return output


def _without(keyword: str) -> Callable[..., Tensor]:
    def kernel(*args: Any, **keywords: Any) -> Tensor:
        if keywords.get(keyword) is not None:
            raise RuntimeError(f"{keyword} requires FA3")
        return _documented(*args, **keywords)

    return kernel


def _forgets_rows(*args: Any, **keywords: Any) -> Tensor:
    output = _documented(*args, **keywords)
    output[int(args[3][1]) :] = torch.nan
    return output


def _wrong_with_pages(*args: Any, **keywords: Any) -> Tensor:
    if keywords.get("block_table") is not None:
        keywords["seqused_k"] = (keywords["seqused_k"] - 1).clamp(min=1)
    return _documented(*args, **keywords)


def _installed(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]) -> None:
    kernel.__signature__ = inspect.signature(_documented)  # type: ignore[attr-defined]
    monkeypatch.setattr(varlen, "_varlen", lambda: kernel)
    varlen._variant.cache_clear()


_GROUPS = ("enable_gqa", True)
_UNSPLIT = ("num_splits", 1)


@pytest.mark.parametrize(
    ("kernel", "way"),
    [
        (_documented, varlen.Variant(True, (_GROUPS, _UNSPLIT))),
        (_without("num_splits"), varlen.Variant(True, (_GROUPS,))),
        (_without("block_table"), varlen.Variant(False, (_GROUPS, _UNSPLIT))),
        (_wrong_with_pages, varlen.Variant(False, (_GROUPS, _UNSPLIT))),
        (_forgets_rows, None),
        (Mock(side_effect=RuntimeError("no kernel image is available")), None),
    ],
    ids=["as documented", "no splits", "no pages", "wrong with pages", "forgets rows", "none"],
)
@pytest.mark.parametrize("windowed", [False, True])
def test_a_kernel_is_used_as_far_as_it_is_right(
    kernel: Callable[..., Tensor], way: Any, windowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch, kernel)
    kind = varlen.LayerKind(torch.device("cpu"), torch.bfloat16, 4, 2, 16, 32, windowed)
    assert varlen._variant(kind) == way
    assert varlen._variant(kind._replace(dtype=torch.float32)) is None
    varlen._variant.cache_clear()


@pytest.mark.parametrize(("family", "paged"), [("llama", True), ("gemma3", True), ("mistral", False)])
def test_padded_steps_through_torchs_kernel(
    family: str, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch, _documented)
    monkeypatch.setattr(varlen, "find_variant", lambda *_: varlen.Variant(paged, (_GROUPS,)))
    twins = _Twins(family, EagerReplay(), page_size=16)
    assert twins.padded.attention_path == ("paged" if paged else "gathered")
    assert twins.plain.attention_path == "views"
    _history(twins)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch had no pages before 2.12")
def test_the_installed_torch_has_the_signature_that_is_looked_for() -> None:
    """Pinned here; elsewhere keys are gathered, or `dense` takes its place."""
    found = varlen._varlen()
    assert found is not None
    assert "num_splits" in inspect.signature(found).parameters


def test_unused_parts_of_a_block_keep_no_stale_sequence() -> None:
    inputs = graphs.StepInputs(Bucket(8, 4, 8, 2), torch.device("cpu"), scratch_slot=64)
    inputs.fill(_row([3, 2, 2], num_pages=2))
    inputs.fill()
    parts = inputs.on_device
    assert parts.query_offsets.tolist() == [0] * 5
    assert parts.cache_lens.tolist() == [1] * 4
    assert parts.slots.tolist() == [64] * 8
    assert parts.token_ids.tolist() == parts.rows.tolist() == [0] * 8
