"""The order of work in a generation: what the peers wait for first, and nothing after the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.begun import Begun
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
        try:
            await asyncio.sleep(0)
        except GeneratorExit:
            self.events.append("given up")
            raise
        return Proposal(len(committed), [len(committed)] * plan.num_draft_tokens), Cost()

    async def verify(
        self, committed: Sequence[int], proposal: Proposal, parent: tracing.Span
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

    def may_start(self, num_tokens: int) -> bool:
        return self.may_go_on or num_tokens == 0

    async def wait(self) -> None:
        raise AssertionError("a round may always start")


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
        request,
        peers,
        peers,
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


async def test_the_next_request_leaves_before_a_round_is_taken() -> None:
    peers = Peers()
    assert await taken(peers, max_tokens=5) == [[3, 4], [5, 6], [7]]
    assert peers.events == ["ask 3", "ask 5", "take 3", "ask 7", "take 5", "take 7"]


@pytest.mark.parametrize("params", [{"stop": "x"}, {"stop_token_ids": (3, 5)}])
async def test_nothing_is_asked_for_after_what_may_be_the_end(params: dict[str, Any]) -> None:
    """A text that has to be looked at first, or a token that ends the generation."""
    peers = Peers()
    assert await taken(peers, most=2, **params) == [[3, 4], [5, 6]]
    assert peers.events == ["ask 3", "take 3", "ask 5", "take 5"]


async def test_without_a_turn_the_round_is_taken_first() -> None:
    peers = Peers()
    peers.may_go_on = False
    await taken(peers, max_tokens=4)
    assert peers.events == ["ask 3", "take 3", "ask 5", "take 5"]


async def test_a_request_under_way_is_given_up_with_the_generation() -> None:
    peers = Peers()
    await taken(peers, most=1, max_tokens=8)
    assert peers.events == ["ask 3", "ask 5", "take 3", "given up"]


async def test_a_round_is_taken_before_the_failure_of_the_next() -> None:
    peers = Peers(fails_at=5)
    with pytest.raises(ServiceUnavailableError):
        await taken(peers, max_tokens=8)
    assert peers.events == ["ask 3", "ask 5", "take 3"]


async def test_what_has_begun_takes_a_cancellation_where_it_waits() -> None:
    noted: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            noted.append("ended")

    async def main() -> None:
        begun = Begun(wait())
        await asyncio.sleep(0)
        await begun

    task = asyncio.create_task(main())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert noted == ["ended"]


async def test_what_ends_at_once_is_there() -> None:
    async def answer() -> int:
        return 7

    assert await Begun(answer()) == 7
