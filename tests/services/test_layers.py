"""A target that drafts without some of its layers, through real services: requests, losses, refusals.

And the search for layers that it can spare.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import verify_service.layers
from specwire import AsyncClient, InvalidRequestError, Rule, SamplingParams
from specwire.cli import drafts
from specwire.config.blocks import Block, parse_skip
from specwire.config.client import ClientConfig
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.stack import UpConfig
from specwire.engine.layers import files
from specwire.engine.layers.blocks import ModelBlocks
from specwire.engine.layers.files import Found
from specwire.engine.model.fingerprint import weights_fingerprint
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ConfigError, ModelLoadError, SpecwireError
from tests.support import encoder_decoders
from tests.support.harness import LocalStack, local_stack, started_services
from tests.support.pairs import save_target
from tests.support.tiny_models import build
from tools.layers import command as search_layers
from tools.layers import search
from tools.layers.config import SearchLayersConfig
from tools.layers.objective import Costs, Promise, Trials, num_pages, promise
from tools.proxy.delay_proxy import Link
from verify_service.threshold import Threshold

LAYERS = '{"method": "layers"}'
PROMPT = [5, 9, 11, 2, 7, 4]
GREEDY = SamplingParams(max_tokens=32, temperature=0, rule=Rule.GUMBEL, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def stack(target: Path) -> Iterator[LocalStack]:
    """With a link between coordinator and verify; layers are not the default. Proposals are long."""
    with (
        mock.patch.object(verify_service.layers, "Threshold", partial(Threshold, first=0.0)),
        local_stack(target, verify_options={"layers": "m1"}, verify_link=Link()) as running,
    ):
        yield running


def test_a_request_may_ask_for_them(stack: LocalStack) -> None:
    plain = stack.client.generate(params=GREEDY, prompt_token_ids=PROMPT)
    assert not plain.speculation.by_source
    done = stack.client.generate(params=replace(GREEDY, draft="layers"), prompt_token_ids=PROMPT)
    assert done.token_ids == plain.token_ids
    [counts] = done.speculation.by_source
    assert counts.source == "layers"
    open_rule = SamplingParams(max_tokens=4, draft="layers")
    assert stack.client.generate(params=open_rule, prompt_token_ids=PROMPT).rule is Rule.GUMBEL


@pytest.mark.parametrize("draft", ["heads", "medusa", "ngram,layers"])
def test_what_it_does_not_offer(stack: LocalStack, draft: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"draft={draft}: is not offered here: .*layers"):
        stack.client.generate(params=replace(GREEDY, draft=draft), prompt_token_ids=PROMPT)


def test_no_trees(stack: LocalStack) -> None:
    params = replace(GREEDY, draft="layers", num_draft_tokens=16, max_depth=4)
    with pytest.raises(SpecwireError, match="draft=layers makes chains only"):
        stack.client.generate(params=params, prompt_token_ids=PROMPT)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.6])
def test_a_lost_target_changes_no_text(stack: LocalStack, temperature: float) -> None:
    """The connection is cut again and again while the text is read; each time a new sequence is opened."""
    params = replace(GREEDY, temperature=temperature, max_tokens=120, num_draft_tokens=3)
    plain = stack.client.generate(params=params, prompt_token_ids=PROMPT)
    assert not plain.speculation.by_source
    assert stack.verify_proxy is not None
    with stack.client.stream(None, replace(params, draft="layers"), prompt_token_ids=PROMPT) as running:
        for number, _ in enumerate(running):
            if number in (5, 15):
                stack.verify_proxy.cut()
        assert running.completion.token_ids == plain.token_ids
    stack.assert_idle_within(5.0)


def test_a_full_cache_changes_no_text(target: Path) -> None:
    """Streams evict one another and drafts find no room: fewer proposals, the same texts, whole books."""
    params = replace(GREEDY, max_tokens=60, num_draft_tokens=4, draft="layers")
    options = {"layers": "a0", "num_kv_tokens": 192}
    with started_services() as services, local_stack(target, verify_options=options) as running:
        texts = asyncio.run(_four(running.address, params))
        assert texts == asyncio.run(_four(running.address, replace(params, draft=None)))
        running.assert_idle_within(5.0)
        services["verify"].runner.pool.check_integrity()


async def _four(address: str, params: SamplingParams) -> list[Sequence[int]]:
    async with AsyncClient(address) as client:
        found = await asyncio.gather(
            *(client.generate(params=params, prompt_token_ids=[*PROMPT, i]) for i in range(4))
        )
    return [done.token_ids for done in found]


def test_the_command_drafts(stack: LocalStack) -> None:
    stack.client.generate(params=replace(GREEDY, draft="layers"), prompt_token_ids=PROMPT)
    shown = drafts.show(ClientConfig(server=stack.address), colour=False).splitlines()
    rows = {line.split()[0]: line.split() for line in shown if line}
    assert (rows["layers"][1], rows["heads"][1]) == ("yes", "no")


# --- refusals -----------------------------------------------------------------------------------------


def start(target: Path, layers: Path | str, **coordinator: Any) -> None:
    with local_stack(target, coordinator_options=coordinator, verify_options={"layers": str(layers)}):
        pass


def found(target: Path, skip: str = "a0,m1") -> Found:
    return Found(
        target=target.name,
        target_fingerprint=weights_fingerprint(target),
        skip=skip,
        num_draft_tokens=4,
        tokens_a_pass=2.0,
        cost=0.5,
        speedup=1.0,
        num_tried=1,
    )


def test_a_file_names_its_target(target: Path, tmp_path: Path) -> None:
    """`auto` reads the one beside the model; another target's is refused, and so is what is none."""
    own = save_target(tmp_path / "own", seed=2)
    with pytest.raises(ModelLoadError, match=r"--layers auto: .*layers.json: No such file"):
        start(own, "auto")
    files.save(own / files.BESIDE, found(own))
    start(own, "auto")
    start(own, own / files.BESIDE)
    with pytest.raises(ModelLoadError, match=r"blocks of 'own' \(\w+\), not of 'target\d*' \(\w+\)"):
        start(target, own / files.BESIDE)
    with pytest.raises(ModelLoadError, match="names no blocks"):
        start(own, own / "config.json")


