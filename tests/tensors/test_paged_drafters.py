"""Drafters whose keys lie in the target's pages: layers for multi-token prediction, a block drafter, EAGLE-3.

What they draft is what transformers drafts with them, or a straight implementation, wherever their keys come
from; limits and refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation import candidate_generator

from specwire.engine.batch import Batch, Feed, Segments
from specwire.engine.device import DraftQuery
from specwire.engine.model import block, eagle3, mtp
from specwire.engine.model.block import BlockRunner
from specwire.engine.model.drafter import chain_logits
from specwire.engine.model.eagle3 import Eagle3Runner
from specwire.engine.model.loading import load_model
from specwire.engine.model.mtp import MtpRunner
from specwire.errors import ContextLengthError, ModelLoadError, ResourceExhaustedError
from specwire.proposals.tree import TokenTree
from tests.support import blocks
from tests.support import eagle3 as eagles
from tests.support import mtp as mtp_targets
from tests.support.integrity import check_integrity
from tests.support.pairs import save_target
from tests.support.tiny_models import CONTEXT_LEN, MTP_FAMILIES, VOCAB_SIZE, build, save
from tools.eagle3 import unrolled

PROMPT = [5, 9, 11, 2, 7, 4, 30, 21]
NUM_DRAFTS = 4


class Drafter(NamedTuple):
    """A runner, and what transformers needs to draft alike.

    Attributes:
        load: loads what drafts once more, after the model.
        generator: of transformers; `settings` of its `generate` choose it. EAGLE-3 has none.
    """

    target: Path
    load: Callable[[Any], Any]
    runner: Any
    generator: Any
    settings: dict[str, Any]

    @classmethod
    def of(cls, target: Path, make: Any, load: Any, generator: Any = None, **settings: Any) -> Drafter:
        model = load_model(target, dtype="float32")
        return cls(target, load, make(model, load(model), num_pages=160, page_size=4), generator, settings)


def _drafted(runner: Any, cache: Any, token_id: int, num: int) -> list[int]:
    """Greedy drafts after a token that follows the cache, which keeps its length."""
    length, found = cache.length, [token_id]
    for logits in islice(chain_logits(runner, cache, found), num):
        found.append(int(logits.argmax()))
    cache.truncate(length)
    return found[1:]


def _query(rows: list[int], token_ids: list[int], depth: int) -> DraftQuery:
    """Of nodes at one depth."""
    columns = rows, token_ids, [depth] * len(rows)
    return DraftQuery(depth == 0, *(np.array(column, np.int64) for column in columns))


def _logits(_: object, logits: torch.Tensor) -> torch.Tensor:
    return logits


@pytest.fixture(scope="module", params=[*MTP_FAMILIES, "block", "eagle3"])
def drafter(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    directory, generators = tmp_path_factory.mktemp("drafter"), candidate_generator
    if request.param in MTP_FAMILIES:
        target = mtp_targets.save_mtp_target(directory / "target", request.param, spread=0.6)
        return Drafter.of(target, MtpRunner, mtp.load, generators.MTPCandidateGenerator, use_mtp=True)
    target, saved = save_target(directory / "target"), directory / "drafter"
    if request.param == "eagle3":
        return Drafter.of(target, Eagle3Runner, partial(eagle3.load, eagles.save_eagle3(saved)))
    load = partial(block.load, blocks.save_block_drafter(saved))
    settings = {
        "speculation_type": "dflash",
        "assistant_model": AutoModel.from_pretrained(saved, dtype=torch.float32),
    }
    return Drafter.of(target, BlockRunner, load, generators.DFlashTokenCandidateGenerator, **settings)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_target(tmp_path / "target")


@pytest.fixture
def model(target: Path) -> Any:
    return load_model(target, dtype="float32")


of_transformers = pytest.mark.parametrize("drafter", [*MTP_FAMILIES, "block"], indirect=True)
layers = pytest.mark.parametrize("drafter", MTP_FAMILIES, indirect=True)
step_by_step = pytest.mark.parametrize("drafter", [*MTP_FAMILIES, "eagle3"], indirect=True)
blocks_alone = pytest.mark.parametrize("drafter", ["block"], indirect=True)


@of_transformers
def test_they_draft_what_transformers_does(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """All proposals of a whole generation with its own cache and its own rollbacks."""
    runner = drafter.runner
    model = AutoModelForCausalLM.from_pretrained(drafter.target, dtype=torch.float32)
    if isinstance(runner, MtpRunner):
        mtp._name_layers(model, model.config.num_hidden_layers, model.config.num_mtp_layers)
    asked: list[tuple[list[int], list[int]]] = []
    propose = drafter.generator.get_candidates

    def noted(self: Any, input_ids: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        found = propose(self, input_ids, *args, **keywords)
        before = input_ids[0].tolist()
        asked.append((before, found[0][0, len(before) :].tolist()))
        return found

    monkeypatch.setattr(drafter.generator, "get_candidates", noted)
    settings: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    model.generate(torch.tensor([PROMPT]), do_sample=False, **settings, **drafter.settings)
    proposals = [(before, token_ids) for before, token_ids in asked if token_ids]
    assert len(proposals) > 5
    with runner.new_sequence() as cache:
        for before, token_ids in proposals:
            cache.truncate(min(cache.length, len(PROMPT)))
            runner.forward([Feed(cache, before[cache.length : -1])])
            assert _drafted(runner, cache, before[-1], len(token_ids)) == token_ids


def test_wherever_their_keys_come_from(drafter: Drafter) -> None:
    """In one pass, in chunks beside another sequence, from known pages, in a fork, after rejected tokens."""
    runner, tokens = drafter.runner, (PROMPT * 3)[:21]

    def drafted(cache: Any) -> list[int]:
        return _drafted(runner, cache, 3, NUM_DRAFTS)

    with runner.new_sequence() as whole:
        runner.forward([Feed(whole, tokens)])
        expected = drafted(whole)
        whole.remember(tokens)
        with runner.new_sequence() as reusing:
            num_known = reusing.reuse_prefix(tokens, len(tokens) - 1)
            assert num_known >= 16
            runner.forward([Feed(reusing, tokens[num_known:])])
            assert drafted(reusing) == expected
        with whole.fork() as fork:
            assert drafted(fork) == expected
    with runner.new_sequence() as pieces, runner.new_sequence() as other:
        runner.forward([Feed(other, [1, 2, 3]), Feed(pieces, tokens[:1])])
        runner.forward([Feed(pieces, [*tokens[1:12], 8, 8, 8])])
        pieces.truncate(12)
        runner.forward([Feed(pieces, tokens[12:]), Feed(other, [4])])
        assert drafted(pieces) == expected
        if isinstance(runner, BlockRunner):
            feeds = [Feed(other, runner.block([9])), Feed(pieces, runner.block([3]))]
            found = []
            for depth in range(NUM_DRAFTS):
                query = _query([0, 1], [9, 3], depth)
                found.append(int(runner.run_draft(feeds, query, None, _logits)[1].argmax()))
                feeds = []
            assert found == expected
    check_integrity(runner.pool)


@step_by_step
def test_after_a_path_of_a_tree(drafter: Drafter) -> None:
    """Nodes are computed after their parents, and the path that is kept moves together."""
    path, parents, runner = [17, 23, 5], [-1, -1, 1, 2, 0], drafter.runner
    nodes = [40, 17, 23, 5, 41]
    with runner.new_sequence() as plain, runner.new_sequence() as kept:
        runner.forward([Feed(plain, [*PROMPT, *path])])
        tree = TokenTree(len(PROMPT), tuple(parents))
        runner.forward([Feed(kept, [*PROMPT, *nodes], 1, tree)])
        kept.keep(len(PROMPT), [1, 2, 3])
        assert _drafted(runner, kept, 3, 3) == _drafted(runner, plain, 3, 3)


@layers
def test_a_full_cache(drafter: Drafter) -> None:
    """Nothing is appended then."""
    runner = drafter.runner
    with runner.new_sequence() as cache, runner.new_sequence() as other:
        runner.forward([Feed(cache, PROMPT)])
        other.append(runner.pool.num_free_pages * runner.pool.page_size)
        with pytest.raises(ResourceExhaustedError):
            next(chain_logits(runner, cache, [1]))
        assert cache.length == len(PROMPT)


@blocks_alone
def test_the_end_of_the_context(drafter: Drafter) -> None:
    length = CONTEXT_LEN - blocks.BLOCK_SIZE + 1
    with drafter.runner.new_sequence() as cache:
        drafter.runner.forward([Feed(cache, [1] * length)])
        with pytest.raises(ContextLengthError):
            next(chain_logits(drafter.runner, cache, [1]))
        assert cache.length == length


def test_first_tokens_are_left_out() -> None:
    """Of each sequence those that a layer has no state for; one with no others is not in the row."""
    segments = Segments([0, 3, 4, 6], [3, 1, 9], [[0], [1], [2, 3]], 8, {}, ())  # type: ignore[list-item]
    numbers = np.arange(6)
    row = Batch(numbers, numbers, np.array([0, 1, 2, 8, 23, 24]), segments, numbers)
    kept, left = mtp.without_first(row, 1)
    assert kept.tolist() == [False, True, True, False, True, True]
    assert [*left.query_offsets] == [0, 2, 4]
    assert [*left.encoder_lens] == [1, 1]
    assert row.previous_slots()[kept].tolist() == [0, 1, 22, 23]


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        ("llama", "'llama' has no layers for multi-token prediction"),
        ("mellum", "weights are missing"),  # of layers that its config announces
    ],
)
def test_models_without_layers(family: str, problem: str, tmp_path: Path) -> None:
    model = load_model(save(build(family), tmp_path / family))
    with pytest.raises(ModelLoadError, match=problem):
        mtp.load(model)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"hidden_size": 16}, "is for states of 16, and the target has 32"),
        ({"target_layer_ids": [0, 7]}, "reads layer 7, and the target has 2"),
        ({"mask_token_id": 500}, "its mask is token 500, which the target cannot read"),
        (None, "'llama' is no block drafter"),
    ],
)
def test_block_drafters_of_other_targets(
    overrides: Any, problem: str, target: Path, model: Any, tmp_path: Path
) -> None:
    saved = target if overrides is None else blocks.save_block_drafter(tmp_path / "drafter", **overrides)
    with pytest.raises(ModelLoadError, match=problem):
        block.load(saved, model)


@pytest.mark.parametrize(
    ("layout", "given"),
    [("z-lab", {}), ("speculators", {}), ("speculators", {"sample_from_anchor": True})],
    ids=["z-lab", "speculators", "from the anchor"],
)
def test_a_published_block_drafter_computes_what_a_straight_implementation_does(
    layout: str, given: dict[str, Any], tmp_path: Path
) -> None:
    """After the target's tokens in chunks. speculators' has embeddings of its own, and logits of half of the
    target's tokens, from the place of the last token on if its config says so."""
    target = save_target(tmp_path / "target", num_hidden_layers=3)
    drafted = () if layout == "z-lab" else blocks.DRAFTED
    saved = blocks.save_published(tmp_path / "drafter", layout, **given)
    model = load_model(target, dtype="float32")
    runner = BlockRunner(model, block.load(saved, model), num_pages=64, page_size=4)
    with runner.new_sequence() as cache:
        runner.forward([Feed(cache, PROMPT[:3])])
        runner.forward([Feed(cache, PROMPT[3:-1])])
        assert runner.draft_shape is not None
        block_of_last = PROMPT[-1:] * runner.draft_shape.longest
        found = torch.cat([*chain_logits(runner, cache, block_of_last)])
    tensors = blocks.published_tensors(target_ids=drafted)
    expected = blocks.straight_logits(target, tensors, PROMPT, 7)[0 if given else 1 :]
    torch.testing.assert_close(found[:, drafted or slice(None)], expected, atol=1e-4, rtol=0)
    assert found.isfinite().sum() == expected.numel(), "no other token has a logit"


