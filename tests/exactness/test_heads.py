"""A target that drafts with heads: the text of plain decoding, and the distribution under every rule.

Over real services. Heads are the target's own, fitted to guess well, or negated to guess as badly as they
can.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from coordinator.servicer import GenerationServicer
from specwire import Rule, SamplingParams
from tests.support.harness import LocalStack, float32_processes, local_stack
from tests.support.heads import save_heads
from tests.support.own_drafts import check_control, check_distribution, check_text, kinds, num_passes
from tests.support.pairs import markov_logits, markov_model, save_target
from tests.support.tiny_models import save

HEADS = '{"method": "medusa"}'
SHAPES: list[dict[str, int]] = [
    {},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 5, "max_depth": 0},
    {"num_draft_tokens": 16, "max_depth": 4},
    {"num_draft_tokens": 63, "max_depth": 8},
]


class Watched:
    """A stack, and the servicer of its coordinator."""

    def __init__(self, stack: LocalStack, servicer: GenerationServicer) -> None:
        self.stack, self.servicer = stack, servicer
        self.tally = servicer.totals.tally

    @property
    def num_disagreements(self) -> int:
        return self.servicer._verify.num_disagreements


@pytest.fixture(scope="module", params=["good", "hostile"])
def directories(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory: Path = tmp_path_factory.mktemp("heads")
    target = save_target(directory / "target")
    return target, save_heads(directory / "heads", target, is_hostile=request.param == "hostile")


@pytest.fixture(scope="module", params=[True, False], ids=["goes on", "waits"])
def watched(request: Any, directories: tuple[Path, Path]) -> Iterator[Watched]:
    target, heads = directories
    found: list[GenerationServicer] = []
    init = GenerationServicer.__init__

    def noted(self: GenerationServicer, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        found.append(self)

    options = {"speculative_config": HEADS, "verify_ahead": request.param, "num_draft_tokens": "auto"}
    with (
        mock.patch.object(GenerationServicer, "__init__", noted),
        local_stack(target, coordinator_options=options, verify_options={"heads": str(heads)}) as stack,
    ):
        yield Watched(stack, found[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("params", kinds(48, slow=False))
def test_the_text_is_that_of_plain_decoding(watched: Watched, params: SamplingParams) -> None:
    num_begun = watched.tally.num_begun
    check_text(watched.stack, params, "heads", SHAPES)
    assert (watched.tally.num_begun > num_begun) == watched.servicer._config.verify_ahead
    assert watched.num_disagreements == 0


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return markov_logits(markov_model())


@pytest.fixture(scope="module", params=["good", "hostile"])
def address(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of three processes, started as `specwire up --draft heads:DIR` does."""
    directory: Path = tmp_path_factory.mktemp("markov")
    target = save(markov_model(), directory / "target")
    heads = save_heads(directory / "heads", target, is_hostile=request.param == "hostile")
    with float32_processes(target, f"heads:{heads}", num_draft_tokens="2") as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.GUMBEL])
def test_the_distribution_is_the_targets(address: str, logits: torch.Tensor, rule: Rule) -> None:
    check_distribution(address, logits, rule)


@pytest.mark.slow
def test_tokens_a_pass(address: str, request: pytest.FixtureRequest) -> None:
    """Nearly all tokens of good heads are accepted, and of hostile ones none: the tests above have both."""
    found = num_passes(address, num_draft_tokens=4)
    assert found > 50 if "hostile" in request.node.name else found < 20


@pytest.mark.slow
def test_control_a_wrong_rule_is_caught(
    tmp_path: Path, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save(markov_model(), tmp_path / "target")
    heads = save_heads(tmp_path / "heads", target)
    options = {"speculative_config": HEADS, "num_draft_tokens": "2"}
    with local_stack(target, coordinator_options=options, verify_options={"heads": str(heads)}) as stack:
        check_control(stack, logits, monkeypatch)
