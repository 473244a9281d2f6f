"""Drafts of the target's own process: the text of plain decoding, and the distribution under every rule.

Over real services. Heads, layers left out, layers for multi-token prediction, a block drafter; EAGLE-3 and a
draft model beside the target, whose own distributions travel with their proposals. Each in a variant that
guesses well, and in one that guesses badly: hostile ones like best what the target likes least.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import verify_service.paged
from coordinator.servicer import GenerationServicer
from specwire import Rule, SamplingParams
from tests.support import eagle3, pairs, tiny_models
from tests.support.blocks import save_markov_pair
from tests.support.harness import LocalStack, float32_processes, local_stack, started_coordinators
from tests.support.heads import save_heads
from tests.support.mtp import save_markov_target, save_mtp_target
from tests.support.own_drafts import (
    SLOW,
    check_control,
    check_distribution,
    check_text,
    kinds,
    num_passes,
    save_drafting,
)
from tests.support.pairs import (
    logits_of,
    markov_model,
    save_hostile_draft,
    save_target,
)
from verify_service.threshold import Threshold

FAR = "a0,a1,m0,m1"
METHODS = {name: f'{{"method": "{name}"}}' for name in ("layers", "mtp", "dflash", "eagle3")} | {
    "heads": '{"method": "medusa"}',
    "draft_model": "",  # it drafts by default
}
TREES = ({"num_draft_tokens": 16, "max_depth": 4}, {"num_draft_tokens": 63, "max_depth": 8})
SHAPES: dict[str, list[dict[str, int]]] = {
    "heads": [{}, {"num_draft_tokens": 1}, {"num_draft_tokens": 5, "max_depth": 0}, *TREES],
    "layers": [{}, {"num_draft_tokens": 1}, {"num_draft_tokens": 5}, {"num_draft_tokens": 12}],
    "mtp": [{}, {"num_draft_tokens": 1}, {"num_draft_tokens": 5}, {"num_draft_tokens": 12}],
    "dflash": [{}, {"num_draft_tokens": 1}, {"num_draft_tokens": 12}, *TREES],
    "eagle3": [{}, {"num_draft_tokens": 1}, {"num_draft_tokens": 12}, *TREES],
    "draft_model": [
        {},
        {"num_draft_tokens": 1},
        {"num_draft_tokens": 5},
        {"num_draft_tokens": 24, "max_depth": 4},
    ],
}


class Drafting(NamedTuple):
    """A target, and what it drafts with."""

    source: str
    variant: str
    target: Path
    value: Any

    def stack(self, **options: Any) -> AbstractContextManager[LocalStack]:
        """With these options of the coordinator."""
        value = str(self.value) if isinstance(self.value, Path) else self.value
        options = {"speculative_config": METHODS[self.source]} | options
        return local_stack(self.target, coordinator_options=options, verify_options={self.source: value})


# --- texts --------------------------------------------------------------------------------------------

TEXT_VARIANTS = {
    "heads": ("good", "hostile"),
    "layers": ("near", "far"),
    "mtp": ("mellum", "glm4_moe", "hostile"),  # one layer and a window; two layers; one that guesses wrong
    "dflash": ("random", "narrow"),  # right as often as chance has it; as speculators', with few tokens
    "eagle3": ("random", "good"),  # likewise; always right where the target has a small vocabulary
    "draft_model": ("good", "hostile"),
}
QUICK = (
    ("heads", "good", True),
    ("layers", "far", False),
    ("dflash", "random", True),
    ("eagle3", "good", True),
)
"""The other sources' texts are in `make test` by `services/test_own_drafts.py`."""


def text_cases() -> Iterator[Any]:
    """Each variant, where the target goes on by itself and where it waits for the coordinator."""
    for source, variants in TEXT_VARIANTS.items():
        for variant, goes_on in product(variants, (True, False)):
            case = (source, variant, goes_on)
            make = pytest.param if case in QUICK else SLOW
            yield make(case, id=f"{source}, {variant}, {'goes on' if goes_on else 'waits'}")


def save_for_texts(source: str, variant: str, directory: Path) -> tuple[Path, Any]:
    is_hostile = variant == "hostile"
    if source == "mtp":
        family = "mellum" if is_hostile else variant
        return save_mtp_target(directory / "target", family, is_hostile=is_hostile), True
    if (source, variant) == ("eagle3", "good"):
        return eagle3.save_markov_pair(directory)
    if variant == "narrow":
        return save_markov_pair(directory, layout="speculators")
    if variant not in ("hostile", "far"):
        target, options = save_drafting(source, directory)
        return target, options[source]
    target = save_target(directory / "target")
    if source == "heads":
        return target, save_heads(directory / "heads", target, is_hostile=True)
    return target, FAR if source == "layers" else save_hostile_draft(directory / "draft")


class Watched(NamedTuple):
    """A stack, and the servicer of its coordinator."""

    drafting: Drafting
    stack: LocalStack
    servicer: GenerationServicer