@pytest.mark.parametrize(
    ("layout", "overrides", "problem"),
    [
        ("z-lab", {"dflash_config": {"selector_rank": 8, "conv_kernel_size": None}}, "selector_rank is not"),
        ("z-lab", {"layer_types": ["sliding_attention", "full_attention"]}, "sliding layers of a block"),
        ("z-lab", {"attention_bias": True}, "attention_bias and is_causal are not supported"),
        ("z-lab", {"dflash_config": {"target_layer_ids": None}}, "its config has no target_layer_ids"),
        ("speculators", {"layers": {"layer_types": ["sliding_attention"] * 2}}, "sliding layers of a block"),
        ("speculators", {"layers": {"model_type": "llama"}}, "its layers are of type 'llama', and not qwen3"),
        ("speculators", {"layers": {"vocab_size": 50}}, "is for a vocabulary of 50, and the target has 97"),
        ("speculators", {"aux_hidden_state_layer_ids": [0, 1]}, "reads what layers give, not embeddings"),
        ("speculators", {"aux_hidden_state_layer_ids": [1, 3]}, "aux_hidden_state_layer_ids 3: no layer"),
        ("speculators", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids None is no block"),
        ("speculators", {"transformer_layer_config": None}, "its config has no transformer_layer_config"),
        ("speculators", {"block_size": 1}, "block_size 1 leaves no room for a draft token"),
        ("speculators", {"mask_token_id": None}, "its config has no mask_token_id"),
        ("speculators", {"target_hidden_size": 64}, "target_hidden_size 64 is not the hidden_size"),
        ("speculators", {"draft_vocab_size": 5}, r"lm_head.weight is \[48, 32\], and not \[5, 32\]"),
        ("speculators", {"without": "d2t"}, "lacks d2t, for 48 of 97 tokens"),
        ("speculators", {"without": "embed_tokens.weight"}, "lacks embed_tokens.weight"),
    ],
)
def test_published_block_drafters_that_are_refused(
    layout: str, overrides: Any, problem: str, tmp_path: Path
) -> None:
    saved = blocks.save_published(tmp_path / "drafter", layout, **overrides)
    target = save_target(tmp_path / "target", num_hidden_layers=3)
    with pytest.raises(ModelLoadError, match=problem):
        block.load(saved, load_model(target, dtype="float32"))


@pytest.mark.parametrize("layout", eagles.LAYOUTS)
@pytest.mark.parametrize(("given", "layer"), [({}, {}), (eagles.NEWER, eagles.QWEN3)], ids=["plain", "newer"])
def test_eagle3_computes_what_a_straight_implementation_does(
    layout: str, given: Any, layer: Any, target: Path, model: Any, tmp_path: Path
) -> None:
    """After the target's tokens in chunks, along each path of a tree that grows in two passes. Half of the
    target's tokens are in the draft's vocabulary."""
    ids = [*range(1, VOCAB_SIZE, 2)]
    saved = eagles.save_eagle3(tmp_path / "eagle3", layout, target_ids=ids, layer=layer, **given)
    runner = Eagle3Runner(model, eagle3.load(saved, model), num_pages=64, page_size=4)
    tensors, window = eagles.random_tensors(ids, 2, given, layer), layer.get("sliding_window", 99)
    expected = partial(eagles.straight_logits, target, tensors, given, window)
    tree = TokenTree(len(PROMPT), (-1, -1, 0, 1))
    with runner.new_sequence() as cache:
        runner.forward([Feed(cache, PROMPT[:3])])
        runner.forward([Feed(cache, PROMPT[3:-1])])
        passes = [
            (Feed(cache, PROMPT[-1:]), _query([0], PROMPT[-1:], 0)),
            (Feed(cache, [17, 23], 1, tree), _query([0, 0], [17, 23], 1)),
            (Feed(cache, [9, 40], 1, tree), _query([1, 2], [9, 40], 2)),
        ]
        found = torch.cat([runner.run_draft([feed], query, None, _logits) for feed, query in passes])
    assert torch.equal(found.isfinite().sum(0).nonzero()[:, 0], torch.tensor(ids))
    for path, rows in (([17, 9], [0, 1, 3]), ([23, 40], [0, 2, 4])):
        torch.testing.assert_close(found[rows][:, ids], expected([*PROMPT, *path], 3), atol=1e-4, rtol=0)


def test_eagle3_is_trained_on_what_it_will_compute(target: Path, model: Any, tmp_path: Path) -> None:
    """At each place of several windows, and in each step, what the engine computes for draft tokens there."""
    drafter = eagle3.load(eagles.save_eagle3(tmp_path / "eagle3", norm_output=True), model)
    runner = Eagle3Runner(model, drafter, num_pages=64, page_size=4)
    windows = torch.tensor([PROMPT, PROMPT[::-1]])
    with torch.inference_mode():
        plain = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        shown = plain(windows, output_hidden_states=True).hidden_states
        steps = [*unrolled.unrolled(drafter, shown, windows, depth=3)]
    for window, first in product(range(2), (1, 3, 5)):
        tokens = windows[window].tolist()
        with runner.new_sequence() as cache:
            runner.forward([Feed(cache, tokens[:first])])
            for step, logits in enumerate(chain_logits(runner, cache, tokens[first : first + 3])):
                expected = drafter.logits(steps[step][window, first + step - 1])
                torch.testing.assert_close(logits[0, drafter.target_ids], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"layer": {"hidden_size": 16}}, "is for states of 16, and the target has 32"),
        ({"vocab_size": 50}, "is for a vocabulary of 50, and the target has"),
        ({"num_read": 3}, "reads what enters layer 2, and the target has 2"),
        ({"layer": {"num_hidden_layers": 2}}, "has 2 layers, and EAGLE-3 has one"),
        ({"layer": {"model_type": "mistral"}}, "its layer is of type 'mistral', and not llama or qwen3"),
        ({"layer": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}}, "its rope_type 'dynamic'"),
        ({"draft_vocab_size": None}, "is no EAGLE-3: its config has no draft_vocab_size"),
        ({"without": "norm.weight"}, "lacks norm.weight"),
        ({"without": "d2t"}, "lacks d2t, for 48 of 97 tokens"),
        ({"target_ids": [1, 1]}, "d2t does not lead to 2 different ids"),
        ({"draft_vocab_size": 5}, r"lm_head.weight is \[48, 32\], and not \[5, 32\]"),
        ({"tensors": {"more.weight": torch.ones(1)}}, "has more than is known of EAGLE-3: more.weight"),
    ],
)
def test_eagle3_of_other_targets(settings: Any, problem: str, model: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        eagle3.load(eagles.save_eagle3(tmp_path / "eagle3", **settings), model)


def test_what_eagle3_reads_by_default() -> None:
    """As in the paper; what a config names is read from the first layer to the last. `eagle_config` names
    layers by what they give, as SpecForge writes and SGLang reads it."""
    config = {"model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": 4}
    target = build("llama", num_hidden_layers=32).config
    config |= {name: getattr(target, name) for name in ("hidden_size", "vocab_size")}
    assert eagle3.read_settings(config, target).layer_ids == (2, 16, 29)
    named = {"eagle_aux_hidden_state_layer_ids": [7, 3]}
    assert eagle3.read_settings(config | named, target).layer_ids == (3, 7)
    assert eagle3.read_settings(config | {"eagle_config": named}, target).layer_ids == (4, 8)
    usual = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}
    assert eagle3.read_settings(config | usual, target).layer_ids == (2, 16, 29)


def test_control_states_of_others_are_refused(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at loading notices layers that read a token's own state, and blocks of layers in disorder."""
    taken = BlockRunner._taken
    monkeypatch.setattr(BlockRunner, "_taken", lambda runner: taken(runner)[::-1])
    monkeypatch.setattr(Batch, "previous_slots", lambda batch: batch.slots)
    with pytest.raises(ModelLoadError, match="self-check failed"):
        drafter.load(load_model(drafter.target, dtype="float32"))
