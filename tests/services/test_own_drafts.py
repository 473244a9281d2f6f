"""What all drafts of the target's own process have in common, through real services.

Heads, layers left out, layers for multi-token prediction, a block drafter, EAGLE-3, a draft model beside the
target: requests, losses, memory, refusals, `specwire drafts`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

import verify_service.paged
from specwire import InvalidRequestError, Rule, SamplingParams
from specwire.cli import drafts
from specwire.config.client import ClientConfig
from specwire.config.link import Link
from specwire.config.preflight import memory, plan
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.speculative import METHODS
from specwire.config.stack import UpConfig
from specwire.engine import models
from specwire.errors import ConfigError, ModelLoadError, UnsupportedError
from specwire.rule.captured import EagerReplay
from tests.support import encoder_decoders
from tests.support.blocks import save_published
from tests.support.eagle3 import LAYOUTS, save_eagle3
from tests.support.harness import LocalStack, local_stack, started_services
from tests.support.integrity import check_integrity
from tests.support.own_drafts import save_drafting
from tests.support.pairs import save_target
from tests.support.together import generated, of_prompts
from verify_service.grown import GrownDrafts
from verify_service.threshold import Threshold

SOURCES = ("eagle3", "heads", "layers", "dflash", "draft_model", "mtp")
ONLY_CHAINS = ("layers", "mtp")
ON_REQUEST = ("heads", "layers", "mtp", "dflash", "eagle3")
"""Sources that do not draft by default."""
PROMPT = [5, 9, 11, 2, 7, 4]
GREEDY = SamplingParams(max_tokens=32, temperature=0, rule=Rule.GUMBEL, seed=3, ignore_eos=True)


class Served(NamedTuple):
    """A target, and what it drafts with."""

    source: str
    target: Path
    options: dict[str, Any]


@pytest.fixture(scope="module", params=SOURCES)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Where layers are left out, proposals are as long as wanted."""
    with mock.patch.object(verify_service.paged, "Threshold", partial(Threshold, first=0.0)):
        yield Served(request.param, *save_drafting(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def stack(served: Served) -> Iterator[LocalStack]:
    """With a link between coordinator and verify."""
    with local_stack(served.target, verify_options=served.options, verify_link=Link()) as running:
        yield running


@pytest.mark.sample(3)
def test_a_request_may_ask_for_them(served: Served, stack: LocalStack) -> None:
    source = served.source
    plain = stack.client.generate(params=replace(GREEDY, draft="off"), prompt_token_ids=PROMPT)
    by_default = stack.client.generate(params=GREEDY, prompt_token_ids=PROMPT)
    assert bool(by_default.speculation.by_source) is (source not in ON_REQUEST)
    for name in (source, "medusa") if source == "heads" else (source,):
        done = stack.client.generate(params=replace(GREEDY, draft=name), prompt_token_ids=PROMPT)
        assert done.token_ids == plain.token_ids
        assert [each.source for each in done.speculation.by_source] == [source]
    # Under rejection sampling the target could not share noise with its draft, and would have no trees.
    free = SamplingParams(max_tokens=4, draft=source)
    assert stack.client.generate(params=free, prompt_token_ids=PROMPT).rule is Rule.GUMBEL
    for other in ("layers" if source == "heads" else "medusa", f"ngram,{source}"):
        with pytest.raises(InvalidRequestError, match=f"draft={other}: is not offered here: .*{source}"):
            stack.client.generate(params=replace(GREEDY, draft=other), prompt_token_ids=PROMPT)


@pytest.mark.sample(3)
def test_trees(served: Served, stack: LocalStack) -> None:
    """Of those that have them; the others draft chains."""
    params = replace(GREEDY, draft=served.source, num_draft_tokens=12, max_depth=3)
    if served.source in ONLY_CHAINS:
        with pytest.raises(UnsupportedError, match=f"max_depth=3: draft={served.source} makes chains only"):
            stack.client.generate(params=params, prompt_token_ids=PROMPT)
        return
    done = stack.client.generate(params=params, prompt_token_ids=PROMPT)
    assert done.speculation.num_draft_tokens > 10 * done.speculation.num_rounds


@pytest.mark.sample(3)
def test_passes_that_are_recorded_keep_what_drafts_read(served: Served, stack: LocalStack) -> None:
    """As on a GPU: after the same tokens there are the same draft tokens as where passes run as they are."""
    if served.source not in {"dflash", "eagle3"}:
        pytest.skip("nothing is kept, or passes are not padded")
    chain = replace(GREEDY, draft=served.source, num_draft_tokens=4)
    shapes = chain, replace(chain, temperature=0.6), replace(chain, num_draft_tokens=12, max_depth=3)
    drafted: dict[Any, dict[Any, Any]] = defaultdict(dict)
    proposal = GrownDrafts._proposal

    def noted(drafts: GrownDrafts, sequence: Any) -> Any:
        found = proposal(drafts, sequence)
        if found is not None:
            grown = drafts._grown[sequence]
            if grown.num_ranked == 1:  # trees grow as others were right
                key = sequence.params.temperature, grown.growth.max_depth, *grown.committed
                drafted[drafts._runner][key] = found.token_ids
        return found

    replay = mock.Mock(wraps=EagerReplay())
    with (
        mock.patch.object(GrownDrafts, "_proposal", noted),
        mock.patch.object(models, "make_replay", return_value=replay),
        started_services() as services,
        local_stack(served.target, verify_options=served.options) as recorded,
    ):
        theirs, ours = (generated(each.address, shapes, PROMPT) for each in (stack, recorded))
        assert [each.token_ids for each in ours] == [each.token_ids for each in theirs]
        padded = services["verify"].runner._padded  # type: ignore[attr-defined]
        assert replay.capture.call_count > len(padded.buckets.single_stream())
        recorded.assert_idle_within(5.0)
        check_integrity(services["verify"].runner.pool)
    one, other = drafted.values()
    assert len(one.keys() & other.keys()) > 20
    assert all(one[key] == other[key] for key in one.keys() & other.keys())


@pytest.mark.sample(3)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.6])
def test_a_lost_target_changes_no_text(served: Served, stack: LocalStack, temperature: float) -> None:
    """The connection is cut again and again while the text is read; each time a new sequence is opened."""
    params = replace(GREEDY, temperature=temperature, max_tokens=50, num_draft_tokens=3)
    off = replace(params, draft="off", num_draft_tokens=None)
    plain = stack.client.generate(params=off, prompt_token_ids=PROMPT)
    assert stack.verify_proxy is not None
    with stack.client.stream(None, replace(params, draft=served.source), prompt_token_ids=PROMPT) as running:
        for number, _ in enumerate(running):
            if number in (3, 8):
                stack.verify_proxy.cut()
        assert running.completion.token_ids == plain.token_ids
    stack.assert_idle_within(5.0)


