"""A tree in one packed pass: each node has the logits that transformers computes for its path alone."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from benchmarks.simulation.devices import LogitsDecider
from specwire import SamplingParams
from specwire.engine.attention import varlen, views
from specwire.engine.attention.paged import PackedBatch
from specwire.engine.batch import Batch, Feed, Segments
from specwire.engine.cache.kv_cache import SequenceCache
from specwire.engine.cache.layer_cache import LayerCache, Scoring
from specwire.engine.emulated import EmulatedModel, EmulatedRunner
from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.loop import Engine
from specwire.engine.model.runner import ModelRunner
from specwire.engine.threads import ComputeThread
from specwire.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from specwire.proposals.tree import TokenTree, path_to
from specwire.rule.captured import EagerReplay
from tests.support.integrity import check_integrity
from tests.support.slot_memory import runs_in
from tests.support.tiny_models import (
    CONTEXT_LEN,
    EXTRA_FAMILIES,
    FAMILIES,
    VOCAB_SIZE,
    WINDOW,
    model_of,
    reference_model,
)
from tests.tensors.test_padded import Traced

PREFIX_LEN = WINDOW + 7
TOLERANCE = 2e-5
_KINDS_OF_ATTENTION = ("llama", "gemma3", "gpt_oss")


class Drawn(NamedTuple):
    """A random tree behind a random prefix; `token_ids` are those of both."""

    token_ids: list[int]
    tree: TokenTree

    @classmethod
    def of(cls, num_nodes: int, seed: int) -> Drawn:
        """Some branches are deeper than the window, so that it cuts through the tree."""
        rng = random.Random(seed)
        token_ids = [rng.randrange(3, VOCAB_SIZE) for _ in range(PREFIX_LEN + num_nodes)]
        parents = tuple(rng.randint(max(-1, node - 4), node - 1) for node in range(num_nodes))
        return cls(token_ids, TokenTree(PREFIX_LEN, parents))

    @property
    def leaves(self) -> list[int]:
        return sorted(set(range(len(self.tree.parents))) - set(self.tree.parents))

    def path(self, node: int) -> list[int]:
        """The prefix and the nodes up to this one, as tokens."""
        nodes = path_to(self.tree.parents, node)
        return [*self.token_ids[:PREFIX_LEN], *(self.token_ids[PREFIX_LEN + i] for i in nodes)]


@torch.inference_mode()
def _alone(family: str, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """transformers' own eager logits of each text, from scratch."""
    longest = max(map(len, texts))
    padded = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    logits = reference_model(family)(input_ids=padded, use_cache=False).logits
    return [of_one[: len(text)] for of_one, text in zip(logits, texts, strict=True)]


def _expected(family: str, drawn: Drawn) -> Tensor:
    """[1 + num_nodes, vocab_size] after the prefix and after each node, every path run alone."""
    of_leaves = _alone(family, [drawn.path(leaf) for leaf in drawn.leaves])
    rows: dict[int, Tensor] = {}
    for leaf, logits in zip(drawn.leaves, of_leaves, strict=True):
        for depth, node in enumerate([-1, *path_to(drawn.tree.parents, leaf)]):
            rows[node] = logits[PREFIX_LEN - 1 + depth]
    return torch.stack([rows[node] for node in sorted(rows)])


_assert_close = partial(torch.testing.assert_close, rtol=TOLERANCE, atol=TOLERANCE)


def _runner(family: str, **options: Any) -> ModelRunner:
    return ModelRunner(model_of(family), **{"num_pages": 128, "page_size": 4} | options)


def _feed(cache: SequenceCache, drawn: Drawn, end: int | None = None, tree: TokenTree | None = None) -> Feed:
    """The tokens that the cache lacks, up to `end`; rows for the prefix's last token and all nodes."""
    token_ids = drawn.token_ids[cache.length : end]
    num_rows = min(len(token_ids), cache.length + len(token_ids) - PREFIX_LEN + 1)
    return Feed(cache, token_ids, max(0, num_rows), tree or drawn.tree)


