"""Layers for multi-token prediction and block drafters, whose keys lie in the target's pages; and a draft
model in the target's process, which has pages of its own.

Through real services: losses, memory, refusals, `specwire drafts`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specwire import InvalidRequestError, Rule, SamplingParams
from specwire.cli import drafts
from specwire.config.client import ClientConfig
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.stack import UpConfig
from specwire.errors import ConfigError, ModelLoadError, UnsupportedError
from tests.support import encoder_decoders
from tests.support.blocks import save_block_drafter
from tests.support.harness import LocalStack, local_stack
from tests.support.mtp import save_mtp_target
from tests.support.pairs import save_good_draft, save_target
from tools.proxy.delay_proxy import Link

MTP = '{"method": "mtp"}'
PROMPT = [5, 9, 11, 2, 7, 4]
GREEDY = SamplingParams(max_tokens=32, temperature=0, rule=Rule.GUMBEL, seed=3, ignore_eos=True)


class Served(NamedTuple):
    """A target, and what it drafts with."""

    source: str
    target: Path
    options: dict[str, Any]


@pytest.fixture(scope="module", params=["mtp", "dflash", "draft_model"])
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "mtp":
        return Served("mtp", save_mtp_target(directory / "target"), {"mtp": True})
    if request.param == "draft_model":
        draft = save_good_draft(directory / "draft")
        return Served("draft_model", save_target(directory / "target"), {"draft_model": str(draft)})
    drafter = save_block_drafter(directory / "drafter")
    return Served("dflash", save_target(directory / "target"), {"dflash": str(drafter)})


@pytest.fixture(scope="module")
def stack(served: Served) -> Iterator[LocalStack]:
    """With a link between coordinator and verify; only a draft model drafts by default."""
    with local_stack(served.target, verify_options=served.options, verify_link=Link()) as running:
        yield running


def test_a_request_may_ask_for_them(served: Served, stack: LocalStack) -> None:
    source = served.source
    plain = stack.client.generate(params=replace(GREEDY, draft="off"), prompt_token_ids=PROMPT)
    by_default = stack.client.generate(params=GREEDY, prompt_token_ids=PROMPT)
    assert bool(by_default.speculation.by_source) is (source == "draft_model")
    done = stack.client.generate(params=replace(GREEDY, draft=source), prompt_token_ids=PROMPT)
    assert done.token_ids == plain.token_ids
    assert [each.source for each in done.speculation.by_source] == [source]
    for other in ("heads", f"ngram,{source}"):
        with pytest.raises(InvalidRequestError, match=f"draft={other}: is not offered here: .*{source}"):
            stack.client.generate(params=replace(GREEDY, draft=other), prompt_token_ids=PROMPT)


def test_trees(served: Served, stack: LocalStack) -> None:
    """Of a block drafter alone: layers for multi-token prediction draft chains."""
    params = replace(GREEDY, draft=served.source, num_draft_tokens=12, max_depth=3)
    if served.source == "mtp":
        with pytest.raises(UnsupportedError, match="max_depth=3: draft=mtp makes chains only"):
            stack.client.generate(params=params, prompt_token_ids=PROMPT)
        return
    done = stack.client.generate(params=params, prompt_token_ids=PROMPT)
    assert done.speculation.num_draft_tokens > 10 * done.speculation.num_rounds


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.6])
def test_a_lost_target_changes_no_text(served: Served, stack: LocalStack, temperature: float) -> None:
    """The connection is cut again and again while the text is read; each time a new sequence is opened."""
    params = replace(GREEDY, temperature=temperature, max_tokens=60, num_draft_tokens=3)
    off = replace(params, draft="off", num_draft_tokens=None)
    plain = stack.client.generate(params=off, prompt_token_ids=PROMPT)
    assert stack.verify_proxy is not None
    with stack.client.stream(None, replace(params, draft=served.source), prompt_token_ids=PROMPT) as running:
        for number, _ in enumerate(running):
            if number in (3, 8):
                stack.verify_proxy.cut()
        assert running.completion.token_ids == plain.token_ids
    stack.assert_idle_within(5.0)


def test_a_cache_that_is_too_small(served: Served) -> None:
    """Sequences lose their pages to one another, and drafts find no room: the text stays."""
    options = served.options | {"num_kv_tokens": 96}
    params = replace(GREEDY, max_tokens=60, draft=served.source, num_draft_tokens=4)
    with local_stack(served.target, verify_options=options) as running:
        client = running.client
        plain = client.generate(params=replace(GREEDY, max_tokens=60, draft="off"), prompt_token_ids=PROMPT)
        with contextlib.ExitStack() as opened:
            streams = [client.stream(None, params, prompt_token_ids=PROMPT) for _ in range(3)]
            for each in [opened.enter_context(stream) for stream in streams]:
                for _ in each:
                    pass
                assert each.completion.token_ids == plain.token_ids
        running.assert_idle_within(5.0)


def test_the_command_drafts(served: Served, stack: LocalStack) -> None:
    params = replace(GREEDY, draft=served.source, num_draft_tokens=2)
    stack.client.generate(params=params, prompt_token_ids=PROMPT)
    shown = drafts.show(ClientConfig(server=stack.address), colour=False).splitlines()
    rows = {line.split()[0]: line for line in shown if line}
    assert rows["heads"].split()[1] == "no"
    row = rows["model" if served.source == "draft_model" else served.source]
    assert row.split()[1] == "yes"
    by_source = stack.client.get_status().by_source
    [num_rounds] = [each.num_drafts for each in by_source if each.source == served.source]
    assert f" {num_rounds} " in row


# --- refusals -----------------------------------------------------------------------------------------


def test_targets_without_them(tmp_path: Path) -> None:
    target, plain = save_mtp_target(tmp_path / "target"), save_target(tmp_path / "plain")
    for drafter, problem in (
        (save_block_drafter(tmp_path / "wide", hidden_size=16), "is for states of 16, and the target has 32"),
        (plain, "'llama' is no block drafter"),
    ):
        with (
            pytest.raises(ModelLoadError, match=problem),
            local_stack(plain, verify_options={"dflash": str(drafter)}),
        ):
            pass
    with (
        pytest.raises(ModelLoadError, match="'llama' has no layers for multi-token prediction"),
        local_stack(plain, verify_options={"mtp": True}),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="the verify service has no mtp: see its flag --mtp"),
        local_stack(target, coordinator_options={"speculative_config": MTP}),
    ):
        pass
    with (
        local_stack(target) as running,
        pytest.raises(InvalidRequestError, match="draft=mtp: is not offered here"),
    ):
        running.client.generate(params=replace(GREEDY, draft="mtp"), prompt_token_ids=PROMPT)


@pytest.mark.parametrize(
    ("source", "value"), [("mtp", True), ("dflash", "drafter"), ("draft_model", "embedded")]
)
def test_an_encoder_decoder(source: str, value: object, tmp_path: Path) -> None:
    t5 = encoder_decoders.save(tmp_path / "t5", "t5")
    flag = source.replace("_", "-")
    with (
        pytest.raises(ModelLoadError, match=f"is an encoder-decoder, which is not served with --{flag}"),
        local_stack(t5, verify_options={source: value}),
    ):
        pass


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: VerifyConfig(model="emulated:step_ms=1", mtp=True), "has no hidden states"),
        (lambda: VerifyConfig(mtp=True, tensor_parallel_size=2), "--tensor-parallel-size 1 only"),
        (lambda: VerifyConfig(mtp=True, heads="x"), "does not go together with --heads"),
        (lambda: VerifyConfig(mtp=True, batch_invariant=True), "does not go together with --batch-invariant"),
        (
            lambda: VerifyConfig(dflash="x", batch_invariant=True),
            "does not go together with --batch-invariant",
        ),
        (lambda: VerifyConfig(dflash="x", mtp=True), "does not go together with --mtp"),
        (lambda: VerifyConfig(draft_model="embedded", tensor_parallel_size=2), "size 1 only"),
        (lambda: VerifyConfig(draft_model="embedded", mtp=True), "does not go together with --"),
        (lambda: VerifyConfig(draft_model="/nowhere"), "--draft-model /nowhere: no such model directory"),
        (lambda: VerifyConfig(draft_model="emulated:step_ms=1"), "give it a service of its own"),
        (lambda: VerifyConfig(model="emulated:step_ms=1", draft_model="embedded"), "device that a draft"),
        (lambda: UpConfig(draft="mtp", draft_placement="target"), "--draft mtp: is no draft model"),
        (lambda: UpConfig(draft_placement="target", draft_learn=True), "--draft-learn True: learns"),
        (lambda: UpConfig(draft_placement="target", draft_device="cuda"), "--draft-device cuda: is not the"),
        (lambda: UpConfig(draft_placement="elsewhere"), "is not one of auto, target, service"),
        (lambda: UpConfig(draft="dflash"), "needs more: dflash:DIR"),
        (lambda: UpConfig(draft="dflash:/nowhere"), "no directory of dflash"),
        (lambda: DraftConfig(model="dflash:x"), "see the verify service's flag --dflash"),
        (lambda: DraftConfig(model="mtp"), "see the verify service's flag --mtp"),
        (lambda: UpConfig(draft="ngram,mtp"), "mtp is no draft model"),
        (lambda: UpConfig(draft="ngram>mtp"), "mtp is no draft model"),
        (lambda: UpConfig(draft="mtp", speculative_config='{"method": "ngram"}'), "another method"),
        (lambda: UpConfig(draft="/tmp", speculative_config=MTP), "second draft"),
        (lambda: UpConfig(draft="mtp", target="emulated:step_ms=1"), "has no hidden states"),
        (lambda: UpConfig(speculative_config='{"method": "mtp", "max_depth": 3}'), "drafts chains"),
        (lambda: UpConfig(speculative_config='{"method": "mtp", "model": "x"}'), "method mtp needs none"),
    ],
)
def test_what_does_not_combine(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()


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
        {"target": "emulated:step_ms=1", "draft": "emulated:step_ms=1"},
    ):
        config = UpConfig(**asked)
        assert (config.own.source, config.draft_in_target) == ("", False), asked


def test_what_is_passed_on(tmp_path: Path) -> None:
    """The flag to verify, the rest to the coordinator; there is no draft service."""
    block = UpConfig(draft=f"dflash:{tmp_path}")
    assert (block.draft_model, block.own) == ("none", ("dflash", str(tmp_path)))
    assert CoordinatorConfig(speculative_config=block.coordinator_speculation).own_source == "dflash"
    given = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    for config in (UpConfig(draft="mtp"), UpConfig(speculative_config=given)):
        assert (config.draft_model, config.own) == ("none", ("mtp", ""))
        coordinator = CoordinatorConfig(speculative_config=config.coordinator_speculation)
        assert coordinator.own_source == "mtp"
    assert coordinator.fixed_draft_tokens == 3
