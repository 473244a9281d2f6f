"""k-SEQ by algebra: what is emitted has the target's distribution, one token and a round of chains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from specwire.core import Proposal, Rule, SamplingParams, Verdict
from specwire.proposals import chains, tree
from specwire.rule import acceptance, kseq
from specwire.rule.acceptance import accept, accept_by_kseq, accept_by_rejection, acceptance_probability
from specwire.rule.kseq import Selection
from specwire.rule.random import Purpose, uniform
from specwire.support import Support

NUMS_DRAFTS = (1, 2, 4, 8)


def random_pair(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """What is drafted from, and the target on the same tokens, which may lack some mass."""
    draft = rng.gamma(rng.choice([0.2, 1.0, 5.0]), size=size) + 1e-6
    target = rng.gamma(rng.choice([0.2, 1.0, 5.0]), size=size) * (rng.random(size) < rng.choice([0.6, 1.0]))
    tail = rng.choice([0.0, 0.3]) if target.sum() else 1.0
    return draft / draft.sum(), target / max(target.sum(), 1e-300) * (1 - tail)


PAIRS = [random_pair(np.random.default_rng(seed), 2 + seed % 9) for seed in range(200)]


@pytest.mark.parametrize("num_drafts", NUMS_DRAFTS)
def test_one_token_has_the_targets_distribution(num_drafts: int) -> None:
    """P(accepted as v) + P(none is) · residual(v) = target(v), on the support and beyond it."""
    for draft, target in PAIRS:
        found = Selection(draft, target, num_drafts)
        coins = np.array([found.acceptance_probability(slot) for slot in range(len(draft))])
        # A draft token that is looked at is v and accepted, or goes on to the next one.
        once = draft * coins
        kept = once * sum((1 - once.sum()) ** j for j in range(num_drafts))
        residual, tail = found.residual(), 1 - target.sum()
        np.testing.assert_allclose(kept + residual, target, atol=1e-12)
        assert residual.sum() + tail == pytest.approx(1 - kept.sum(), abs=1e-12)
        assert found.num_effective * found.draft_accepted == pytest.approx(kept.sum(), abs=1e-12)
        assert 1 <= found.rho <= num_drafts


def test_acceptance_is_not_below_the_closed_form() -> None:
    """It grows with the number of drafts, and has the lower bound that ρ = k has: (1 - (1 - 1/k)^k) of
    Σ min(k · draft, target), which no selection exceeds."""
    for draft, target in PAIRS:
        selections = [Selection(draft, target, k) for k in NUMS_DRAFTS]
        accepted = [each.num_effective * each.draft_accepted for each in selections]
        assert all(more > less - 1e-12 for less, more in itertools.pairwise(accepted))
        for k, found in zip(NUMS_DRAFTS, accepted, strict=True):
            bound = (1 - (1 - 1 / k) ** k) * np.minimum(k * draft, target).sum()
            assert found > bound - 1e-12


def test_the_smallest_factor_is_found() -> None:
    """With a smaller one the residual would be negative somewhere, unless nothing is left of it."""
    for draft, target in PAIRS:
        for k in NUMS_DRAFTS[1:]:
            rho = kseq.find_rho(draft, target, k)
            below = 1 + 0.999 * (rho - 1)
            beta = np.minimum(draft, target / below).sum()
            assert rho == 1 or sum((1 - beta) ** j for j in range(k)) > below


def test_one_draft_is_the_token_rule_to_the_last_bit() -> None:
    for draft, target in PAIRS:
        support = Support(np.arange(len(draft)), draft.astype(np.float32))
        own = support.probs.astype(np.float64) / support.probs.sum(dtype=np.float64)
        found = Selection(own, target, 1)
        for slot, (theirs, ours) in enumerate(zip(own.tolist(), target.tolist(), strict=True)):
            assert found.acceptance_probability(slot) == acceptance_probability(theirs, ours)
        weights, _ = acceptance.residual(support, target, 0.0)
        assert found.residual().tolist() == weights.tolist()


# --- a round of several chains ----------------------------------------------------------------------------


class Choices:
    """Choices of one way through a computation, and how likely it is: the given ones, then always the first.

    Attributes:
        taken: what was chosen.
        others: by choice, those that were possible.
        probability: of all of them.
    """

    def __init__(self, given: Sequence[int]) -> None:
        self.given, self.probability = given, 1.0
        self.taken, self.others = list[int](), list[list[int]]()

    def of(self, probs: Sequence[float]) -> int:
        possible = [i for i, prob in enumerate(probs) if prob > 0]
        number = len(self.taken)
        chosen = self.given[number] if number < len(self.given) else possible[0]
        self.taken.append(chosen)
        self.others.append(possible)
        self.probability *= probs[chosen]
        return chosen


def every_way(run: Callable[[Choices], Any]) -> Iterator[tuple[float, Any]]:
    """The probability of each way through it, and what comes of that."""
    to_do: list[list[int]] = [[]]
    while to_do:
        choices = Choices(to_do.pop())
        found = run(choices)
        yield choices.probability, found
        for place in range(len(choices.given), len(choices.taken)):
            before = choices.taken[:place]
            to_do += [[*before, each] for each in choices.others[place] if each != choices.taken[place]]


class Coin:
    """A uniform number, of which only comparisons matter."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def __lt__(self, prob: float) -> bool:
        return self._choices.of([1 - prob, prob]) == 1


