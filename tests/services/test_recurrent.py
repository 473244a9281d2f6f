"""Models with recurrent layers, as target and as draft, through real services.

That greedy text is transformers' own, family by family: `exactness/test_greedy`. That logits are, after any
history of appends, truncations and forks: `tensors/test_runner`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specwire import ModelLoadError, Rule, SamplingParams, UnsupportedError
from specwire.config.services import DraftConfig, VerifyConfig
from specwire.engine import boot
from tests.support.harness import LocalStack, local_stack
from tests.support.pairs import save_good_draft, save_target
from tests.support.tiny_models import build, written_by_transformers
from tests.support.together import of_prompts, sampled
from verify_service.verifier import VerifyDecider

NUM_TOKENS = 32
PROMPTS = [[5, 9, 11, 2, 7], [3] * 20 + [8, 1, 30], [64], [*range(3, 43)]]


@pytest.fixture(scope="module", params=["qwen3_next", "lfm2", "granitemoehybrid"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("recurrent")
    return save_target(directory / request.param, request.param), save_good_draft(
        directory / "draft", request.param
    )


@pytest.fixture(scope="module")
def alone(pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    """The target without a draft."""
    with local_stack(pair[0]) as running:
        yield running


def greedy(num_draft_tokens: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, num_draft_tokens=num_draft_tokens, **options
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", ["service", "target"])
def test_texts_are_those_of_generate_for_any_number_of_draft_tokens(
    pair: tuple[Path, Path], place: str
) -> None:
    """Several streams at once; the second time their prompts are known, up to the states at ends of pages."""
    target, draft = pair
    expected = [written_by_transformers(build(target.name), prompt, NUM_TOKENS) for prompt in PROMPTS]
    in_target: dict[str, Any] = {"verify_options": {"draft_model": str(draft)}} if place == "target" else {}
    auto = {"num_draft_tokens": "auto"}
    with local_stack(target, None if in_target else draft, coordinator_options=auto, **in_target) as stack:
        for number in (0, 4, None):
            done = of_prompts(stack.address, greedy(number), PROMPTS)
            assert [list(completion.token_ids) for completion in done] == expected
            accepted = sum(completion.speculation.draft_acceptance_rate or 0 for completion in done)
            assert number is None or (accepted > 0) == (number > 0)
        assert stack.status("verify").num_hit_tokens > 0
        stack.assert_idle_within(1.0)


@pytest.mark.sample(1)
def test_memory_of_four_serves_twelve(pair: tuple[Path, Path], alone: LocalStack) -> None:
    """Those that gave up their states run again."""
    for_four = {"num_kv_tokens": 4 * 64, "page_size": 4}
    params = SamplingParams(rule=Rule.GUMBEL, seed=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [done.token_ids for done in sampled(alone.address, params, range(12), PROMPTS[0])]
    ahead = {"max_outcomes": 3} | for_four  # on forks
    with local_stack(*pair, verify_options=for_four, draft_options=ahead) as stack:
        done = sampled(stack.address, params, range(12), PROMPTS[0])
        assert [completion.token_ids for completion in done] == expected
        assert all(stack.status(role).num_preemptions > 0 for role in ("verify", "draft"))
        stack.assert_idle_within(1.0)


@pytest.mark.sample(1)
def test_only_accepted_tokens_of_broken_rounds_run_again(pair: tuple[Path, Path]) -> None:
    """A round that accepts all or nothing costs no more than with attention alone."""
    target, draft = pair
    for name, path in (("itself", target), ("another", draft)):
        with local_stack(target, path) as stack:
            done = stack.client.generate(params=greedy(4), prompt_token_ids=PROMPTS[0])
            found, num_run = done.speculation, stack.status("verify").num_tokens
        num_needed = len(PROMPTS[0]) - 1 + found.num_draft_tokens + found.num_rounds
        again = num_run - num_needed
        assert again == 0 if name == "itself" else 0 <= again <= found.num_accepted_tokens


@pytest.mark.sample(1)
def test_trees_are_refused(alone: LocalStack) -> None:
    assert not alone.client.get_model_info()[0].trees
    with pytest.raises(UnsupportedError, match=r"max_depth=2: .* verifies chains only"):
        alone.client.generate(params=greedy(4, max_depth=2), prompt_token_ids=PROMPTS[0])


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (VerifyConfig, {"batch_invariant": True}, "--batch-invariant"),
        (VerifyConfig, {"tensor_parallel_size": 2}, "--tensor-parallel-size over 1"),
        (VerifyConfig, {"layers": "a0"}, "--layers"),
        (VerifyConfig, {"mtp": True}, "--mtp"),
        (DraftConfig, {"inner": "ngram"}, "--inner"),
        (DraftConfig, {"learn": True}, "--learn"),
    ],
)
def test_what_does_not_combine_is_named(tmp_path: Path, kind: Any, given: dict[str, Any], said: str) -> None:
    config = kind(model=str(save_target(tmp_path / "target", "lfm2")), **given)
    with pytest.raises(ModelLoadError, match=f"has recurrent layers, which is not served with {said}"):
        boot.start(config, "verify", VerifyDecider())