@pytest.mark.sample(3)
def test_a_client_that_stops_reading(served: Served, stack: LocalStack) -> None:
    """Nothing is held for it any more, though its rounds were begun by the target."""
    params = replace(GREEDY, max_tokens=400, draft=served.source, num_draft_tokens=3)
    with stack.client.stream(None, params, prompt_token_ids=PROMPT) as running:
        next(iter(running))
    stack.assert_idle_within(5.0)


@pytest.mark.sample(3)
def test_a_cache_that_is_too_small(served: Served) -> None:
    """Sequences lose their pages to one another, and drafts find no room: the text stays."""
    options = served.options | {"num_kv_tokens": 64}
    params = replace(GREEDY, max_tokens=40, draft=served.source, num_draft_tokens=4)
    with started_services() as services, local_stack(served.target, verify_options=options) as running:
        plain = generated(running.address, [replace(params, draft="off", num_draft_tokens=None)], PROMPT)
        together = generated(running.address, [params] * 3, PROMPT)
        assert {done.token_ids for done in together} == {plain[0].token_ids}
        running.assert_idle_within(5.0)
        check_integrity(services["verify"].runner.pool)


@pytest.mark.sample(3)
def test_the_command_drafts(served: Served, stack: LocalStack) -> None:
    params = replace(GREEDY, draft=served.source, num_draft_tokens=2)
    stack.client.generate(params=params, prompt_token_ids=PROMPT)
    shown, *ways = drafts.show(ClientConfig(server=stack.address), colour=False).split("\n\n")
    rows = {line.split()[0]: line for line in shown.splitlines()}
    if served.source not in ON_REQUEST:
        assert re.search(r"^plain +(now )? +\d+ +-$", ways[0], re.MULTILINE), "it is chosen among them"
    own = ["heads", "layers", "mtp", "dflash", "eagle3"]
    assert list(rows) == ["draft", "model", "kseq", "INNER>model", "num_beams", *own, *METHODS]
    ours = "model" if served.source == "draft_model" else served.source
    assert [name for name in ("model", *own) if rows[name].split()[1] == "yes"] == [ours]
    by_source = stack.client.get_status().by_source
    [num_rounds] = [each.num_drafts for each in by_source if each.source == served.source]
    assert f" {num_rounds} " in rows[ours]


