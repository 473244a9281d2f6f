"""Layers for multi-token prediction through real services: losses, memory, refusals, `specwire drafts`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specwire import InvalidRequestError, Rule, SamplingParams
from specwire.cli import drafts
from specwire.config.client import ClientConfig
from specwire.config.services import CoordinatorConfig, DraftConfig, UpConfig, VerifyConfig
from specwire.errors import ConfigError, ModelLoadError
from specwire.testing.delay_proxy import Link
from tests.support import encoder_decoders
from tests.support.harness import LocalStack, local_stack
from tests.support.mtp import save_mtp_target
from tests.support.pairs import save_target

MTP = '{"method": "mtp"}'
PROMPT = [5, 9, 11, 2, 7, 4]
GREEDY = SamplingParams(max_tokens=32, temperature=0, rule=Rule.GUMBEL, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp_target(tmp_path_factory.mktemp("mtp") / "target")


@pytest.fixture(scope="module")
def stack(target: Path) -> Iterator[LocalStack]:
    """With a link between coordinator and verify; the layers are not the default."""
    with local_stack(target, verify_options={"mtp": True}, verify_link=Link()) as running:
        yield running


def test_a_request_may_ask_for_them(stack: LocalStack) -> None:
    plain = stack.client.generate(params=GREEDY, prompt_token_ids=PROMPT)
    assert not plain.speculation.by_source
    done = stack.client.generate(params=replace(GREEDY, draft="mtp"), prompt_token_ids=PROMPT)
    assert done.token_ids == plain.token_ids
    assert [each.source for each in done.speculation.by_source] == ["mtp"]
    for other in ("heads", "ngram,mtp"):
        with pytest.raises(InvalidRequestError, match=f"draft={other}: is not offered here: .*mtp"):
            stack.client.generate(params=replace(GREEDY, draft=other), prompt_token_ids=PROMPT)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_a_lost_target_changes_no_text(stack: LocalStack, temperature: float) -> None:
    """The connection is cut again and again while the text is read; each time a new sequence is opened."""
    params = replace(GREEDY, temperature=temperature, max_tokens=120, num_draft_tokens=3)
    plain = stack.client.generate(params=params, prompt_token_ids=PROMPT)
    assert stack.verify_proxy is not None
    with stack.client.stream(None, replace(params, draft="mtp"), prompt_token_ids=PROMPT) as running:
        for number, _ in enumerate(running):
            if number in (5, 15):
                stack.verify_proxy.cut()
        assert running.completion.token_ids == plain.token_ids
    stack.assert_idle_within(5.0)


def test_a_cache_that_is_too_small(target: Path) -> None:
    """Sequences lose their pages to one another, and drafts find no room: the text stays."""
    options = {"mtp": True, "num_kv_tokens": 96}
    params = replace(GREEDY, max_tokens=60, draft="mtp", num_draft_tokens=4)
    with local_stack(target, verify_options=options) as running:
        client = running.client
        plain = client.generate(params=replace(GREEDY, max_tokens=60, draft="off"), prompt_token_ids=PROMPT)
        with contextlib.ExitStack() as opened:
            streams = [client.stream(None, params, prompt_token_ids=PROMPT) for _ in range(3)]
            for each in [opened.enter_context(stream) for stream in streams]:
                for _ in each:
                    pass
                assert each.completion.token_ids == plain.token_ids
        running.assert_idle_within(5.0)


def test_the_command_drafts(stack: LocalStack) -> None:
    stack.client.generate(params=replace(GREEDY, draft="mtp", num_draft_tokens=2), prompt_token_ids=PROMPT)
    shown = drafts.show(ClientConfig(server=stack.address), colour=False).splitlines()
    rows = {line.split()[0]: line for line in shown}
    assert rows["heads"].split()[1] == "no"
    assert rows["mtp"].split()[1] == "yes"
    by_source = stack.client.get_status().by_source
    [num_rounds] = [each.num_drafts for each in by_source if each.source == "mtp"]
    assert f" {num_rounds} " in rows["mtp"]


# --- refusals -----------------------------------------------------------------------------------------


def test_targets_without_them(target: Path, tmp_path: Path) -> None:
    plain = save_target(tmp_path / "plain")
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


def test_an_encoder_decoder(tmp_path: Path) -> None:
    t5 = encoder_decoders.save(tmp_path / "t5", "t5")
    with (
        pytest.raises(ModelLoadError, match="is an encoder-decoder, which is not served with --mtp"),
        local_stack(t5, verify_options={"mtp": True}),
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


def test_what_is_passed_on() -> None:
    """The flag to verify, the rest to the coordinator; there is no draft service."""
    given = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    for config in (UpConfig(draft="mtp"), UpConfig(speculative_config=given)):
        assert (config.draft_model, config.own) == ("none", ("mtp", ""))
        coordinator = CoordinatorConfig(speculative_config=config.coordinator_speculation)
        assert coordinator.own_source == "mtp"
    assert coordinator.fixed_draft_tokens == 3