class TargetTokens(Sequence[int]):
    """The target's own tokens, drawn when they are looked at."""

    def __init__(self, rows: Sequence[np.ndarray], choices: Choices) -> None:
        self._rows, self._choices, self._drawn = rows, choices, dict[int, int]()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        if row not in self._drawn:
            probs = self._rows[row]
            self._drawn[row] = self._choices.of(probs / probs.sum()) if probs.any() else -1
        return self._drawn[row]


LENGTH, VOCAB = 2, 3


class Models:
    """A draft and a target, by the tokens before; the draft is cut to `num_kept` tokens."""

    def __init__(self, seed: int, num_kept: int = VOCAB) -> None:
        rng = np.random.default_rng(seed)
        prefixes = [p for n in range(LENGTH + 1) for p in itertools.product(range(VOCAB), repeat=n)]
        self.target = {prefix: rng.dirichlet([0.8] * VOCAB) for prefix in prefixes}
        cut = {prefix: np.sort(rng.permutation(VOCAB)[:num_kept]) for prefix in prefixes}
        self.draft = {
            prefix: Support(ids, rng.dirichlet([0.8] * num_kept).astype(np.float32))
            for prefix, ids in cut.items()
        }

    def joint(self) -> np.ndarray:
        """Of the first LENGTH + 1 tokens."""
        found = np.ones([VOCAB] * (LENGTH + 1))
        for tokens in itertools.product(range(VOCAB), repeat=LENGTH + 1):
            found[tokens] = np.prod([self.target[tokens[:n]][tokens[n]] for n in range(LENGTH + 1)])
        return found

    def drafted(self, choices: Choices, num_chains: int) -> Proposal:
        token_ids: list[list[int]] = []
        supports: list[list[Support]] = []
        for _ in range(num_chains):
            own: list[int] = []
            for _ in range(LENGTH):
                support = self.draft[tuple(own)]
                probs = support.probs.astype(np.float64)
                own.append(int(support.token_ids[choices.of(probs / probs.sum())]))
            token_ids.append(own)
            supports.append([self.draft[tuple(own[:n])] for n in range(LENGTH)])
        return chains.merged(token_ids, supports, 0)

    def verdict(self, proposal: Proposal, choices: Choices) -> Verdict:
        parents, rows = tree.parents_of(proposal), list[np.ndarray]()
        for node in range(-1, len(proposal.token_ids)):
            path = tuple(proposal.token_ids[each] for each in tree.path_to(parents, node))
            rows.append(self.target[path])
        outside = [row.copy() for row in rows]
        for row, support in zip(outside, proposal.supports, strict=False):
            row[support.token_ids] = 0
        on_supports = [row[support.token_ids] for row, support in zip(rows, proposal.supports, strict=False)]
        masses = [float(row.sum()) for row in outside[:-1]]
        return Verdict(0, TargetTokens(outside, choices), on_supports, masses)


