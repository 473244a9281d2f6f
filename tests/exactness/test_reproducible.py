"""Text that a seed fixes is the same in bfloat16 too, in any pass, if the target is batch-invariant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specwire import Completion, Rule, SamplingParams
from specwire.cli import status
from specwire.config.client import ClientConfig
from tests.support.harness import local_stack
from tests.support.pairs import save_good_draft, save_target
from tests.support.together import together

NUM_TEXTS = 16
NUM_TOKENS = 60


def texts(address: str, num_draft_tokens: int, num_streams: int) -> list[Completion]:
    """Every other one greedy, so many at a time."""
    free = SamplingParams(rule=Rule.GUMBEL, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [
        (replace(free, temperature=seed % 2, seed=seed, num_draft_tokens=num_draft_tokens), [3 + seed, 5, 9])
        for seed in range(NUM_TEXTS)
    ]
    starts = range(0, NUM_TEXTS, num_streams)
    return [done for start in starts for done in together(address, requests[start : start + num_streams])]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    return save_target(directory / "target"), save_good_draft(directory / "draft")


@pytest.mark.slow
def test_the_text_is_the_same_with_any_length_and_any_company(pair: tuple[Path, Path]) -> None:
    options = {"dtype": "bfloat16", "batch_invariant": True}
    with local_stack(*pair, verify_options=options) as stack:
        alone = texts(stack.address, 0, 1)
        assert all(done.reproducible for done in alone)
        for num_draft_tokens, num_streams in ((4, 1), (7, NUM_TEXTS), (0, NUM_TEXTS)):
            found = texts(stack.address, num_draft_tokens, num_streams)
            assert [done.token_ids for done in found] == [done.token_ids for done in alone]
        # Prefilled in one piece instead of decoded: the rest of a text after its own beginning.
        for done in alone[::4]:
            half = NUM_TOKENS // 2
            rest = SamplingParams(temperature=0, max_tokens=NUM_TOKENS - half, ignore_eos=True)
            prompt = [3 + alone.index(done), 5, 9, *done.token_ids[:half]]
            again = stack.client.generate(params=rest, prompt_token_ids=prompt)
            assert again.token_ids == done.token_ids[half:]


def test_without_it_the_completion_does_not_promise_that(pair: tuple[Path, Path]) -> None:
    with local_stack(*pair, verify_options={"dtype": "bfloat16"}) as stack:
        for params in (SamplingParams(seed=1, max_tokens=4), SamplingParams(temperature=0, max_tokens=4)):
            done = stack.client.generate(params=params, prompt_token_ids=[5])
            assert not done.reproducible
            assert "verify --batch-invariant" in done.why_not_reproducible
            assert "sampled" not in done.why_not_reproducible
        shown = status.show(ClientConfig(server=stack.address))
        assert f"reproducible: false: {done.why_not_reproducible}" in shown
    with local_stack(*pair, verify_options={"batch_invariant": True}) as stack:
        params = SamplingParams(seed=1, max_tokens=4, rule=Rule.REJECTION, num_draft_tokens=2)
        done = stack.client.generate(params=params, prompt_token_ids=[5])
        assert not done.reproducible
        assert done.why_not_reproducible.startswith("draft tokens are sampled under rule rejection")
        assert "batch" not in done.why_not_reproducible
        params = SamplingParams(seed=1, max_tokens=4, rule=Rule.GUMBEL)
        done = stack.client.generate(params=params, prompt_token_ids=[5])
        assert (done.reproducible, done.why_not_reproducible) == (True, "")
        assert "reproducible: true" in status.show(ClientConfig(server=stack.address))
