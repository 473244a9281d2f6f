"""A target that drafts with layers of its own: the text of plain decoding, the distribution under every rule.

Over real services. Layers guess well, or like best what the target likes least.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specwire import Rule, SamplingParams
from tests.support.harness import LocalStack, float32_processes, local_stack
from tests.support.mtp import save_markov_target, save_mtp_target
from tests.support.own_drafts import SLOW, check_control, check_distribution, check_text, kinds, num_passes
from tests.support.pairs import logits_of

MTP = '{"method": "mtp"}'
SHAPES: list[dict[str, int]] = [
    {},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 5},
    {"num_draft_tokens": 12},
]


@pytest.fixture(scope="module", params=["mellum", SLOW("glm4_moe"), SLOW("hostile")])
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one layer and a window, with two layers, and with one that guesses wrong."""
    is_hostile = request.param == "hostile"
    family = "mellum" if is_hostile else request.param
    return save_mtp_target(tmp_path_factory.mktemp("mtp") / "target", family, is_hostile=is_hostile)


@pytest.fixture(scope="module", params=[True, SLOW(False)], ids=["goes on", "waits"])
def stack(request: Any, target: Path) -> Iterator[LocalStack]:
    options = {"speculative_config": MTP, "verify_ahead": request.param, "num_draft_tokens": "auto"}
    with local_stack(target, coordinator_options=options, verify_options={"mtp": True}) as running:
        yield running


@pytest.mark.parametrize("params", kinds(32, slow=True))
def test_the_text_is_that_of_plain_decoding(
    stack: LocalStack, params: SamplingParams, request: pytest.FixtureRequest
) -> None:
    done = check_text(stack, params, "mtp", SHAPES)
    if params.temperature == 0 and "hostile" not in request.node.name:
        assert min(each.speculation.tokens_per_round for each in done) > 1.5


@pytest.fixture(scope="module", params=["good", "hostile"])
def markov(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("markov") / "target"
    return save_markov_target(directory, is_hostile=request.param == "hostile")


@pytest.fixture(scope="module")
def address(markov: Path) -> Iterator[str]:
    """Of two processes, started as `specwire up --draft mtp` does. The control below stands for these tests
    in the default run."""
    with float32_processes(markov, "mtp", num_draft_tokens="2") as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.GUMBEL])
def test_the_distribution_is_the_targets(address: str, markov: Path, rule: Rule) -> None:
    check_distribution(address, logits_of(markov), rule)


@pytest.mark.slow
def test_tokens_a_pass(address: str, request: pytest.FixtureRequest) -> None:
    """All tokens of good layers are accepted, and of hostile ones none: the tests above have both."""
    found = num_passes(address, num_draft_tokens=4)
    assert found > 50 if "hostile" in request.node.name else found < 20


@pytest.mark.slow
def test_control_a_wrong_rule_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save_markov_target(tmp_path / "target")
    options = {"speculative_config": MTP, "num_draft_tokens": "2"}
    with local_stack(target, coordinator_options=options, verify_options={"mtp": True}) as running:
        check_control(running, logits_of(target), monkeypatch)
