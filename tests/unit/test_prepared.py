"""Proposals at hand: found by the tokens they follow, and by nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from draft_service.forecast import Forecast, SharedForecast
from specwire.core import Proposal
from specwire.proposals.prepared import PreparedProposals
from specwire.support import Support

PROMPT = [1, 2, 3]


def proposal(base_len: int, *token_ids: int) -> Proposal:
    supports = [Support(np.array([token_id]), np.ones(1, np.float32)) for token_id in token_ids]
    return Proposal(base_len, token_ids, supports)


class TestPrepared:
    @pytest.fixture
    def prepared(self) -> PreparedProposals:
        made = PreparedProposals(8)
        made.add([7, 8], proposal(3, 20, 21))
        made.add([7, 9], proposal(3, 30, 31))
        return made

    def test_it_is_found_when_its_path_was_committed(self, prepared: PreparedProposals) -> None:
        found = prepared.take([*PROMPT, 7, 9])
        assert found is not None
        assert (found.proposal.base_len, found.proposal.token_ids) == (5, (30, 31))
        assert [each.token_ids[0] for each in found.proposal.supports] == [30, 31]

    def test_it_waits_for_the_rest_of_its_path(self, prepared: PreparedProposals) -> None:
        assert prepared.take([*PROMPT, 7]) is None
        assert prepared.take([*PROMPT, 7, 8]) is not None

    def test_what_was_not_foreseen_drops_it_for_good(self, prepared: PreparedProposals) -> None:
        assert prepared.take([*PROMPT, 6]) is None
        assert prepared.take([*PROMPT, 7, 8]) is None

    def test_what_is_committed_by_now_is_cut_off(self, prepared: PreparedProposals) -> None:
        found = prepared.take([*PROMPT, 7, 8, 20])
        assert found is not None
        assert (found.proposal.base_len, found.proposal.token_ids) == (6, (21,))
        assert [each.token_ids[0] for each in found.proposal.supports] == [21]
        assert prepared.take([*PROMPT, 7, 8, 20, 21]) is None

    def test_the_last_is_taken_however_long_others_are(self, prepared: PreparedProposals) -> None:
        """How long one is may depend on tokens that were not judged, as where the draft fails after them."""
        prepared.add([], proposal(4, 8, 20, 21, 22))
        found = prepared.take([*PROMPT, 7, 8])
        assert found is not None
        assert found.proposal.token_ids == (20, 21)

    def test_one_that_is_used_up_is_passed_over(self, prepared: PreparedProposals) -> None:
        prepared.add([7, 8, 20], proposal(3))
        found = prepared.take([*PROMPT, 7, 8, 20])
        assert found is not None
        assert found.proposal.token_ids == (21,)

    def test_an_answer_for_more_than_was_committed_is_no_use(self) -> None:
        prepared = PreparedProposals(8)
        prepared.add([], proposal(9, 1, 2))
        assert prepared.take(PROMPT) is None


class TestForecast:
    def test_outcomes_are_a_distribution(self) -> None:
        """With every rank named, nothing is left but that no candidate follows."""
        forecast = Forecast(SharedForecast())
        for num_accepted in (0, 1, 2, 3, 3, 3):
            forecast.add(3, num_accepted, 0)
        candidates = [[10 * k + r for r in range(8)] for k in range(4)]
        outcomes = forecast.outcomes([1, 2, 3], candidates, least=0.0)
        assert 0.8 < sum(likely.probability for likely in outcomes) <= 1 + 1e-9
        assert outcomes == sorted(outcomes, key=lambda likely: -likely.probability)
        assert {len(likely.token_ids) for likely in outcomes} == {1, 2, 3, 4}
        assert all(likely.token_ids[:-1] == (1, 2, 3)[: likely.token_ids[-1] // 10] for likely in outcomes)

    def test_it_follows_the_text(self) -> None:
        shared = SharedForecast()
        easy, hard = Forecast(shared), Forecast(shared)
        for _ in range(30):
            easy.add(4, 4, 0)
            hard.add(4, 0, 1)
        names = [range(8)] * 5
        assert len(easy.outcomes(range(4), names, 0.0)[0].token_ids) == 5
        assert len(hard.outcomes(range(4), names, 0.0)[0].token_ids) == 1
        assert sum(easy.bonus_probabilities(4)) > 5 * sum(hard.bonus_probabilities(4))

    def test_the_unlikely_is_left_out(self) -> None:
        forecast = Forecast(SharedForecast())
        names = [range(8)] * 5
        every = forecast.outcomes(range(4), names, least=0.0)
        assert len(every) == 40
        assert forecast.outcomes(range(4), names, least=0.01) == [
            each for each in every if each.probability >= 0.01
        ]
