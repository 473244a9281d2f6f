"""A target that drafts without some of its layers: the text of plain decoding, and the distribution it has.

Over real services, under every rule, with proposals that end early and with long ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import verify_service.layers
from specwire import Rule, SamplingParams
from tests.support.harness import LocalStack, float32_processes, local_stack
from tests.support.own_drafts import SLOW, check_control, check_distribution, check_text, kinds, num_passes
from tests.support.pairs import markov_logits, markov_model, save_target
from tests.support.tiny_models import save
from verify_service.threshold import Threshold

LAYERS = '{"method": "layers"}'
SHAPES: list[dict[str, int]] = [
    {},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 5},
    {"num_draft_tokens": 12},
]
NEAR, FAR = "m1", "a0,a1,m0,m1"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((NEAR, True), id="near, goes on"),
        pytest.param((FAR, False), id="far, waits"),
        SLOW((NEAR, False), id="near, waits"),
        SLOW((FAR, True), id="far, goes on"),
    ],
)
def stack(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Where it goes on by itself proposals are as long as wanted, else they end early."""
    skip, goes_on = request.param
    target = save_target(tmp_path_factory.mktemp("target"))
    options = {"speculative_config": LAYERS, "verify_ahead": goes_on, "num_draft_tokens": "auto"}
    threshold = partial(Threshold, first=0.0) if goes_on else Threshold
    with (
        mock.patch.object(verify_service.layers, "Threshold", threshold),
        local_stack(target, coordinator_options=options, verify_options={"layers": skip}) as running,
    ):
        yield running


@pytest.mark.sample(2)
@pytest.mark.parametrize("params", kinds(32, slow=False))
def test_the_text_is_that_of_plain_decoding(stack: LocalStack, params: SamplingParams) -> None:
    check_text(stack, params, "layers", SHAPES)


def target_model() -> Any:
    """Its attention writes nothing, so that the last token alone decides; its MLP does."""
    model = markov_model()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return markov_logits(target_model())


@pytest.fixture(scope="module", params=[SLOW("a0", id="same"), pytest.param("m0", id="other")])
def address(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The draft is the target's equal without its attention, then in processes of their own as `specwire up
    --draft layers:SKIP` starts them, and another model without its MLP."""
    target = save(target_model(), tmp_path_factory.mktemp("markov") / "target")
    if request.param == "a0":
        with float32_processes(target, "layers:a0", num_draft_tokens="2") as address:
            yield address
        return
    options = {"speculative_config": LAYERS, "num_draft_tokens": "2"}
    with local_stack(target, coordinator_options=options, verify_options={"layers": "m0"}) as local:
        yield local.address


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.REJECTION, SLOW(Rule.BLOCK), SLOW(Rule.GUMBEL)])
def test_the_distribution_is_the_targets(address: str, logits: torch.Tensor, rule: Rule) -> None:
    check_distribution(address, logits, rule)


def test_tokens_a_pass(address: str, request: pytest.FixtureRequest) -> None:
    """All tokens of the target's equal are accepted, and few of the other: the tests above have both."""
    found = num_passes(address, num_draft_tokens=1)
    assert found < 35 if "same" in request.node.name else found > 40


@pytest.mark.slow
def test_control_a_wrong_rule_is_caught(
    tmp_path: Path, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save(target_model(), tmp_path / "target")
    options = {"speculative_config": LAYERS, "num_draft_tokens": "2"}
    with local_stack(target, coordinator_options=options, verify_options={"layers": "a0"}) as running:
        check_control(running, logits, monkeypatch)