@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA_FAMILIES])
def test_a_node_has_the_logits_of_its_own_path(family: str) -> None:
    """A tree beside a chain in one pass, and one that grows from pass to pass, once by a single node."""
    runner = _runner(family)
    for seed, num_nodes in enumerate((16, 32, 63, 64)):
        drawn, other = Drawn.of(num_nodes, seed), Drawn.of(5, 90 + seed)
        expected, chain = _expected(family, drawn), other.token_ids
        with runner.new_sequence() as cache, runner.new_sequence() as beside, runner.new_sequence() as grown:
            runner.forward([Feed(cache, drawn.token_ids[: PREFIX_LEN - 1], 0), Feed(beside, chain[:9], 0)])
            both = runner.forward([_feed(cache, drawn), Feed(beside, chain[9:], 5)])
            _assert_close(both[:-5], expected)
            _assert_close(both[-5:], _alone(family, [chain])[0][-5:])
            rows, tree = [], TokenTree(PREFIX_LEN, ())
            for num_grown in (0, 3, 4, num_nodes):
                tree = tree.extended(drawn.tree.parents[len(tree.parents) : num_grown])
                rows.append(runner.forward([_feed(grown, drawn, tree.end, tree)]))
            _assert_close(torch.cat(rows), expected)
    check_integrity(runner.pool)
    assert runner.pool.num_held_pages == 0


@pytest.mark.parametrize("family", _KINDS_OF_ATTENTION)
def test_over_scattered_pages(family: str) -> None:
    """Every page lies apart, so the tree itself is read in parts, of which a node may see none."""
    runner, drawn = _runner(family), Drawn.of(30, seed=3)
    blockers = [runner.new_sequence() for _ in range(runner.pool.num_pages)]
    for blocker in blockers:
        blocker.append(1)
    for blocker in blockers:
        if blocker.pages[0] % 2:
            blocker.release()
    with runner.new_sequence() as cache:
        runner.forward([_feed(cache, drawn, PREFIX_LEN - 1)])
        _assert_close(runner.forward([_feed(cache, drawn)]), _expected(family, drawn))
        assert len(runs_in(cache)) == len(cache.pages)


@pytest.mark.parametrize("family", _KINDS_OF_ATTENTION)
def test_a_word_that_is_wrong_gives_other_logits(family: str) -> None:
    """The negative control: one node follows its parent's sibling instead."""
    runner = _runner(family)
    right, wrong = (TokenTree(PREFIX_LEN, (-1, -1, 0, 1, parent, 3, 2, 2)) for parent in (0, 1))
    drawn = Drawn(Drawn.of(8, seed=0).token_ids, right)
    with runner.new_sequence() as cache:
        found = runner.forward([_feed(cache, drawn, tree=wrong)])
    expected = _expected(family, drawn)
    others = [row for row in range(9) if row != 5]
    _assert_close(found[others], expected[others])
    assert (found[5] - expected[5]).abs().max() > 100 * TOLERANCE


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", _KINDS_OF_ATTENTION)
def test_dense_and_recorded_steps_know_trees(family: str) -> None:
    """Steps of one size with and without trees: the recorded ones are replayed, on other numbers."""
    replay = EagerReplay() if family == "gpt_oss" else Traced()
    runner = _runner(family, replay=replay, page_size=16, num_pages=32)
    for seed in range(3):
        drawn, other = Drawn.of(15, seed), Drawn.of(3, 50 + seed)
        with runner.new_sequence() as cache, runner.new_sequence() as beside:
            runner.forward([_feed(cache, drawn, PREFIX_LEN - 1)])
            runner.forward([Feed(beside, other.token_ids[:-3], 0)])
            both = runner.forward([_feed(cache, drawn), Feed(beside, other.token_ids[-3:], 3)])
            _assert_close(both[:-3], _expected(family, drawn))
            _assert_close(both[-3:], _alone(family, [other.token_ids])[0][-3:])
    assert runner.num_graphs >= 2


@pytest.mark.parametrize("window", [None, 6])
def test_every_way_to_read_a_tree_agrees(window: int | None) -> None:
    """By the kernel and by scores as on a CPU, and over gathered pages as elsewhere."""
    generator = torch.Generator().manual_seed(0)
    drawn, scoring = Drawn.of(20, seed=4), Scoring(0.4, window)
    num_keys = drawn.tree.end
    layer = LayerCache(*(torch.randn(44, 2, 8, generator=generator) for _ in range(2)))
    for num_query in (1, 6, 21, 25):
        query = torch.randn(num_query, 4, 8, generator=generator)
        segments = Segments([0, num_query], [num_keys], [array("i", range(11))], 4, {0: drawn.tree})
        [segment] = segments
        packed = PackedBatch(torch.arange(num_keys - num_query, num_keys), segments, {}, page_size=4)
        found = [packed._over_tables.attend(None, layer, query, scoring)] + [
            views.view_attention(views.plan_reads([segment], window, 2, layer.keys), layer, query, each)
            for each in (scoring, scoring._replace(softcap=1e4))  # which the kernel does not know
        ]
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)


