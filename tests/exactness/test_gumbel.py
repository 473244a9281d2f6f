"""Under Gumbel coupling the text is fixed by the seed: not by the draft, its length, or the company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specwire import Rule, SamplingParams
from tests.support.harness import local_stack
from tests.support.pairs import save_good_draft, save_hostile_draft, save_target
from tests.support.together import sampled

PROMPT = [5, 9, 11, 2, 7]
NUM_TOKENS = 80


def params(seed: int, num_draft_tokens: int | None = None) -> SamplingParams:
    return SamplingParams(
        rule=Rule.GUMBEL,
        seed=seed,
        max_tokens=NUM_TOKENS,
        top_p=0.95,
        repetition_penalty=1.1,
        ignore_eos=True,
        num_draft_tokens=num_draft_tokens,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("gumbel")
    return {
        "target": save_target(directory / "target"),
        "good": save_good_draft(directory / "good"),
        "hostile": save_hostile_draft(directory / "hostile"),
    }


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[int, tuple[int, ...]]:
    """Seed → token ids, without any draft service."""
    with local_stack(models["target"]) as stack:
        return {
            seed: stack.client.generate(params=params(seed), prompt_token_ids=PROMPT).token_ids
            for seed in range(6)
        }


@pytest.mark.slow
def test_different_seeds_give_different_texts(expected: dict[int, tuple[int, ...]]) -> None:
    assert len(set(expected.values())) == len(expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["good", "hostile"])
def test_neither_the_draft_nor_its_length_nor_the_company_changes_the_text(
    models: dict[str, Path], expected: dict[int, tuple[int, ...]], kind: str
) -> None:
    """And a seed that the server chose is named, and repeats its text."""
    with local_stack(models["target"], models[kind]) as stack:
        for num_draft_tokens in (None, 0, 1, 5, 13):
            done = stack.client.generate(params=params(3, num_draft_tokens), prompt_token_ids=PROMPT)
            assert done.token_ids == expected[3]
            assert (done.speculation.num_draft_tokens == 0) == (num_draft_tokens == 0)
        found = sampled(stack.address, params(0), range(len(expected)), PROMPT)
        free = SamplingParams(rule=Rule.GUMBEL, max_tokens=20)
        first = stack.client.generate(params=free, prompt_token_ids=PROMPT)
        again = stack.client.generate(params=replace(free, seed=first.seed), prompt_token_ids=PROMPT)
    assert [done.token_ids for done in found] == [expected[seed] for seed in range(len(expected))]
    assert again.token_ids == first.token_ids
