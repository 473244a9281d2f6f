"""A draft model in the target's process: the text of plain decoding, the distribution under every rule.

Over real services, where the draft's own distributions travel with its proposals. Drafts guess well, or like
best what the target likes least.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specwire import Rule, SamplingParams
from tests.support import tiny_models
from tests.support.harness import LocalStack, float32_processes, local_stack
from tests.support.own_drafts import SLOW, check_control, check_distribution, check_text, kinds, num_passes
from tests.support.pairs import logits_of, markov_model, save_good_draft, save_hostile_draft, save_target

SOURCE = "draft_model"
SHAPES: list[dict[str, int]] = [
    {},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 5},
    {"num_draft_tokens": 24, "max_depth": 4},
]


class Pair(NamedTuple):
    """A target and its draft."""

    target: Path
    draft: Path


@pytest.fixture(scope="module", params=["good", SLOW("hostile")])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory: Path = tmp_path_factory.mktemp("pair")
    save_draft = save_hostile_draft if request.param == "hostile" else save_good_draft
    return Pair(save_target(directory / "target"), save_draft(directory / "draft"))


@pytest.fixture(scope="module", params=[True, SLOW(False)], ids=["goes on", "waits"])
def stack(request: Any, pair: Pair) -> Iterator[LocalStack]:
    options = {"verify_ahead": request.param, "num_draft_tokens": "auto"}
    verify_options = {"draft_model": str(pair.draft)}
    with local_stack(pair.target, coordinator_options=options, verify_options=verify_options) as running:
        yield running


@pytest.mark.parametrize("params", kinds(32, slow=True))
def test_the_text_is_that_of_plain_decoding(
    stack: LocalStack, params: SamplingParams, request: pytest.FixtureRequest
) -> None:
    done = check_text(stack, params, SOURCE, SHAPES)
    if "hostile" not in request.node.name:
        assert min(each.speculation.tokens_per_round for each in done[1:]) > 1.5


@pytest.fixture(scope="module", params=["good", SLOW("hostile")])
def markov(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The good draft is flatter than its target, so that some of its tokens are refused."""
    directory: Path = tmp_path_factory.mktemp("markov")
    target = tiny_models.save(markov_model(), directory / "target")
    scale = -1.0 if request.param == "hostile" else 0.6
    return Pair(target, tiny_models.save(markov_model(scale), directory / "draft"))


@pytest.fixture(scope="module", params=[True, SLOW(False)], ids=["goes on", "waits"])
def address(request: Any, markov: Pair) -> Iterator[str]:
    """Of two processes, started as `specwire up` does by default."""
    with float32_processes(
        *markov, draft_placement="target", num_draft_tokens="3", verify_ahead=request.param
    ) as address:
        yield address


@pytest.mark.parametrize("rule", [Rule.REJECTION, SLOW(Rule.BLOCK), SLOW(Rule.GUMBEL)])
def test_the_distribution_is_the_targets(address: str, markov: Pair, rule: Rule) -> None:
    check_distribution(address, logits_of(markov.target), rule)


@pytest.mark.slow
def test_tokens_a_pass(address: str, request: pytest.FixtureRequest) -> None:
    found = num_passes(address, num_draft_tokens=4)
    assert found > 50 if "hostile" in request.node.name else found < 20


def test_control_a_wrong_rule_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_models.save(markov_model(), tmp_path / "target")
    draft = tiny_models.save(markov_model(0.6), tmp_path / "draft")
    options = {"num_draft_tokens": "3"}
    with local_stack(
        target, coordinator_options=options, verify_options={"draft_model": str(draft)}
    ) as running:
        check_control(running, logits_of(target), monkeypatch)
