"""Encoder-decoders in packed, paged passes: logits equal transformers' own, whatever shares the pages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specwire import SamplingParams
from specwire.config.services import VerifyConfig
from specwire.engine import models
from specwire.engine.batch import Feed
from specwire.engine.cache.kv_cache import PagePool, SequenceCache
from specwire.engine.jobs import TokenSequence
from specwire.engine.model import encoder_decoder
from specwire.engine.model.encoder_decoder import EncoderDecoderRunner
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from specwire.proposals.tree import TokenTree, path_to
from tests.support import encoder_decoders
from tests.support.encoder_decoders import FAMILIES, LENGTH, MAX_DISTANCE, START, own_logits
from tests.support.integrity import check_integrity
from tests.support.logits_engine import LogitsEngine, Stream
from verify_service.verifier import VerifyJob

PAGE_SIZE = 4
NUM_TOKENS = 2 * MAX_DISTANCE


def tokens_of(num: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 97) for _ in range(num)]


INPUTS = [tokens_of(num, num) for num in (1, 8, 23)]


def made(family: str, num_pages: int) -> tuple[EncoderDecoderRunner, Any]:
    """A runner, and transformers' own model."""
    model, own = encoder_decoders.build(family), encoder_decoders.build(family)
    return EncoderDecoderRunner(model, num_pages=num_pages, page_size=PAGE_SIZE), own


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: Any) -> tuple[EncoderDecoderRunner, Any]:
    return made(request.param, num_pages=128)


def opened(runner: EncoderDecoderRunner, encoder_input: list[int]) -> SequenceCache:
    cache = runner.new_sequence()
    cache.encoder_len = len(encoder_input)
    return cache


assert_close = partial(torch.testing.assert_close, rtol=2e-5, atol=2e-5)


def assert_idle(runner: ModelRunner) -> None:
    check_integrity(runner.pool)
    assert runner.pool.num_held_pages == 0


def test_random_chunks_of_several_sequences(pair: tuple[EncoderDecoderRunner, Any]) -> None:
    """Inputs are encoded beside decoding and verifying sequences with other inputs, and rolled back."""
    runner, own = pair
    rng, texts = random.Random(1), [[START, *tokens_of(NUM_TOKENS, seed)] for seed in range(3)]
    caches = [opened(runner, each) for each in INPUTS]
    expected = [own_logits(own, each, text) for each, text in zip(INPUTS, texts, strict=True)]
    ends = [0, 0, 0]
    while min(ends) < len(texts[0]):
        chosen = [i for i in range(3) if ends[i] < len(texts[i]) and rng.random() < 0.7]
        feeds = []
        for i in chosen:
            chunk = texts[i][ends[i] : ends[i] + rng.choice([1, 1, 2, 5, 9])]
            feeds.append(Feed(caches[i], chunk if ends[i] else INPUTS[i] + chunk, len(chunk)))
        logits = runner.forward(feeds).split([feed.num_rows for feed in feeds])
        for i, rows in zip(chosen, logits, strict=True):
            assert_close(rows, expected[i][ends[i] : ends[i] + len(rows)])
            ends[i] += len(rows)
            if rng.random() < 0.3:  # the last tokens are run again
                ends[i] = max(1, ends[i] - 3)
                caches[i].truncate(len(INPUTS[i]) + ends[i])
    for cache in caches:
        cache.release()
    assert_idle(runner)


def test_forks_share_the_input_and_do_not_disturb_each_other(pair: tuple[EncoderDecoderRunner, Any]) -> None:
    runner, own = pair
    text, other = [START, *tokens_of(9, 1)], tokens_of(4, 2)
    with opened(runner, INPUTS[2]) as first:
        runner.forward([Feed(first, INPUTS[2] + text, 0)])
        with first.fork() as second:
            assert runner.pool.num_shared_pages == len(first.pages)
            second.truncate(len(INPUTS[2]) + 6)
            both = runner.forward([Feed(first, tokens_of(4, 3), 4), Feed(second, other, 4)])
            assert runner.pool.num_shared_pages >= len(INPUTS[2]) // PAGE_SIZE
    assert_close(both[:4], own_logits(own, INPUTS[2], text + tokens_of(4, 3))[-4:])
    assert_close(both[4:], own_logits(own, INPUTS[2], text[:6] + other)[-4:])
    assert_idle(runner)


def test_a_tree_beside_a_decoding_sequence(pair: tuple[EncoderDecoderRunner, Any]) -> None:
    """Siblings have the same position and the same distance from the tokens before them."""
    runner, own = pair
    text, parents = [START, *tokens_of(MAX_DISTANCE + 3, 1)], (-1, -1, 0, 0, 2, 1, 5, 4)
    nodes = tokens_of(len(parents), 2)
    tree = TokenTree(len(INPUTS[1]) + len(text), parents)
    with opened(runner, INPUTS[1]) as growing, opened(runner, INPUTS[2]) as decoding:
        runner.forward([Feed(growing, INPUTS[1] + text[:-2], 0), Feed(decoding, INPUTS[2] + text[:-1], 0)])
        # In two passes, so that nodes are read from the cache too; the first one has tokens before the tree.
        first = runner.forward([Feed(growing, text[-2:] + nodes[:3], 3, tree), Feed(decoding, text[-1:], 1)])
        rest = runner.forward([Feed(growing, nodes[3:], len(nodes) - 3, tree)])
    assert_close(first[-1:], own_logits(own, INPUTS[2], text)[-1:])
    for node, row in enumerate(torch.cat([first[:3], rest])):
        path = [nodes[i] for i in path_to(parents, node)]
        assert_close(row, own_logits(own, INPUTS[1], text + path)[-1])
    assert_idle(runner)


