"""The loop of a beam search without a network: equal texts with any draft, fewer rounds with a good one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coordinator.beams.drafting import BeamDrafts
from coordinator.beams.followers import Followers, together
from coordinator.beams.planning import BeamPlanner, SharedBeamCosts
from coordinator.beams.search import BeamGeneration
from coordinator.cost import Cost
from coordinator.generation import Plan, Round
from coordinator.ledger import Ledger
from specwire.core import Logprobs, ModelInfo, Proposal, Verdict
from specwire.errors import ServiceUnavailableError
from specwire.rule.beam_search import BeamRules, BeamSearch, EarlyStopping
from specwire.telemetry import tracing

VOCAB = 12
END = 11
PROMPT = [1, 2, 3]
NUM_BEAMS = 4
RULES = BeamRules(
    num_beams=NUM_BEAMS,
    max_tokens=30,
    end_ids=frozenset([END]),
    early_stopping=EarlyStopping.NEVER,
    length_penalty=0.5,
)
TABLE = np.log(np.random.default_rng(5).dirichlet(np.full(VOCAB, 0.5), (VOCAB, VOCAB))).astype(np.float32)
"""Log probabilities after the last two tokens."""


def row(tokens: Sequence[int], num_top: int) -> Logprobs:
    values = TABLE[tokens[-2], tokens[-1]]
    best = np.argsort(-values, kind="stable")[:num_top]
    return Logprobs(best, values[best], len(best))


def path(proposal: Proposal, node: int) -> list[int]:
    return [] if node < 0 else [*path(proposal, proposal.parent(node)), proposal.token_ids[node]]


class Peer:
    """Keeps what it was sent, from where it was rewound to: as a service with `base_len` does."""

    unavailable = ""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.num_sent = self.num_calls = 0

    def rewind(self, length: int) -> None:
        self.num_sent = min(self.num_sent, length)

    def commit(self, committed: Sequence[int]) -> None:
        """What is sent must make up the same tokens."""
        self.held = [*self.held[: self.num_sent], *committed[self.num_sent :]]
        assert self.held == list(committed)
        self.num_sent = len(committed)
        self.num_calls += 1

    def close(self) -> None:
        """Holds nothing."""


class Target(Peer):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    async def verify(
        self, committed: Sequence[int], proposal: Proposal, parent: tracing.Span
    ) -> tuple[Verdict, Cost]:
        self.commit(committed)
        assert proposal.base_len == len(committed)
        num = len(proposal.token_ids)
        self.sizes.append(num)
        rows = [row([*committed, *path(proposal, node)], RULES.num_top) for node in range(-1, num)]
        return Verdict(len(committed), [0] * (num + 1), logprobs=rows), Cost()


class Draft(Peer):
    """Proposes the likeliest tokens after each node, or the least likely ones."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self._sign = sign

    async def propose(
        self, committed: Sequence[int], plan: Plan, parent: tracing.Span
    ) -> tuple[Proposal, Cost]:
        self.commit(committed)
        found, depths = Proposal(len(committed), [], parents=[], source="draft"), {-1: 0}
        token_ids, parents = list[int](), list[int]()
        for node in range(-1, plan.num_draft_tokens):
            if node >= len(token_ids) or depths[node] == plan.max_depth:
                continue
            before = [*committed, *path(Proposal(0, token_ids, parents=parents), node)]
            for token_id in np.argsort(self._sign * TABLE[before[-2], before[-1]])[:3].tolist():
                depths[len(token_ids)] = depths[node] + 1
                token_ids.append(token_id)
                parents.append(node)
        found.token_ids, found.parents = token_ids, parents
        return found.first(plan.num_draft_tokens), Cost()


class Turns:
    may_start = True

    async def wait(self) -> None:
        """Never."""


def plain() -> list[tuple[list[int], float]]:
    """The search alone, with rows made as it asks for them."""
    search = BeamSearch(RULES)
    while not search.ended:
        beams = [each.beam for each in search.live]
        search.step({beam: row([*PROMPT, *beam.tokens()], RULES.num_top) for beam in beams})
    return [(each.beam.tokens(), float(each.score)) for each in search.finished]