# --- refusals at the start ----------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["heads", "mtp"])
def test_a_target_without_them(source: str, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    method = json.dumps({"method": "medusa" if source == "heads" else source})
    with (
        pytest.raises(ConfigError, match=f"the verify service has no {source}: see its flag --{source}"),
        local_stack(target, coordinator_options={"speculative_config": method}),
    ):
        pass


@pytest.mark.parametrize(
    ("source", "value"), [("heads", "heads"), ("draft_model", "embedded"), ("lora_modules", "mine=DIRECTORY")]
)
def test_an_encoder_decoder(source: str, value: str, tmp_path: Path) -> None:
    t5 = encoder_decoders.save(tmp_path / "t5", "t5")
    value = value.replace("DIRECTORY", str(tmp_path))
    flag = source.replace("_", "-")
    with (
        pytest.raises(ModelLoadError, match=f"is an encoder-decoder, which is not served with --{flag}"),
        local_stack(t5, verify_options={source: value}),
    ):
        pass


HEADS, LAYERS, NGRAM = (f'{{"method": "{name}"}}' for name in ("medusa", "layers", "ngram"))
EMULATED = "emulated:step_ms=1"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: VerifyConfig(model=EMULATED, heads="x"), "has no hidden states"),
        (lambda: VerifyConfig(model=EMULATED, layers="a0"), "has no layers"),
        (lambda: VerifyConfig(model=EMULATED, draft_model="embedded"), "device that a draft"),
        (lambda: VerifyConfig(draft_model="embedded", tensor_parallel_size=2), "size 1 only"),
        (lambda: VerifyConfig(eagle3="x", batch_invariant=True), "together with --batch-invariant"),
        (lambda: VerifyConfig(layers="a0", heads="/tmp"), "does not go together with --heads"),
        (lambda: VerifyConfig(mtp=True, batch_invariant=True), "does not go together with --batch-invariant"),
        (lambda: VerifyConfig(layers="b0"), "'b0' is no block"),
        (lambda: VerifyConfig(draft_model="/nowhere"), "--draft-model /nowhere: no such model directory"),
        (lambda: VerifyConfig(draft_model=EMULATED), "give it a service of its own"),
        (lambda: DraftConfig(model="heads:x"), "see the verify service's flag --heads"),
        (lambda: DraftConfig(model="mtp"), "see the verify service's flag --mtp"),
        (lambda: CoordinatorConfig(speculative_config='{"method": "medusa", "model": "x"}'), "--heads"),
        (lambda: UpConfig(draft="heads"), "needs more: heads:DIR"),
        (lambda: UpConfig(draft="heads:/nowhere"), "no directory of heads"),
        (lambda: UpConfig(draft="layers:"), "needs more: layers:SKIP"),
        (lambda: UpConfig(speculative_config=HEADS), "no directory of heads"),
        (lambda: UpConfig(speculative_config='{"method": "mtp", "model": "x"}'), "method mtp needs none"),
        (lambda: UpConfig(speculative_config='{"method": "mtp", "corpus": "x"}'), "is not a key of method"),
        (lambda: UpConfig(speculative_config='{"method": "layers", "max_depth": 2}'), "drafts chains"),
        (lambda: UpConfig(draft="heads:/tmp", speculative_config=NGRAM), "another method"),
        (lambda: UpConfig(draft="heads:/tmp", speculative_config=LAYERS), "another method"),
        (lambda: UpConfig(draft="/tmp", speculative_config=HEADS), "second draft"),
        (lambda: UpConfig(draft="ngram,mtp"), "mtp is no draft model"),
        (lambda: UpConfig(draft="ngram>mtp"), "mtp is no draft model"),
        (lambda: UpConfig(draft="mtp", draft_placement="target"), "--draft mtp: is no draft model"),
        (lambda: UpConfig(draft_placement="target", draft_learn=True), "--draft-learn True: learns"),
        (lambda: UpConfig(draft_placement="target", draft_device="cuda"), "--draft-device cuda: is not the"),
        (lambda: UpConfig(draft_placement="elsewhere"), "is not one of auto, target, service"),
    ],
)
def test_what_does_not_combine(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()


@pytest.mark.parametrize("source", ["heads", "dflash", "eagle3"])
def test_their_weights_are_counted_before_the_start(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is room for the target's alone; EAGLE-3's are in a file without a header here."""
    target, options = save_drafting(source, tmp_path)
    config = VerifyConfig(model=str(target), address="127.0.0.1:0", num_kv_tokens=16, **options)
    plan.check(config)
    room = (target / "model.safetensors").stat().st_size
    monkeypatch.setattr(memory, "free_host_bytes", lambda: room)
    with pytest.raises(ConfigError, match="its weights take"):
        plan.check(config)
    without: Any = {source: ""}
    with pytest.raises(ConfigError, match="the KV cache takes"):
        plan.check(replace(config, **without))


def test_a_token_that_the_draft_lacks_costs_its_stream_alone(tmp_path: Path) -> None:
    """A target's embedding is often wider than its draft's; the others of the batch are drafted for."""
    target = save_target(tmp_path / "target", vocab_size=64)
    draft = save_target(tmp_path / "draft", vocab_size=60)
    with local_stack(target, verify_options={"draft_model": str(draft)}) as stack:
        params = replace(GREEDY, num_draft_tokens=4, max_tokens=200)
        alone = stack.client.generate(params=params, prompt_token_ids=PROMPT)
        usual, lacking = of_prompts(stack.address, params, [PROMPT, [5, 62, 7]])
        assert alone.speculation.num_draft_tokens == usual.speculation.num_draft_tokens > 0
        assert lacking.speculation.num_draft_tokens == 0


def test_where_a_draft_model_runs(tmp_path: Path) -> None:
    """In the target's process, unless it is asked for what only a service has."""
    (tmp_path / "config.json").write_text('{"is_encoder_decoder": true}')
    assert UpConfig().own == ("draft_model", "embedded")
    assert UpConfig(device="cuda", draft_device="cuda:0").draft_in_target
    for asked in (
        {"draft_placement": "service"},
        {"draft_rtt_ms": 5.0},
        {"num_outcomes": "4"},
        {"draft_num_threads": 2},
        {"draft": "ngram,embedded"},
        {"device": "cuda"},
        {"target": str(tmp_path), "draft": str(tmp_path)},
        {"speculative_config": json.dumps({"method": "draft_model", "selection": "kseq"})},
        {"target": EMULATED, "draft": EMULATED},
    ):
        config = UpConfig(**asked)
        assert (config.own.source, config.draft_in_target) == ("", False), asked


@pytest.mark.parametrize(
    ("source", "method", "value"),
    [
        ("heads", "medusa", "DIRECTORY"),
        ("dflash", "dflash", "DIRECTORY"),
        ("eagle3", "eagle3", "DIRECTORY"),
        ("layers", "layers", "a3,m3"),
        ("mtp", "mtp", ""),
    ],
)
def test_what_is_passed_on(source: str, method: str, value: str, tmp_path: Path) -> None:
    """The flag to verify, the rest to the coordinator; there is no draft service."""
    value = value.replace("DIRECTORY", str(tmp_path))
    named = f"{source}:{value}" if value else source
    given: dict[str, Any] = {"method": method, "num_speculative_tokens": 6}
    if source not in ONLY_CHAINS:
        given["max_depth"] = 4
    in_full = json.dumps(given | {"model": value} if value else given)
    for config in (
        UpConfig(draft=named),
        UpConfig(draft=named, speculative_config=json.dumps(given)),
        UpConfig(speculative_config=in_full),
        UpConfig(draft="none", speculative_config=in_full),
    ):
        assert (config.named.model, config.own) == ("none", (source, value))
        coordinator = CoordinatorConfig(speculative_config=config.coordinator_speculation)
        assert coordinator.own_draft is not None
        assert coordinator.own_draft.source == source
        if config.speculative_config:
            assert coordinator.fixed_draft_tokens == 6
            assert coordinator.fixed_max_depth == given.get("max_depth")


@pytest.mark.parametrize(
    ("source", "layout"),
    [*product(["eagle3"], LAYOUTS), ("dflash", "z-lab"), ("dflash", "speculators")],
)
def test_published_drafters_are_recognised(source: str, layout: str, tmp_path: Path) -> None:
    """By their config; they are no draft model anywhere."""
    save_drafter = save_published if source == "dflash" else save_eagle3
    saved = str(save_drafter(tmp_path / "drafter", layout))
    config = UpConfig(draft=saved)
    assert (config.named.model, config.own) == ("none", (source, saved))
    own = CoordinatorConfig(speculative_config=config.coordinator_speculation).own_draft
    assert own is not None
    assert own.source == source
    for make in (partial(UpConfig, draft=f"ngram,{saved}"), partial(UpConfig, draft=f"ngram>{saved}")):
        with pytest.raises(ConfigError, match=f"{saved} is no draft model"):
            make()
    with pytest.raises(ConfigError, match=f"is no model: see the verify service's flag --{source}"):
        DraftConfig(model=saved)
    with pytest.raises(ConfigError, match=f"is no draft model: see the verify service's flag --{source}"):
        VerifyConfig(draft_model=saved)