def test_an_input_in_pieces_is_refused(pair: tuple[EncoderDecoderRunner, Any]) -> None:
    runner, own = pair
    with opened(runner, INPUTS[1]) as cache:
        for feed in (Feed(cache, INPUTS[1], 0), Feed(cache, [*INPUTS[1], START], 2)):
            with pytest.raises(InvalidRequestError):
                runner.forward([feed])
        most = runner.context_len
        assert most is not None
        if most == LENGTH:
            with pytest.raises(ContextLengthError, match=str(LENGTH)):
                runner.forward([Feed(cache, INPUTS[1] + [START] * (most + 1), 1)])
            full = runner.forward([Feed(cache, INPUTS[1] + [START] * most, 1)])
            assert_close(full, own_logits(own, INPUTS[1], [START] * most)[-1:])
    assert_idle(runner)


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_checks_logits_and_describes(family: str, tmp_path: Path) -> None:
    saved = encoder_decoders.save(tmp_path, family)
    model = encoder_decoder.load(saved, dtype="float32")
    described = encoder_decoder.describe(model, saved)
    assert described["decoder_token_ids"] == (START,)
    assert described["encoder_len"] == described["context_len"] == (2048 if "t5" in family else LENGTH)
    assert described["vocab_size"] == 97
    model.generation_config.forced_bos_token_id = 7
    assert encoder_decoder.first_tokens(model) == (START, 7)


def test_the_self_check_runs_a_pass_without_new_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every pass but the first one of a request."""

    def failing(nothing: Tensor) -> None:
        raise AttributeError("is_sliding")

    monkeypatch.setattr(encoder_decoder, "_Known", failing)
    with pytest.raises(AttributeError, match="is_sliding"):
        encoder_decoder.self_check(encoder_decoders.build("t5"))


def test_the_self_check_notices_a_model_that_is_computed_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: without the bias, or with positions counted along the row, nothing is served."""
    runner: Any = encoder_decoder.EncoderDecoderRunner
    for family, hook in (("t5", "_bias_by_distance"), ("bart", "_with_positions")):
        saved = encoder_decoders.save(tmp_path / family, family)
        with monkeypatch.context() as patched:
            patched.setattr(runner, hook, lambda *_: None)
            with pytest.raises(ModelLoadError):
                encoder_decoder.load(saved, dtype="float32")


@pytest.mark.parametrize(
    ("flag", "option"),
    [
        ("--batch-invariant", {"batch_invariant": True}),
        ("--tensor-parallel-size", {"tensor_parallel_size": 2}),
    ],
)
def test_what_does_not_combine_is_refused_by_name(flag: str, option: dict[str, Any], tmp_path: Path) -> None:
    saved = str(encoder_decoders.save(tmp_path, "t5"))
    with pytest.raises(ModelLoadError, match=f"encoder-decoder, which is not served with {flag}"):
        models.make_runner(VerifyConfig(model=saved, **option), saved)


# --- the engine ---------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[LogitsEngine]:
    """With so little memory that pages are evicted, and sequences preempted."""
    runner, own = made("t5_gated", num_pages=24)

    def from_scratch(sequence: TokenSequence) -> Tensor:
        tokens, num_read = sequence.tokens, sequence.cache.encoder_len
        return own_logits(own, tokens[:num_read], tokens[num_read:])

    with closing(LogitsEngine(runner, from_scratch, max_num_tokens=40, max_prefill_tokens=10)) as found:
        yield found  # which prefills less than an input at a time


def test_logits_after_any_history_equal_those_from_scratch(engine: LogitsEngine) -> None:
    """Equal and nearly equal inputs, rollbacks into them, reused pages, preemption; all in shared passes."""
    rng, first = np.random.default_rng(5), tokens_of(16, 1)
    inputs = [first, [*first[:-1], 90], [91, *first[1:]], tokens_of(21, 2)]

    def opened(encoder_input: list[int]) -> Stream:
        return Stream(engine.engine, [*encoder_input, START], len(encoder_input))

    def job(stream: Stream) -> VerifyJob:
        """Rolled back into the input it may go on with another one of the same length."""
        if rng.random() < 0.3:
            stream.roll_back(rng)
        num_read = stream.sequence.cache.encoder_len
        if stream.held < num_read and rng.random() < 0.5:
            stream.committed[num_read - 1] = int(rng.integers(3, 97))
        return stream.job([int(each) for each in rng.integers(3, 6, rng.integers(0, 8))])

    def another() -> Stream:
        return opened(inputs[rng.integers(len(inputs))])

    engine.run_history(rng, 60, [opened(each) for each in inputs], another, job, replaced=0.2, max_len=70)
    status = engine.engine.status()
    assert status.num_hit_tokens > 50
    assert status.num_preemptions > 0
    assert_idle(engine.runner)


def test_a_request_that_ends_within_the_input_is_refused() -> None:
    sequence = TokenSequence(SamplingParams(seed=0), 9, PagePool(4, PAGE_SIZE).new_sequence(), 1)
    sequence.cache.encoder_len = 8
    with pytest.raises(InvalidRequestError, match="the encoder's input has 8 tokens"):
        sequence.rebase(0, tokens_of(8, 1))
