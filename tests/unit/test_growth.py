"""Trees that grow best first, and the calibration of a draft's scores that says which node is best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specwire.core import MAX_TREE_NODES
from specwire.proposals import tree
from specwire.proposals.growth import NUM_RANKS, Calibration, TreeGrowth

SHARES = [0.45, 0.25, 0.15, 0.09]


def grown(num_nodes: int, max_depth: int, seed: int) -> TreeGrowth:
    """A tree whose candidates have random shares, grown until no node is left to expand."""
    rng = np.random.default_rng(seed)
    growth = TreeGrowth(num_nodes, max_depth, Calibration())
    opened = [-1]
    while opened:
        for node in opened:
            shares = np.sort(rng.dirichlet(np.full(NUM_RANKS, 0.3)))[::-1]
            growth.add(node, rng.permutation(50)[:NUM_RANKS].tolist(), shares.tolist())
        opened = growth.expand(8)
    return growth


class TestGrowth:
    @pytest.mark.parametrize(
        ("num_nodes", "max_depth"), [(1, 1), (8, 1), (9, 2), (32, 6), (MAX_TREE_NODES, MAX_TREE_NODES)]
    )
    @pytest.mark.parametrize("seed", range(5))
    def test_a_proposal_is_a_tree_of_the_best_nodes(self, num_nodes: int, max_depth: int, seed: int) -> None:
        """Connected, parents first, no deeper than asked, and no node left out is worth more; no more are
        expanded than a tree may have, each once."""
        growth = grown(num_nodes, max_depth, seed)
        proposal, chosen = growth.proposal(7), growth.best()
        assert proposal.base_len == 7
        assert len(proposal.token_ids) == num_nodes
        assert tree.checked_parents(proposal.parents, num_nodes) in ([], proposal.parents)
        assert max(tree.depths(proposal.parents)) < max_depth
        assert [growth.parents[node] for node in chosen if growth.parents[node] not in (-1, *chosen)] == []
        left_out = set(range(len(growth.worths))) - set(chosen)
        least = min(growth.worths[node] for node in chosen)
        assert all(growth.worths[node] <= least for node in left_out)
        assert len(growth.expanded) == len(set(growth.expanded)) <= MAX_TREE_NODES

    def test_the_best_nodes_are_expanded_first_and_never_twice(self) -> None:
        growth = TreeGrowth(16, 8, Calibration())
        growth.add(-1, [5, 6, 7, 8], SHARES)
        assert growth.expand(2) == [0, 1]
        growth.add(0, [1, 2, 3, 4], SHARES)
        growth.add(1, [1, 2, 3, 4], SHARES)
        following = growth.expand(2)
        assert growth.expanded == [0, 1, *following]
        best = sorted((node for node in range(2, 12)), key=lambda node: -growth.worths[node])
        assert following == best[:2]

    def test_a_prefix_without_candidates_has_no_tree(self) -> None:
        growth = TreeGrowth(8, 4, Calibration())
        growth.add(-1, [], [])
        assert growth.expand(8) == []
        assert growth.proposal(3).token_ids == []

    def test_the_path_that_the_target_took_is_compared_and_nothing_else(self) -> None:
        """Two nodes on it have candidates; those of a node beside it, and of a leaf, are not judged."""
        heard: list[tuple[Sequence[float], int | None]] = []

        class Heard(Calibration):
            def add(self, shares: Sequence[float], rank: int | None) -> None:
                heard.append((shares, rank))

        growth = TreeGrowth(16, 4, Heard())
        growth.add(-1, [5, 6], [0.5, 0.3])
        growth.add(0, [7, 8], [0.6, 0.2])
        growth.add(1, [7, 8], [0.9, 0.05])
        growth.learn([5, 8, 9])
        assert heard == [([0.5, 0.3], 0), ([0.6, 0.2], 1)]
        heard.clear()
        growth.learn([99, 8])
        assert heard == [([0.5, 0.3], None)], "no candidate: what follows is unknown"


def trained(frequencies: Sequence[float]) -> Calibration:
    """The target takes the candidate of each rank so often, whatever the draft's shares say."""
    rng, calibration = np.random.default_rng(1), Calibration()
    ranks = rng.choice(len(frequencies) + 1, 3000, p=[*frequencies, 1 - sum(frequencies)])
    for rank in ranks.tolist():
        calibration.add(SHARES, rank if rank < len(frequencies) else None)
    return calibration


class TestCalibration:
    def test_before_anything_is_known_the_shares_count(self) -> None:
        """To the precision of the ranges that they are counted by."""
        assert Calibration().probabilities(SHARES) == pytest.approx(SHARES, rel=0.25)

    @pytest.mark.parametrize("frequencies", [(0.7, 0.1, 0.05, 0.05), (0.2, 0.2, 0.2, 0.2)])
    def test_with_time_what_was_counted_does(self, frequencies: tuple[float, ...]) -> None:
        """Within three standard errors of the last 200 rounds, which is how far it looks back."""
        found = trained(frequencies).probabilities(SHARES)
        errors = [3 * (p * (1 - p) / 200) ** 0.5 for p in frequencies]
        assert [abs(a - b) < e for a, b, e in zip(found, frequencies, errors, strict=True)] == [True] * 4
        assert found != pytest.approx(SHARES, rel=0.25), "the shares were meant to be wrong"

    def test_another_range_of_shares_has_learnt_nothing(self) -> None:
        """The negative control: what is counted belongs to the share that the draft gave."""
        sure = [0.95, 0.025, 0.005, 0.004]
        assert trained((0.2,) * 4).probabilities(sure) == Calibration().probabilities(sure)

    def test_it_follows_a_text_that_changes(self) -> None:
        calibration = trained((0.7, 0.1, 0.05, 0.05))
        before = calibration.probabilities(SHARES)[0]
        for _ in range(400):
            calibration.add(SHARES, None)
        assert calibration.probabilities(SHARES)[0] < before / 4