def joint_of_rounds(models: Models, num_chains: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The distribution of the first LENGTH + 1 tokens, where the target goes on after a shorter round."""

    def round_of(choices: Choices) -> tuple[int, ...]:
        proposal = models.drafted(choices, num_chains)
        verdict = models.verdict(proposal, choices)
        monkeypatch.setattr(acceptance, "_draw", lambda weights, _: choices.of(weights / weights.sum()))
        outcome = accept_by_kseq(proposal, verdict, lambda i, chain: Coin(choices), [0.0] * LENGTH)  # type: ignore[arg-type, return-value]
        return (*(proposal.token_ids[node] for node in outcome.path), outcome.next_token)

    found = np.zeros([VOCAB] * (LENGTH + 1))
    for probability, emitted in every_way(round_of):
        for rest in itertools.product(range(VOCAB), repeat=LENGTH + 1 - len(emitted)):
            tokens = (*emitted, *rest)
            left = [models.target[tokens[:n]][tokens[n]] for n in range(len(emitted), LENGTH + 1)]
            found[tokens] += probability * np.prod(left)
    return found


@pytest.mark.parametrize(("num_chains", "num_kept"), [(2, VOCAB), (2, 2), (3, 2)])
def test_a_round_of_chains_has_the_targets_joint_distribution(
    num_chains: int, num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way that two or three chains of two tokens can be drawn and judged, by the code that judges."""
    for seed in range(2 if num_chains == 2 else 1):
        models = Models(seed, num_kept)
        found = joint_of_rounds(models, num_chains, monkeypatch)
        np.testing.assert_allclose(found, models.joint(), atol=2e-7)  # drafts are float32


def test_wrong_selections_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: a token of two chains is judged once; it is judged before those between them; ρ is 1."""
    models, first = Models(1, 2), acceptance._first_accepted

    def once(proposal: Proposal, selection: Selection, row: int, candidates: Any, uniform_of: Any) -> Any:
        distinct = {node: chain for chain, node in reversed(candidates)}
        return first(proposal, selection, row, [(c, n) for n, c in distinct.items()], uniform_of)

    def grouped(proposal: Proposal, selection: Selection, row: int, candidates: Any, uniform_of: Any) -> Any:
        order = [node for _, node in candidates]
        ordered = sorted(candidates, key=lambda each: order.index(each[1]))
        return first(proposal, selection, row, ordered, uniform_of)

    def error(num_chains: int) -> float:
        return float(np.abs(joint_of_rounds(models, num_chains, monkeypatch) - models.joint()).max())

    for wrong, num_chains in ((once, 2), (grouped, 3)):
        with monkeypatch.context() as changed:
            changed.setattr(acceptance, "_first_accepted", wrong)
            assert error(num_chains) > 1e-3
    with monkeypatch.context() as changed:
        changed.setattr(kseq, "find_rho", lambda *_: 1.0)
        assert error(2) > 1e-3


def test_numbers_are_of_position_and_chain() -> None:
    """What is decided follows from the seed; the numbers of one chain are those of the token rule."""
    models, choices = Models(2), Choices([])
    for seed in range(50):
        proposal = models.drafted(choices, 1)
        verdict = models.verdict(proposal, choices)
        proposal.base_len = verdict.base_len = 7
        coins = [uniform(seed, Purpose.ACCEPT, 7 + i, 7) for i in range(LENGTH)]
        residuals = [uniform(seed, Purpose.RESIDUAL, 7 + i, 7) for i in range(LENGTH)]
        params = SamplingParams(rule=Rule.KSEQ)
        found = accept(proposal, verdict, params, seed)
        plain = Proposal(7, proposal.token_ids, proposal.supports)
        expected = accept_by_rejection(plain, verdict, coins, residuals)
        assert (list(found.path), found.next_token) == (list(expected.path), expected.next_token)
