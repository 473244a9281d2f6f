"""Warps against transformers' own classes; processors, draws, supports and their edges."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specwire.core import Proposal, Rule, SamplingParams
from specwire.engine.cache.kv_cache import PagePool
from specwire.engine.jobs import TokenSequence
from specwire.errors import InvalidRequestError
from specwire.rule import rows, sampling
from specwire.rule.columns import Row, Rows
from specwire.rule.random import Purpose, uniforms
from specwire.rule.rows import uniforms_for
from specwire.rule.sampling import draw, judge_support, truncate_support
from specwire.support import certain
from tests.support.parameters import EACH_WARP, warped
from verify_service.verifier import VerifyDecider, VerifyJob

VOCAB = 200
ALMOST_ONE = 1 - 2.0**-53


def random_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def row(history: Any = (), prompt_len: int = 0, **params: Any) -> Row:
    return Row(SamplingParams(**params), prompt_len, history, position=len(history), seed=0)


def apply_history(logits: torch.Tensor, each: list[Row]) -> torch.Tensor:
    return sampling.apply_history(logits, Rows.of(each))


def apply_warps(logits: torch.Tensor, each: list[Row]) -> torch.Tensor:
    return sampling.apply_warps(logits, Rows.of(each))


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def warped_by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """One row through the classes that `generate` would build, in its order."""
    if params.greedy:
        return warped(logits, SamplingParams(temperature=params.temperature))
    return torch.log_softmax(warped(logits, params), dim=-1)


def test_no_temperature_is_too_high() -> None:
    """Past the numbers of float32 too, where masked tokens stay masked."""
    logits = random_logits(1).index_fill_(1, torch.tensor([3, 4]), float("-inf"))
    found = apply_warps(logits, [row(temperature=1e39)]).exp()
    assert found[0, 3] == found[0, 4] == 0
    torch.testing.assert_close(found.max(), torch.tensor(1 / (VOCAB - 2)))


WARPS: list[dict[str, Any]] = [
    {},
    *EACH_WARP,
    {"temperature": 0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB + 5},
    {"top_p": 0.01},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
]


def test_parameters_take_single_strings_lists_and_names() -> None:
    natural: dict[str, Any] = {"stop": "x", "stop_token_ids": [1, 2], "rule": "gumbel"}
    assert SamplingParams(**natural) == SamplingParams(stop=("x",), stop_token_ids=(1, 2), rule=Rule.GUMBEL)


def assert_same_log_probs(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (torch.isneginf(actual) == torch.isneginf(expected)).all()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(2))
def test_warps_equal_transformers_row_by_row_in_a_mixed_batch(seed: int) -> None:
    rows = [row(**params) for params in WARPS]
    logits = random_logits(len(rows), seed=seed)
    before = logits.clone()
    log_probs = apply_warps(logits, rows)
    assert log_probs.dtype == torch.float32
    for i, each in enumerate(rows):
        assert_same_log_probs(log_probs[i], warped_by_transformers(logits[i : i + 1], each.params)[0])
    assert (logits == before).all()


@pytest.mark.parametrize("params", WARPS)
def test_warps_equal_transformers_in_a_uniform_batch(params: dict[str, Any]) -> None:
    logits = random_logits(4, seed=9)
    rows = [row(**params)] * 4
    assert_same_log_probs(apply_warps(logits, rows), warped_by_transformers(logits, rows[0].params))


def test_greedy_takes_the_larger_of_logits_that_their_log_probabilities_make_equal() -> None:
    """transformers compares logits; rounded to log probabilities the lower id would win."""
    logits = torch.zeros(2, VOCAB)
    logits[:, 7] = torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))
    logits[:, 3] = 0.1
    assert torch.log_softmax(logits, dim=-1).argmax(dim=-1).tolist() == [3, 3]
    for others in ({"temperature": 0}, {"temperature": 0.7, "rule": "gumbel"}):
        rows = [row(temperature=0), row(**others)]
        assert apply_warps(logits, rows)[0].argmax() == 7


def test_warps_sort_only_for_the_rows_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(original: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(x.shape[0])
        return original(x, *args, **kwargs)

    for name in ("sort", "topk"):
        monkeypatch.setattr(torch, name, functools.partial(counted, getattr(torch, name)))
    logits = random_logits(5)
    apply_warps(logits, [row(), row(temperature=0.5), row(min_p=0.1), row(temperature=0), row()])
    assert sizes == []
    apply_warps(logits, [row(top_k=5), row(), row(top_p=0.5), row(top_p=0.9), row(temperature=0, top_p=0.1)])
    assert sizes == [1, 2]


def test_equal_logits_survive_top_k_together() -> None:
    log_probs = apply_warps(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), [row(top_k=2)])
    assert torch.isneginf(log_probs[0]).tolist() == [True, False, False, False]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-45, 1e-300])
def test_a_temperature_near_zero_is_greedy_and_finite(temperature: float) -> None:
    logits = random_logits(3)
    probs = apply_warps(logits, [row(temperature=temperature, top_p=0.9, min_p=0.1)] * 3).exp()
    assert (probs.max(dim=-1).values > 0.999).all()
    assert (probs.argmax(dim=-1) == logits.argmax(dim=-1)).all()


def test_half_precision_and_excluded_tokens_pass_through() -> None:
    logits = random_logits(2).bfloat16()
    logits[:, 5] = -torch.inf
    log_probs = apply_warps(logits, [row(top_p=0.9), row(temperature=2.0)])
    assert log_probs.dtype == torch.float32
    assert torch.isneginf(log_probs[:, 5]).all()
    assert not log_probs.isnan().any()


def test_history_features_combine_in_order_and_by_row() -> None:
    rng = np.random.default_rng(0)
    settings: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 0.7},
        {"logit_bias": {5: 4.0, 6: -3.0}, "repetition_penalty": 1.5, "presence_penalty": -0.5},
        {"frequency_penalty": 1.1, "presence_penalty": 0.5},
        {"temperature": 0, "logit_bias": {9: 50.0}},
    ]
    rows = [row(rng.integers(0, VOCAB, 30), 10, **each) for each in settings]
    logits = random_logits(len(rows))
    before = logits.clone()
    actual = apply_history(logits, rows)
    for i, each in enumerate(rows):
        expected = before[i].double().numpy().copy()
        for token_id, bias in each.params.logit_bias.items():
            expected[token_id] += bias
        for token_id in set(each.history):
            penalty = each.params.repetition_penalty
            expected[token_id] *= penalty if expected[token_id] < 0 else 1 / penalty
        for token_id in each.history[10:]:
            expected[token_id] -= each.params.frequency_penalty
        for token_id in set(each.history[10:]):
            expected[token_id] -= each.params.presence_penalty
        np.testing.assert_allclose(actual[i].numpy(), expected, rtol=1e-5, atol=1e-5)
    assert (logits == before).all()


def test_history_is_not_touched_without_need() -> None:
    logits = random_logits(2)
    assert apply_history(logits, [row(temperature=0.5), row(top_k=3)]) is logits


def test_history_may_be_empty_or_name_tokens_that_the_vocabulary_lacks() -> None:
    logits = random_logits(3)
    params = {"repetition_penalty": 2.0, "presence_penalty": 1.0}
    rows = [row((), 0, **params), row([VOCAB, VOCAB + 9], 0, **params), row([1], 1, presence_penalty=1.0)]
    torch.testing.assert_close(apply_history(logits, rows), logits)


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"logit_bias\[200\]"):
        apply_history(random_logits(1), [row(logit_bias={VOCAB: 1.0})])


@pytest.mark.parametrize("u", [0.0, 1e-300, 0.5, ALMOST_ONE])
def test_draw_never_returns_an_impossible_token(u: float) -> None:
    rng = np.random.default_rng(2)
    probs = torch.from_numpy(rng.gamma(0.1, size=(300, 50)) * (rng.random((300, 50)) < 0.3)).float()
    probs[:, 20] += 1e-30
    drawn = draw(probs, torch.full((300,), u, dtype=torch.float64))
    assert (probs.gather(1, drawn[:, None]) > 0).all()
    one_hot = torch.eye(50)
    assert draw(one_hot, torch.full((50,), u, dtype=torch.float64)).tolist() == list(range(50))


def test_draw_inverts_the_cumulative_distribution() -> None:
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25]])
    expected = {0.0: 0, 0.2499: 0, 0.25: 2, 0.7499: 2, 0.75: 3, ALMOST_ONE: 3}
    for u, token_id in expected.items():
        assert draw(probs, doubles(u)).tolist() == [token_id]
        assert draw(probs * 8, doubles(u)).tolist() == [token_id]  # normalised or not


def test_draw_survives_a_sum_that_is_not_monotone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel sums round differently per element: an impossible token may seem to gain mass."""
    wobbly = torch.tensor([[0.3, 0.3 + 1e-16, 1.0 - 1e-16, 1.0]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: wobbly.clone())
    probs = torch.tensor([[0.3, 0.0, 0.7, 0.0]])
    for u in (0.0, 0.3, 0.30000000000000004, ALMOST_ONE):
        assert draw(probs, doubles(u)).item() in (0, 2)


def test_truncation_keeps_the_smallest_set_that_holds_the_mass() -> None:
    probs = torch.tensor([[0.05, 0.4, 0.3, 0.15, 0.1], [1.0, 0, 0, 0, 0], [0.2, 0.2, 0.2, 0.2, 0.2]])
    token_ids, kept, lengths = truncate_support(probs, mass=0.8, max_support=4)
    assert lengths.tolist() == [3, 1, 4]
    assert token_ids[0].tolist() == [1, 2, 3, 4]
    assert token_ids[1, 0] == 0
    torch.testing.assert_close(kept[0], torch.tensor([0.4, 0.3, 0.15, 0.0]) / 0.85)
    assert kept.dtype == torch.float32
    torch.testing.assert_close(kept.sum(dim=-1), torch.ones(3))
    assert truncate_support(probs, mass=0.8, max_support=2)[2].tolist() == [2, 1, 2]
    assert truncate_support(probs, mass=1e-9, max_support=2)[2].tolist() == [1, 1, 1]


def test_a_small_vocabulary_is_kept_whole() -> None:
    probs = torch.tensor([[0.0, 0.999, 0.001, 0.0], [0.25, 0.25, 0.25, 0.25]])
    token_ids, kept, lengths = truncate_support(probs, mass=0.5, max_support=4)
    assert lengths.tolist() == [2, 4]
    assert token_ids[0].tolist()[:2] == [1, 2]
    assert sorted(token_ids[1].tolist()) == [0, 1, 2, 3]
    torch.testing.assert_close(kept[0], torch.tensor([0.999, 0.001, 0.0, 0.0]))


def test_judging_splits_the_target_into_support_and_tail() -> None:
    probs = torch.softmax(random_logits(6), dim=-1)
    support_ids = torch.stack([torch.randperm(VOCAB)[:8] for _ in range(6)])
    support_ids[2, 3:] = -1
    support_ids[3, :] = -1  # nothing proposed: the tail token is the bonus token
    support_ids[4, 7] = VOCAB + 3  # a padded draft vocabulary
    coins = torch.rand(6, dtype=torch.float64)
    target_probs, tail_mass, tail_token = judge_support(probs, support_ids, coins)
    torch.testing.assert_close(
        target_probs.sum(dim=-1, dtype=torch.float64) + tail_mass, torch.ones(6).double()
    )
    for i in range(6):
        inside = [t for t in support_ids[i].tolist() if 0 <= t < VOCAB]
        torch.testing.assert_close(target_probs[i, : len(inside)], probs[i, inside])
        assert (target_probs[i, len(inside) :] == 0).all()
        assert tail_token[i].item() not in inside
        assert 0 <= tail_token[i] < VOCAB
    assert tail_token[3] == draw(probs, coins)[3]
    assert tail_mass[3] == 1


def test_judging_without_a_tail() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    _, tail_mass, tail_token = judge_support(probs, torch.tensor([[1, 0, -1]]), doubles(0.5))
    assert (tail_mass.item(), tail_token.item()) == (0.0, -1)


def test_a_tiny_tail_is_not_lost_to_cancellation() -> None:
    probs = torch.tensor([[1.0, 1e-20, 0.0]])
    _, tail_mass, tail_token = judge_support(probs, torch.tensor([[0]]), doubles(0.5))
    assert tail_mass.item() == pytest.approx(1e-20)
    assert tail_token.item() == 1


def test_argmax_never_takes_an_excluded_token_and_prefers_low_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    log_probs = torch.tensor([[-torch.inf, -50.0, -torch.inf], [0.0, 0.0, 0.0]])
    noise = torch.tensor([[36.0, -3.0, 36.0], [1.0, 2.0, 2.0]], dtype=torch.float64)
    monkeypatch.setattr("specwire.rule.random.gumbel_noise", lambda *_: noise)
    coupled = Rows.of([row(rule=Rule.GUMBEL)] * 2)
    assert rows.choose_matched(log_probs, coupled).tolist() == [1, 1]
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    assert rows.choose_matched(logits, Rows.of([row(temperature=0)] * 2)).tolist() == [1, 0]


def test_top_logprobs() -> None:
    logits = random_logits(3)
    expected = torch.log_softmax(logits, dim=-1)
    token_ids = [np.array(each) for each in ([4], [0, VOCAB], [199, 7])]
    found = rows.position_logprobs(logits, token_ids, 5)
    beyond = torch.full((1,), -torch.inf)
    for log_probs, asked, each in zip(expected, token_ids, found, strict=True):
        ids = [*asked.tolist(), *log_probs.argsort(descending=True)[:5].tolist()]
        assert each.token_ids.tolist() == ids
        assert each.values.tolist() == pytest.approx(torch.cat([log_probs, beyond])[ids].tolist())
    none = rows.position_logprobs(logits, token_ids, 0)
    assert all(each.num_top == 0 for each in none)
    assert [each.token_ids.tolist() for each in none] == [asked.tolist() for asked in token_ids]


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.KSEQ])
def test_the_targets_numbers_are_those_of_the_round(rule: Rule) -> None:
    """A function of what the request says, so another replica draws the same."""
    cache = PagePool(4, 16).new_sequence()
    sequence = TokenSequence(SamplingParams(rule=rule, seed=5), 3, cache, 0)
    job = VerifyJob(sequence, 0, [9] * 7, proposal=Proposal(7, [1, 2], certain([1, 2])))
    job.start()
    drawn = uniforms_for(VerifyDecider.ask([job]).rows, Purpose.TARGET, torch.device("cpu"))
    assert drawn.tolist() == uniforms(5, Purpose.TARGET, [7, 8, 9], 7).tolist()