def test_the_paged_kernel_never_sees_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, drawn = _runner("llama", replay=EagerReplay(), page_size=16, num_pages=32), Drawn.of(15, seed=0)
    with runner.new_sequence() as cache:
        runner.forward([_feed(cache, drawn, PREFIX_LEN - 1)])
        monkeypatch.setattr(varlen, "find_variant", lambda *_: pytest.fail("it knows chains only"))
        _assert_close(runner.forward([_feed(cache, drawn)]), _expected("llama", drawn))


# --- rollback ---------------------------------------------------------------------------------------------


def _sequence(
    runner: ModelRunner, token_ids: list[int], tree: TokenTree | None, number: int = 0
) -> TokenSequence:
    """As a service has it."""
    return TokenSequence(SamplingParams(seed=1), 1, runner.new_sequence(), number, list(token_ids), tree)


def _verify(runner: ModelRunner, sequence: TokenSequence) -> tuple[int, Tensor]:
    """Run what the cache lacks; the number of these tokens, and the logits after the last one."""
    pending = sequence.tokens[sequence.cache.length :]
    return len(pending), runner.forward([Feed(sequence.cache, pending, 1, sequence.tree)])


def _verified(runner: ModelRunner, drawn: Drawn) -> TokenSequence:
    """A sequence whose tree was run."""
    sequence = _sequence(runner, *drawn)
    _verify(runner, sequence)
    return sequence


@pytest.mark.parametrize("family", FAMILIES)
def test_accepted_nodes_are_not_run_again(family: str) -> None:
    """Along every path, with a token that the tree has not: one token is run, and its logits are right."""
    runner, drawn = _runner(family), Drawn.of(20, seed=5)
    for leaf in drawn.leaves[::3]:
        sequence, committed = _verified(runner, drawn), [*drawn.path(leaf), 2]
        sequence.rebase(PREFIX_LEN, committed[PREFIX_LEN:])
        assert (sequence.tokens, sequence.tree) == (committed, None)
        num_run, logits = _verify(runner, sequence)
        assert num_run == 1
        _assert_close(logits, _alone(family, [committed])[0][-1:])
        check_integrity(runner.pool)
        sequence.cache.release()
    assert runner.pool.num_held_pages == 0


def test_what_is_run_again() -> None:
    """The last committed token, nodes that were not computed, and those that a shared page holds."""
    runner, drawn = _runner("llama"), Drawn.of(20, seed=5)
    path, start = drawn.path(drawn.leaves[-1]), PREFIX_LEN
    depth = len(path) - start
    assert depth >= 4
    for committed, num_computed, shared, num_wanted in (
        ([*path[:start], 2], None, False, 1),
        (path, None, False, 1),
        ([*path[: start + 2], 2], start + 1, False, None),
        ([*path, 2], start, False, depth + 1),
        ([*path, 2], start - 3, False, depth + 4),
        ([*path[: start - 2], 2], None, False, 1),
        ([*path, 2], None, True, None),
    ):
        sequence = _verified(runner, drawn)
        sequence.cache.truncate(num_computed or sequence.cache.length)
        fork = sequence.cache.fork() if shared else None
        sequence.rebase(start - 4, committed[start - 4 :])
        num_run, logits = _verify(runner, sequence)
        _assert_close(logits, _alone("llama", [committed])[0][-1:])
        assert num_wanted in (None, num_run)
        if shared:
            assert num_run > 1
        for cache in (sequence.cache, *([fork] if fork else [])):
            cache.release()
    check_integrity(runner.pool)
    assert runner.pool.num_held_pages == 0


def test_moves_outlive_failed_passes_and_the_owner_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass of another sequence does them, even if an earlier one found no room, or failed."""
    runner, drawn = _runner("llama", num_pages=24), Drawn.of(20, seed=5)
    sequence, doomed = _verified(runner, drawn), _verified(runner, drawn)
    committed = [*drawn.path(drawn.leaves[-1]), 2]
    for each in (sequence, doomed):
        each.rebase(PREFIX_LEN, committed[PREFIX_LEN:])
    doomed.cache.release()
    with runner.new_sequence() as other:
        with pytest.raises(Exception, match="full"):
            runner.forward([Feed(other, [5] * 200, 0)])
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_run", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                runner.forward([Feed(other, [5] * 40, 0)])
        text = [5, 6, 7] * 13
        found = runner.forward([Feed(other, text, 1)])  # over pages that the released sequence had
        _assert_close(found, _alone("llama", [text])[0][-1:])
    num_run, logits = _verify(runner, sequence)
    assert num_run == 1
    _assert_close(logits, _alone("llama", [committed])[0][-1:])


class _Steps:
    """The steps of one engine, with a budget that is smaller than a tree."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.logits = runner, torch.empty(0)
        self.engine = Engine(
            runner,
            LogitsDecider(self._consume),
            max_num_tokens=24,
            max_prefill_tokens=24,
            context_len=CONTEXT_LEN,
            thread=Mock(ComputeThread),
        )

    def run(self, token_ids: list[int], tree: TokenTree | None = None) -> TokenSequence:
        """Open a sequence with these tokens, and run them."""
        sequence = _sequence(self.runner, token_ids, tree, len(self.engine._sequences))
        self.engine._sequences.add(sequence)
        self.found = self.go_on(sequence)
        return sequence

    def go_on(self, sequence: TokenSequence) -> int:
        """Run what the cache lacks; the tokens that were found instead."""
        job = Job(sequence, len(sequence.tokens), [], num_rows=1)
        while not job.done:
            step = self.engine._scheduler.plan([job], 0)
            self.engine._run_passes(step.jobs, step.feeds)
        return job.num_cached_tokens

    def _consume(self, jobs: list[Job], logits: Tensor) -> None:
        jobs[0].result, self.logits = True, logits


