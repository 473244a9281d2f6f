"""The packed, paged forward pass equals transformers' own, for every history and batch."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import Phi3Config

from specwire.config.preflight.models import context_len, text_config
from specwire.engine.attention import paged as attention
from specwire.engine.attention import views
from specwire.engine.batch import Feed
from specwire.engine.cache.kv_cache import SequenceCache
from specwire.engine.model.runner import ModelRunner, context_length
from specwire.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelLoadError,
    ResourceExhaustedError,
    UnsupportedError,
)
from tests.support.integrity import check_integrity
from tests.support.slot_memory import runs_in
from tests.support.tiny_models import (
    EXTRA_FAMILIES,
    FAMILIES,
    REFUSED_FAMILIES,
    VOCAB_SIZE,
    WINDOW,
    build,
    model_of,
    reference_model,
)

ALL_FAMILIES = (*FAMILIES, *EXTRA_FAMILIES)
NUM_TOKENS = 4 * WINDOW
TOLERANCE = 1e-5


def _runner(family: str, *, num_pages: int = 128, page_size: int = 4) -> ModelRunner:
    return ModelRunner(model_of(family), num_pages=num_pages, page_size=page_size)


@torch.inference_mode()
def _reference(family: str, token_ids: Sequence[int]) -> Tensor:
    """transformers' own eager logits from scratch, [num_tokens, vocab_size]."""
    ids = torch.tensor([list(token_ids)])
    return reference_model(family)(input_ids=ids, use_cache=False).logits[0]