def test_blocks_that_the_target_does_not_have(target: Path, tmp_path: Path) -> None:
    problem = "--layers a0,a2: the model has no blocks a2: its layers are 0 to 1"
    with pytest.raises(ModelLoadError, match=problem):
        start(target, "a0,a2")
    with pytest.raises(ModelLoadError, match="OPTDecoderLayer is not made of one attention and one MLP"):
        start(save_target(tmp_path / "opt", "opt"), "a0")


def test_an_encoder_decoder(tmp_path: Path) -> None:
    encoder_decoder = encoder_decoders.save(tmp_path / "t5", "t5")
    with pytest.raises(ModelLoadError, match="is an encoder-decoder, which is not served with --layers"):
        start(encoder_decoder, "a0")


def test_a_target_without(target: Path) -> None:
    with (
        pytest.raises(ConfigError, match="the verify service has no layers: see its flag --layers"),
        local_stack(target, coordinator_options={"speculative_config": LAYERS}),
    ):
        pass


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: VerifyConfig(layers="a0", model="emulated:step_ms=1"), "has no layers"),
        (lambda: VerifyConfig(layers="a0", tensor_parallel_size=2), "--tensor-parallel-size 1 only"),
        (lambda: VerifyConfig(layers="a0", heads="/tmp"), "does not go together with --heads"),
        (lambda: VerifyConfig(layers="b0"), "'b0' is no block"),
        (lambda: DraftConfig(model="layers:a0"), "see the verify service's flag --layers"),
        (lambda: CoordinatorConfig(speculative_config='{"method": "layers", "model": "a"}'), "flag --layers"),
        (lambda: UpConfig(draft="layers"), "needs more: layers:SKIP"),
        (lambda: UpConfig(draft="layers:"), "names no blocks"),
        (lambda: UpConfig(draft="layers:x"), "'x' is no block"),
        (lambda: UpConfig(speculative_config=LAYERS), "names no blocks"),
        (lambda: UpConfig(draft="layers:a0", speculative_config='{"method": "ngram"}'), "another method"),
        (lambda: UpConfig(draft="layers:a0", speculative_config='{"method": "heads"}'), "another method"),
        (lambda: UpConfig(draft="layers:a0", target="emulated:step_ms=1"), "has no layers"),
        (lambda: UpConfig(speculative_config='{"method": "layers", "max_depth": 2}'), "drafts chains"),
    ],
)
def test_what_does_not_combine(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()


def test_what_is_passed_on() -> None:
    """The blocks to verify, the rest to the coordinator; there is no draft service."""
    given = {"method": "layers", "model": "a3,m3", "num_speculative_tokens": 6}
    for config in (
        UpConfig(speculative_config=json.dumps(given)),
        UpConfig(draft="layers:a3,m3", speculative_config=json.dumps(given | {"model": ""})),
        UpConfig(draft="layers:a3,m3"),
    ):
        assert (config.draft_model, config.own) == ("none", ("layers", "a3,m3"))
        coordinator = CoordinatorConfig(speculative_config=config.coordinator_speculation)
        assert coordinator.own_source == "layers"
        assert coordinator.fixed_draft_tokens == (6 if config.speculative_config else None)


# --- the search ---------------------------------------------------------------------------------------


def test_the_closed_form() -> None:
    """By hand: three tokens for a pass of two tokens, and two draft passes of half a pass each."""
    costs = Costs([10.0, 11.0, 12.0], attention=2.0, mlp=3.0)
    skipped = parse_skip("layers", "a0,m0")
    made = promise(skipped, [1.0, 1.0], costs)
    assert made == Promise(skipped, 2, 3.0, 0.5, 30 / 22)
    assert promise(skipped, [0.5, 0.0], costs).num_draft_tokens == 1


def test_drafts_are_judged_against_the_targets_own_text() -> None:
    """With nothing left out every draft token is right, with everything few are. The cache is free then."""
    prompts = [[5, 9, 11, 2], [7, 4, 8, 1, 3]]
    model = build("llama")
    runner = ModelRunner(model, num_pages=num_pages(2, 5, 4, 4), page_size=4)
    blocks = ModelBlocks(model)
    trials = Trials(runner, prompts, 4)
    assert trials.reached(blocks.without(())) == [1.0] * 4
    reached = trials.reached(blocks.without(blocks.all()))
    assert reached == sorted(reached, reverse=True)
    assert reached[0] < 0.5
    trials.close()
    runner.pool.check_integrity()
    assert runner.pool.num_held_pages == 0


class Landscape:
    """Predicted speed-ups of sets of blocks: each saves as much, some hurt much, and two are worth more
    together."""

    def __init__(self, seed: int, num_layers: int = 6) -> None:
        rng = random.Random(seed)
        self.blocks = tuple(Block(layer, kind) for layer in range(num_layers) for kind in "am")
        self._saves = 1 / len(self.blocks)
        self._harm = {block: 12 * self._saves * rng.choice([0.01, 0.02, 0.05, 0.3]) for block in self.blocks}
        self._pair = set(rng.sample(self.blocks, 2))
        self.num_asked = 0

    def __call__(self, skipped: tuple[Block, ...]) -> Promise:
        self.num_asked += 1
        return self.of(skipped)

    def of(self, skipped: tuple[Block, ...]) -> Promise:
        alpha = max(0.0, 1 - sum(self._harm[block] for block in skipped)) + 0.05 * (self._pair <= {*skipped})
        reached = [min(1.0, alpha) ** depth for depth in range(1, 9)]
        return promise(skipped, reached, Costs([1.0] * 9, self._saves, self._saves))

    def harmless(self) -> Promise:
        """Near the best of all: as many of the least harmful blocks as pay."""
        by_harm = sorted(self.blocks, key=self._harm.__getitem__)
        tried = [self.of(tuple(sorted(by_harm[:num]))) for num in range(1, len(by_harm))]
        return max(tried, key=lambda each: each.speedup)


def test_the_search_finds_what_a_grid_finds() -> None:
    """After 60 of 4,095 sets, one within 2 % of the best of them; none is tried twice."""
    pytest.importorskip("bayes_opt")
    landscape = Landscape(0)
    grid = [
        landscape.of(skipped) for size in range(1, 13) for skipped in combinations(landscape.blocks, size)
    ]
    best = max(each.speedup for each in grid)
    tried = search.search(landscape.blocks, landscape, 60)
    assert len(tried) == landscape.num_asked == len({each.blocks for each in tried}) == 60
    assert max(each.speedup for each in tried) > 0.98 * best


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a text to a file that `layers:auto` reads, and a picture."""
    pytest.importorskip("bayes_opt")
    target, text = "embedded", tmp_path / "text"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(60)))
    out, picture = tmp_path / "found.json", tmp_path / "search.png"
    config = SearchLayersConfig(
        target=target, text=str(text), out=str(out), picture=str(picture), trials=4, prompts=1, num_threads=1
    )
    assert search_layers.run(config) == 0
    assert "4 sets tried" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert files.read(out).num_tried == 4


def test_texts_that_are_no_good(tmp_path: Path) -> None:
    pytest.importorskip("bayes_opt")
    text = tmp_path / "text"
    text.write_text("few")
    with pytest.raises(ConfigError, match="too short"):
        search.run(SearchLayersConfig(text=str(text)), _quiet)
    with pytest.raises(ConfigError, match="--text"):
        SearchLayersConfig()


def _quiet(title: str, total: int) -> Any:
    return contextlib.nullcontext(lambda num: None)
