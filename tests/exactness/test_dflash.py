"""A target with a block drafter: the text of plain decoding, and the distribution under every rule.

Over real services. Text with a drafter of random weights, which is right as often as chance has it;
distributions with one that guesses well, and one that likes best what the target likes least.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specwire import Rule, SamplingParams
from tests.support.blocks import save_block_drafter, save_markov_pair
from tests.support.harness import LocalStack, float32_processes, local_stack
from tests.support.own_drafts import SLOW, check_control, check_distribution, check_text, kinds, num_passes
from tests.support.pairs import logits_of, save_target

DFLASH = '{"method": "dflash"}'
SHAPES: list[dict[str, int]] = [
    {},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 12},
    {"num_draft_tokens": 16, "max_depth": 3},
    {"num_draft_tokens": 63, "max_depth": 8},
]


@pytest.fixture(scope="module", params=[True, SLOW(False)], ids=["goes on", "waits"])
def stack(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    directory: Path = tmp_path_factory.mktemp("dflash")
    target, drafter = save_target(directory / "target"), save_block_drafter(directory / "drafter")
    options = {"speculative_config": DFLASH, "verify_ahead": request.param, "num_draft_tokens": "auto"}
    with local_stack(target, coordinator_options=options, verify_options={"dflash": str(drafter)}) as running:
        yield running


@pytest.mark.parametrize("params", kinds(32, slow=True))
def test_the_text_is_that_of_plain_decoding(stack: LocalStack, params: SamplingParams) -> None:
    """Some drafts are right."""
    done = check_text(stack, params, "dflash", SHAPES)
    assert any(each.speculation.num_accepted_tokens for each in done)


@pytest.fixture(scope="module", params=["good", "hostile"])
def markov(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_markov_pair(tmp_path_factory.mktemp("markov"), is_hostile=request.param == "hostile")


@pytest.fixture(scope="module")
def address(markov: tuple[Path, Path]) -> Iterator[str]:
    """Of two processes, started as `specwire up --draft dflash:DIR` does. The control below stands for these
    tests in the default run."""
    target, drafter = markov
    with float32_processes(target, f"dflash:{drafter}", num_draft_tokens="2") as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.GUMBEL])
def test_the_distribution_is_the_targets(address: str, markov: tuple[Path, Path], rule: Rule) -> None:
    check_distribution(address, logits_of(markov[0]), rule)


@pytest.mark.slow
def test_tokens_a_pass(address: str, request: pytest.FixtureRequest) -> None:
    """A good drafter's first token is accepted, and a hostile one's never: the tests above have both."""
    found = num_passes(address, num_draft_tokens=1)
    assert found > 50 if "hostile" in request.node.name else found < 35


@pytest.mark.slow
def test_control_a_wrong_rule_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = save_markov_pair(tmp_path)
    options = {"speculative_config": DFLASH, "num_draft_tokens": "2"}
    with local_stack(target, coordinator_options=options, verify_options={"dflash": str(drafter)}) as running:
        check_control(running, logits_of(target), monkeypatch)