class Search:
    """One that has ended, with its peers."""

    def __init__(
        self, drafts: Sequence[Draft], shape: tuple[int, int], kind: type[Target], **info: Any
    ) -> None:
        model: dict[str, Any] = {
            "name": "large",
            "vocab_size": VOCAB,
            "context_len": 512,
            "trees": True,
        } | info
        request: Any = SimpleNamespace(prompt_token_ids=PROMPT, beam_rules=RULES, target=ModelInfo(**model))
        self.targets = [kind() for _ in range(NUM_BEAMS)]
        generation = BeamGeneration(
            request,
            BeamDrafts(drafts, PROMPT),
            Followers(self.targets, PROMPT),
            planner=BeamPlanner(*shape, SharedBeamCosts()),
            ledger=Ledger(),
            tracer=tracing.Tracing(),
            parent=tracing.NO_SPAN,
            turns=Turns(),
        )
        self.rounds = asyncio.run(_taken(generation))
        self.found = [(each.beam.tokens(), float(each.score)) for each in generation.finished]

    @property
    def sizes(self) -> list[int]:
        """Nodes of each request to a target."""
        return [size for target in self.targets for size in target.sizes]

    @property
    def num_steps(self) -> int:
        return len(self.rounds) + sum(done.outcome.num_accepted for done in self.rounds)


async def _taken(generation: BeamGeneration) -> list[Round]:
    return [done async for done in generation.rounds()]


def searched(
    sign: int = 0, shape: tuple[int, int] = (0, 0), kind: type[Target] = Target, **info: Any
) -> Search:
    """Args:
    sign: -1 for a good draft, 1 for a hostile one, 0 for none.
    """
    return Search([Draft(sign) for _ in range(NUM_BEAMS)] if sign else [], shape, kind, **info)


@pytest.mark.parametrize("sign", [-1, 1], ids=["good", "hostile"])
@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (9, 2), (12, 3)])
def test_texts_do_not_depend_on_the_draft(sign: int, shape: tuple[int, int]) -> None:
    """Nor on the shape of what it proposes; a good one saves rounds, and counts say so."""
    search = searched(sign, shape)
    assert search.found == plain()
    assert search.num_steps == RULES.max_tokens
    assert (len(search.rounds) < RULES.max_tokens) == (sign < 0 and shape[1] > 0)
    assert max(search.sizes) <= 64


@pytest.mark.parametrize("info", [{"trees": False}, {"context_len": 33}])
def test_beams_that_do_not_fit_into_a_tree_are_run_in_several(info: dict[str, Any]) -> None:
    """Of a target without trees, and near the end of the context; at once, so that a round is a step."""
    search = searched(-1, (3, 0), **info)
    assert search.found == plain()
    assert len(search.rounds) <= RULES.max_tokens
    assert len(search.sizes) > len(search.rounds)
    assert all(size <= 3 if "trees" in info else size <= 30 for size in search.sizes)


def test_a_wrong_row_shows() -> None:
    """The negative control: rows of the node before change the texts."""

    class Late(Target):
        async def verify(self, *args: Any) -> tuple[Verdict, Cost]:
            verdict, cost = await super().verify(*args)
            verdict.logprobs = [verdict.logprobs[0], *verdict.logprobs[:-1]]
            return verdict, cost

    assert searched(kind=Late).found != plain()


def test_a_failure_ends_all_calls_of_the_round() -> None:
    """None waits for ever."""
    cancelled = []

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    async def failing() -> None:
        await asyncio.sleep(0)
        raise ServiceUnavailableError("gone")

    async def both() -> None:
        try:
            await together([waiting(), failing()])
        finally:
            await asyncio.sleep(0)

    with pytest.raises(ServiceUnavailableError):
        asyncio.run(both())
    assert cancelled == [True]