def _tokens(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


_assert_close = partial(torch.testing.assert_close, rtol=TOLERANCE, atol=TOLERANCE)


def _assert_idle(runner: ModelRunner) -> None:
    check_integrity(runner.pool)
    assert runner.pool.num_held_pages == 0


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_prefill_decode_and_verify_in_one_row(family: str) -> None:
    """Tokens that are cached, run, and those of the latter whose logits are wanted."""
    runner = _runner(family)
    begun, feeds, expected = [], [], []
    sizes = [(0, 40, 40), (0, 3, 0), (5, 1, 1), (17, 6, 6), (30, 1, 1), (31, 4, 2)]
    for seed, (num_cached, num_run, num_rows) in enumerate(sizes):
        cache, text = runner.new_sequence(), _tokens(num_cached + num_run, seed)
        if num_cached:
            begun.append(Feed(cache, text[:num_cached], 0))
        feeds.append(Feed(cache, text[num_cached:], num_rows))
        expected.append(_reference(family, text)[len(text) - num_rows :])
    assert runner.forward(begun).shape == (0, runner.vocab_size)
    _assert_close(runner.forward(feeds), torch.cat(expected))
    for feed in feeds:
        feed.cache.release()
    _assert_idle(runner)


class _History:
    """Random appends, truncations, forks and releases; every logit is compared with one from scratch."""

    def __init__(self, family: str, seed: int) -> None:
        self.family, self.rng = family, random.Random(seed)
        self.runner = _runner(family, num_pages=48)
        self.live: list[tuple[SequenceCache, list[int]]] = []

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self._operation()
            check_integrity(self.runner.pool)
        for cache, _ in self.live:
            cache.release()
        _assert_idle(self.runner)

    def _operation(self) -> None:
        action = self.rng.choice(["new", "forward", "forward", "forward", "truncate", "fork", "release"])
        if not self.live or (action == "new" and len(self.live) < 5):
            self.live.append((self.runner.new_sequence(), []))
        elif action == "fork" and len(self.live) < 6:
            cache, tokens = self.rng.choice(self.live)
            self.live.append((cache.fork(), tokens.copy()))
        elif action == "release":
            self.live.pop(self.rng.randrange(len(self.live)))[0].release()
        elif action == "truncate":
            cache, tokens = self.rng.choice(self.live)
            del tokens[self.rng.randint(max(0, len(tokens) - 12), len(tokens)) :]
            cache.truncate(len(tokens))
            del tokens[cache.length :]  # of a recurrent model, fewer may be left
        else:
            self._forward()

    def _forward(self) -> None:
        chosen = self.rng.sample(self.live, self.rng.randint(1, len(self.live)))
        feeds, before = [], [cache.length for cache, _ in chosen]
        for cache, _ in chosen:
            new = [self.rng.randrange(3, VOCAB_SIZE) for _ in range(self.rng.choice([1, 1, 3, 6]))]
            feeds.append(Feed(cache, new, self.rng.randint(0, len(new))))
            cache.committed_len = cache.length + len(new) // 2
        try:
            logits = self.runner.forward(feeds)
        except ResourceExhaustedError:
            assert [cache.length for cache, _ in chosen] == before
            return
        rows = logits.split([feed.num_rows for feed in feeds])
        for (_, tokens), feed, actual in zip(chosen, feeds, rows, strict=True):
            tokens.extend(feed.token_ids)
            if feed.num_rows:  # a state sums up the text, in other pieces than from scratch
                tolerance = 10 * TOLERANCE if self.runner.pool.keeps_states else TOLERANCE
                expected = _reference(self.family, tokens)[-feed.num_rows :]
                _assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", [*ALL_FAMILIES, "lfm2", "qwen3_next", "mamba2", "falcon_h1"])
def test_after_any_history_logits_equal_those_from_scratch(family: str) -> None:
    _History(family, seed=3).run(num_operations=150)


def _scattered(runner: ModelRunner, token_ids: list[int]) -> SequenceCache:
    """A sequence whose pages all lie apart: every second page of the pool is taken."""
    blockers = [runner.new_sequence() for _ in range(runner.pool.num_pages)]
    for blocker in blockers:
        blocker.append(runner.pool.page_size)
    for blocker in blockers:
        if blocker.pages[0] % 2:
            blocker.release()
    cache = runner.new_sequence()
    runner.forward([Feed(cache, token_ids, 0)])
    assert len(runs_in(cache)) == len(cache.pages)
    return cache


def test_long_queries_over_scattered_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries beyond a block and beyond the mask templates take the other branches."""
    monkeypatch.setattr(views, "_QUERY_BLOCK", 7)
    monkeypatch.setattr(views, "_MAX_STACKED_QUERIES", 3)
    for family in ("llama", "mistral"):
        runner, tokens = _runner(family, num_pages=32), _tokens(42)
        cache = _scattered(runner, tokens[:12])
        _assert_close(runner.forward([Feed(cache, tokens[12:], 30)]), _reference(family, tokens)[12:])


def _allocated_bytes(runner: ModelRunner, cache: SequenceCache, num_tokens: int) -> int:
    """Bytes that one forward pass allocates on the CPU, freed ones included."""
    with torch.profiler.profile(profile_memory=True) as profile:
        runner.forward([Feed(cache, _tokens(num_tokens), 1)])
    cache.truncate(cache.length - num_tokens)
    events = profile.events() or []
    return sum(event.self_cpu_memory_usage for event in events if event.name.startswith("aten::empty"))


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_no_copy_of_the_cache(num_tokens: int) -> None:
    """A longer cache may cost masks and scores, which are small beside its keys and values."""
    runner = ModelRunner(build("llama", head_dim=64), num_pages=128, page_size=4)
    allocated = []
    with runner.new_sequence() as cache:
        for length in (40, 480):
            runner.forward([Feed(cache, _tokens(length - cache.length), 0)])
            assert len(runs_in(cache)) == 1
            _allocated_bytes(runner, cache, num_tokens)  # fills the mask templates
            allocated.append(_allocated_bytes(runner, cache, num_tokens))
    grown = allocated[1] - allocated[0]
    assert grown < 0.1 * 440 * runner.kv_bytes_per_token


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_learned(family: str) -> None:
    runner, config = _runner(family, num_pages=3, page_size=5), model_of(family).config
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert runner.kv_bytes_per_token == config.num_hidden_layers * 2 * kv_heads * head_dim * 4
    assert runner.vocab_size == VOCAB_SIZE
    assert runner.context_len == 512
    for layer in runner._layers.values():
        assert layer.keys.shape == layer.values.shape == (15, kv_heads, head_dim)


def test_errors_leave_the_caches_as_they_were() -> None:
    runner = _runner("llama", num_pages=8)
    one, two = runner.new_sequence(), runner.new_sequence()
    runner.forward([Feed(one, _tokens(6), 0)])
    child = one.fork()
    with pytest.raises(ResourceExhaustedError):
        runner.forward([Feed(child, [5], 1), Feed(two, _tokens(40), 1)])
    assert (one.length, child.length, two.length) == (6, 6, 0)
    check_integrity(runner.pool)
    logits = runner.forward([Feed(child, [7], 1), Feed(one, [8], 1)])
    _assert_close(logits[:1], _reference("llama", [*_tokens(6), 7])[-1:])
    _assert_close(logits[1:], _reference("llama", [*_tokens(6), 8])[-1:])


def test_a_failing_model_leaves_the_caches_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = _runner("llama")
    cache = runner.new_sequence()
    runner.forward([Feed(cache, _tokens(6), 0)])
    monkeypatch.setattr(runner, "_run", Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.forward([Feed(cache, _tokens(20), 1)])
    assert cache.length == 6
    assert runner.pool.num_held_pages == 2
    check_integrity(runner.pool)


def test_invalid_feeds_are_refused() -> None:
    runner = _runner("llama", num_pages=129)
    cache, foreign = runner.new_sequence(), _runner("llama").new_sequence()
    refused = [
        [Feed(cache, [])],
        [Feed(cache, [-1])],
        [Feed(cache, [VOCAB_SIZE])],
        [Feed(cache, [3], 2)],
        [Feed(cache, [3], -1)],
        [Feed(cache, [3]), Feed(cache, [3])],
        [Feed(foreign, [3])],
    ]
    for feeds in refused:
        with pytest.raises(InvalidRequestError):
            runner.forward(feeds)
    with pytest.raises(ContextLengthError, match="512"):
        runner.forward([Feed(cache, _tokens(513))])
    assert cache.length == 0
    assert runner.forward([]).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_models_without_the_interface_are_refused(family: str) -> None:
    with pytest.raises(ModelLoadError, match="attention interface"):
        ModelRunner(build(family), num_pages=4)


def test_unknown_attention_keywords_are_refused() -> None:
    query = torch.zeros(1, 2, 1, 8)
    probe: Any = object()
    unknown: dict[str, Any] = {"position_bias": query, "alibi": query, "is_causal": False, "dropout": 0.1}
    for name, value in unknown.items():
        with attention.running(probe), pytest.raises(UnsupportedError, match=name):
            attention.paged_attention(torch.nn.Identity(), query, query, query, None, **{name: value})
    with attention.running(probe), pytest.raises(UnsupportedError, match="mask"):
        attention.paged_attention(torch.nn.Identity(), query, query, query, torch.zeros(1))
    with pytest.raises(UnsupportedError, match="inside the engine"):
        attention.paged_attention(torch.nn.Identity(), query, query, query, None)


def test_the_context_is_the_same_by_the_file_of_the_config() -> None:
    """Which rotary scaling that depends on the batch limits."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}
    limited = build("llama", rope_parameters=dynamic)
    assert context_length(limited.config) == 64
    for model in (limited, *map(model_of, ALL_FAMILIES)):
        config = text_config(json.loads(model.config.to_json_string()))
        assert context_len(config.get) == context_length(model.config)
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = {"max_position_embeddings": 512, "original_max_position_embeddings": 32, "rope_scaling": scaling}
    assert context_len(config.get) == 32
    read = Phi3Config(**config, hidden_size=16, num_attention_heads=2)  # which changes `scaling`
    assert context_length(read) == 32