def test_only_committed_tokens_name_pages() -> None:
    """A tree that is split by the budget, and preempted, leaves nothing behind that a chain could find."""
    steps, drawn = _Steps(_runner("llama")), Drawn.of(40, seed=7)
    expected, flat = _expected("llama", drawn)[-1:], drawn.token_ids
    sequence = steps.run(flat, drawn.tree)
    _assert_close(steps.logits, expected)
    sequence.cache.truncate(0)
    assert 0 < steps.go_on(sequence) <= PREFIX_LEN
    _assert_close(steps.logits, expected)
    steps.run(flat)
    assert 0 < steps.found <= PREFIX_LEN
    _assert_close(steps.logits, _alone("llama", [flat])[0][-1:])
    committed = [*drawn.path(drawn.leaves[-1]), *[2] * 8]
    sequence.rebase(PREFIX_LEN, committed[PREFIX_LEN:])
    steps.go_on(sequence)
    steps.run(committed)
    assert steps.found > PREFIX_LEN, "what was kept and moved is known once it is committed"
    _assert_close(steps.logits, _alone("llama", [committed])[0][-1:])
    for one in steps.engine._sequences:
        one.cache.release()
    check_integrity(steps.runner.pool)
    assert steps.runner.pool.num_held_pages == 0


# --- limits -----------------------------------------------------------------------------------------------


def test_siblings_share_a_position_at_the_end_of_the_context() -> None:
    runner, start = _runner("llama", num_pages=256), CONTEXT_LEN - 1
    with runner.new_sequence() as cache:
        runner.forward([Feed(cache, [5] * start, 0)])
        runner.forward([Feed(cache, [5, 6, 7], 3, TokenTree(start, (-1, -1, -1)))])
        cache.truncate(start)
        with pytest.raises(ContextLengthError):
            runner.forward([Feed(cache, [5, 6, 7], 3, TokenTree(start, (-1, -1, 0)))])
        with pytest.raises(InvalidRequestError, match="beyond the tree"):
            runner.forward([Feed(cache, [5, 6, 7], 3, TokenTree(start, (-1, -1)))])
        assert cache.length == start


def test_where_rows_must_not_depend_on_others_trees_are_refused() -> None:
    runner, drawn = _runner("llama", batch_invariant=True), Drawn.of(8, seed=0)
    with runner.new_sequence() as cache:
        with pytest.raises(UnsupportedError, match="--batch-invariant"):
            runner.forward([_feed(cache, drawn)])
        assert cache.length == 0


def test_a_batch_is_split_in_the_middle_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, drawn = _runner("gemma3"), Drawn.of(30, seed=2)

    def in_pieces(batch: Batch) -> Tensor:
        return torch.cat([runner._run_packed(part) for part in batch.split(16)])

    monkeypatch.setattr(runner, "_run", in_pieces)
    with runner.new_sequence() as cache:
        _assert_close(runner.forward([_feed(cache, drawn)]), _expected("gemma3", drawn))


def test_an_emulated_device_emits_at_a_nodes_own_position() -> None:
    runner = EmulatedRunner(EmulatedModel(step_ms=0.0), num_pages=16, page_size=16)
    drawn = Drawn.of(20, seed=1)
    with runner.new_sequence() as cache, runner.new_sequence() as alone:
        found = runner.forward([_feed(cache, drawn)])
        for node in (-1, *drawn.leaves):
            expected = runner.forward([Feed(alone, drawn.path(node), 1)])
            assert torch.equal(found[node + 1], expected[0])
            alone.truncate(0)
