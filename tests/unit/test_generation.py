"""The order of work in a generation: rounds are taken one by one, and nothing is asked for after the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cost import Cost
from coordinator.generation import Generation, Plan, Round
from coordinator.ledger import Ledger
from specwire.core import ModelInfo, Outcome, Proposal, SamplingParams, Verdict
from specwire.errors import ServiceUnavailableError
from specwire.telemetry import tracing

PROMPT = [1, 2, 3]


class Peers:
    """Draft, verify and planner: every token is the next number, and `events` is the order of all work."""

    unavailable = ""
    limit = 1

    def __init__(self, fails_at: int | None = None) -> None:
        self.events: list[str] = []
        self.may_go_on = True
        self._fails_at = fails_at

    def plan(self) -> Plan:
        return Plan(1)

    async def propose(
        self, committed: Sequence[int], plan: Plan, parent: tracing.Span
    ) -> tuple[Proposal, Cost]:
        self.events.append(f"ask {len(committed)}")
        await asyncio.sleep(0)
        return Proposal(len(committed), [len(committed)] * plan.num_draft_tokens), Cost()

    async def verify(
        self, committed: Sequence[int], proposal: Proposal, parent: tracing.Span, *, is_plain: bool = False
    ) -> tuple[Verdict, Cost]:
        if len(committed) == self._fails_at:
            raise ServiceUnavailableError("gone")
        return Verdict(
            len(committed), [len(committed) + i for i in range(len(proposal.token_ids) + 1)]
        ), Cost()

    def begun(self, committed: Sequence[int], outcome: Outcome) -> None:
        """Waits for each request."""

    def follow(self, committed: Sequence[int], begun: Proposal, plan: Plan) -> Cost:
        raise AssertionError("nothing is begun")

    def observe(self, done: Round, elapsed_ns: int = 0) -> None:
        """Learns nothing."""

    def close(self) -> None:
        """Holds nothing."""

    @property
    def may_start(self) -> bool:
        return self.may_go_on or not self.events

    async def wait(self) -> None:
        self.events.append("wait")
        self.may_go_on = True


def generation(peers: Peers, **params: Any) -> Generation:
    sampling = SamplingParams(temperature=0, seed=1, **params)
    request: Any = SimpleNamespace(
        keyed_params=sampling,
        prompt_token_ids=PROMPT,
        generated_token_ids=[],
        target=ModelInfo(name="large", vocab_size=64, context_len=64),
        prompt_len=len(PROMPT),
        end_ids=frozenset(sampling.stop_token_ids),
    )
    return Generation(
        request=request,
        drafter=peers,
        verifier=peers,
        planner=peers,
        ledger=Ledger(),
        tracer=tracing.Tracing(),
        trace_detail=False,
        parent=tracing.NO_SPAN,
        turns=peers,
    )


async def taken(peers: Peers, most: int = 100, **params: Any) -> list[list[int]]:
    """Tokens of the rounds, noted among the events when they are taken."""
    found: list[list[int]] = []
    rounds = generation(peers, **params).rounds()
    async for done in rounds:
        peers.events.append(f"take {done.proposal.base_len}")
        found.append(done.token_ids)
        if len(found) == most:
            break
    await rounds.aclose()
    return found


async def test_a_round_is_asked_for_when_the_one_before_was_taken() -> None:
    peers = Peers()
    assert await taken(peers, max_tokens=5) == [[3, 4], [5, 6], [7]]
    assert peers.events == ["ask 3", "take 3", "ask 5", "take 5", "ask 7", "take 7"]


async def test_nothing_is_asked_for_after_the_last_round_that_is_taken() -> None:
    """Be it for a stop string, a token that ends the generation, or a client that hung up."""
    peers = Peers()
    assert await taken(peers, most=2, max_tokens=100) == [[3, 4], [5, 6]]
    assert peers.events == ["ask 3", "take 3", "ask 5", "take 5"]


async def test_each_round_waits_for_its_turn() -> None:
    peers = Peers()
    peers.may_go_on = False
    await taken(peers, max_tokens=4)
    assert peers.events == ["ask 3", "take 3", "wait", "ask 5", "take 5"]


async def test_a_round_is_taken_before_the_failure_of_the_next() -> None:
    peers = Peers(fails_at=5)
    with pytest.raises(ServiceUnavailableError):
        await taken(peers, max_tokens=8)
    assert peers.events == ["ask 3", "take 3", "ask 5"]