@pytest.fixture(scope="module", params=text_cases())
def watched(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Layers' proposals are as long as wanted where the target goes on by itself, and else end early."""
    source, variant, goes_on = request.param
    drafting = Drafting(source, variant, *save_for_texts(source, variant, tmp_path_factory.mktemp(source)))
    threshold = partial(Threshold, first=0.0) if goes_on else Threshold
    with (
        mock.patch.object(verify_service.paged, "Threshold", threshold),
        started_coordinators() as found,
        drafting.stack(verify_ahead=goes_on, num_draft_tokens="auto") as stack,
    ):
        yield Watched(drafting, stack, found[0])


@pytest.mark.parametrize("params", kinds(24))
def test_the_text_is_that_of_plain_decoding(watched: Watched, params: SamplingParams) -> None:
    source, variant = watched.drafting.source, watched.drafting.variant
    tally = watched.servicer.totals.tally
    num_begun = tally.num_begun
    done = check_text(watched.stack, params, source, SHAPES[source])
    assert (tally.num_begun > num_begun) == watched.servicer.config.verify_ahead
    assert watched.servicer.verify.num_disagreements == 0
    if (source, variant) == ("dflash", "random"):
        assert any(each.speculation.num_accepted_tokens for each in done)
    guesses_well = source == "mtp" and variant != "hostile" and params.temperature == 0
    if guesses_well or (source, variant) in (("draft_model", "good"), ("eagle3", "good")):
        # The first one's length is chosen by the times that it measures, and on a busy machine it may be 0.
        assert min(each.speculation.tokens_per_round for each in done[1:]) > 1.5


# --- distributions ------------------------------------------------------------------------------------


def layered_model() -> Any:
    """Its attention writes nothing, so that the last token alone decides; its MLP does."""
    model = markov_model()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    return model


def save_markov(source: str, variant: str, directory: Path) -> Drafting:
    """A target whose distribution depends on the last token alone.

    Without its attention, `layers` are its equal; without its MLP they are another model. The good draft
    model is flatter than its target, so that some of its tokens are refused.
    """
    is_hostile = variant == "hostile"
    value: Any
    match source:
        case "heads":
            target = tiny_models.save(markov_model(), directory / "target")
            value = save_heads(directory / "heads", target, is_hostile=is_hostile)
        case "layers":
            target = tiny_models.save(layered_model(), directory / "target")
            value = "a0" if variant == "same" else "m0"
        case "mtp":
            target, value = save_markov_target(directory / "target", is_hostile=is_hostile), True
        case "dflash":
            layout = "speculators" if variant == "narrow" else "transformers"
            target, value = save_markov_pair(directory, is_hostile=is_hostile, layout=layout)
        case "eagle3":
            target, value = eagle3.save_markov_pair(directory, is_hostile=is_hostile)
        case _:
            target, value = pairs.save_markov_pair(directory, -1.0 if is_hostile else 0.6)
    return Drafting(source, variant, target, value)


class Running(NamedTuple):
    """What runs, and where."""

    drafting: Drafting
    address: str


def markov_cases() -> Iterator[Any]:
    """Each variant."""
    for source in ("heads", "layers", "mtp", "dflash", "eagle3"):
        for variant in ("same", "other") if source == "layers" else ("good", "hostile"):
            yield pytest.param((source, variant, True), id=f"{source}, {variant}")
    yield pytest.param(("dflash", "narrow", True), id="dflash, narrow")
    for variant, goes_on in product(("good", "hostile"), (True, False)):
        name = f"draft_model, {variant}, {'goes on' if goes_on else 'waits'}"
        yield pytest.param(("draft_model", variant, goes_on), id=name)


@pytest.fixture(scope="module", params=markov_cases())
def running(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """In processes of their own as `specwire up` starts them, but for layers that are another model."""
    source, variant, goes_on = request.param
    drafting = save_markov(source, variant, tmp_path_factory.mktemp("markov"))
    if variant == "other":
        with drafting.stack(num_draft_tokens="2") as local:
            yield Running(drafting, local.address)
        return
    named = {"mtp": "mtp", "draft_model": drafting.value}.get(source, f"{source}:{drafting.value}")
    settings: dict[str, Any] = {"num_draft_tokens": "2"}
    if source == "draft_model":
        settings = {"num_draft_tokens": "3", "draft_placement": "target", "verify_ahead": goes_on}
    with float32_processes(drafting.target, named, **settings) as address:
        yield Running(drafting, address)


@pytest.mark.slow  # the control below has a draft model, within the test's process
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.GUMBEL])
def test_the_distribution_is_the_targets(running: Running, rule: Rule) -> None:
    check_distribution(running.address, logits_of(running.drafting.target), rule)


MOST_PASSES = {
    "heads": (4, 20),
    "layers": (1, 35),
    "mtp": (4, 20),
    "dflash": (1, 35),
    "eagle3": (4, 20),
    "draft_model": (4, 20),
}
"""Of 60 tokens where the draft guesses well, with so many draft tokens a pass."""


@pytest.mark.slow
def test_tokens_a_pass(running: Running) -> None:
    """Nearly all tokens of good drafts are accepted, and few or none of others: the tests above have both."""
    num_draft_tokens, most = MOST_PASSES[running.drafting.source]
    found = num_passes(running.address, num_draft_tokens=num_draft_tokens)
    if running.drafting.variant in ("good", "same", "narrow"):
        assert found < most
    else:
        assert found > (40 if running.drafting.variant == "other" else 50)


@pytest.mark.parametrize(
    "source", [*map(SLOW, ("heads", "layers", "mtp", "dflash", "eagle3")), "draft_model"]
)
def test_control_a_wrong_rule_is_caught(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = save_markov(source, "same" if source == "layers" else "good", tmp_path)
    with drafting.stack(num_draft_tokens="3" if source == "draft_model" else "2") as stack:
        check_control(stack, logits_of(drafting.target), monkeypatch)
