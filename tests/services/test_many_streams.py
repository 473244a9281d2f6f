"""Hundreds of streams at once: no error, no token lost or doubled, nothing held afterwards."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from specwire import Fate, Token
from specwire.completion import Chunk, Completion
from tests.support import streams
from tests.support.harness import local_stack, started_services
from tests.support.streams import Faults, Plan

PLAN = Plan(num_streams=200, num_tokens=32)
NUM_ALONE = 8


@pytest.mark.serial
@pytest.mark.slow
def test_two_hundred_streams_at_once() -> None:
    faults = Faults()
    with (
        started_services() as services,
        local_stack(
            "emulated:step_ms=5",
            "emulated:step_ms=1,alpha=0.8",
            coordinator_options={"max_running": PLAN.num_streams},
        ) as stack,
    ):
        alone = [
            asyncio.run(streams.generate_all(stack.address, PLAN, faults, [i])) for i in range(NUM_ALONE)
        ]
        found = asyncio.run(streams.generate_all(stack.address, PLAN, faults))
        stack.assert_idle_within(1.0)
        status = stack.client.get_status()
        assert stack.status("verify").num_steps < PLAN.num_streams * PLAN.num_tokens / 8, "they share passes"
        for service in services.values():
            service.runner.pool.check_integrity()
    texts = [streams.token_ids(received) for received in found]
    streams.check(found, texts, PLAN, faults)
    streams.check([one for [one] in alone], texts[:NUM_ALONE], PLAN, faults)
    assert faults == Faults()
    for received in found:
        assert isinstance(received[-1], Completion)
        assert received[-1].speculation.draft_unavailable == ""
    assert (status.num_running, status.num_waiting) == (0, 0)
    assert status.num_finished == PLAN.num_streams + NUM_ALONE


# --- what the check itself must notice ------------------------------------------------------------


def chunk(first_index: int, *token_ids: int) -> Chunk:
    tokens = tuple(Token(token_id=token_id, text="", fate=Fate.ACCEPTED) for token_id in token_ids)
    return Chunk(text="", tokens=tokens, rejected=(), first_index=first_index)


@pytest.fixture(scope="module")
def completion() -> Completion:
    """Of three tokens."""
    with local_stack("emulated:step_ms=0") as stack:
        params = dataclasses.replace(PLAN.params(0), max_tokens=3)
        return stack.client.generate(params=params, prompt_token_ids=[1])


def test_a_stream_is_whole_when_each_index_comes_once(completion: Completion) -> None:
    assert streams.is_whole([chunk(0, 7), chunk(1, 8, 9), completion], 3)
    torn: dict[str, list[Chunk | Completion]] = {
        "lost": [chunk(0, 7), chunk(2, 9), completion],
        "doubled": [chunk(0, 7, 8), chunk(1, 8, 9), completion],
        "swapped": [chunk(1, 8, 9), chunk(0, 7), completion],
        "short": [chunk(0, 7, 8), completion],
        "no end": [chunk(0, 7), chunk(1, 8, 9)],
        "two ends": [chunk(0, 7, 8, 9), completion, completion],
        "nothing": [],
    }
    assert [name for name, received in torn.items() if streams.is_whole(received, 3)] == []


def test_other_tokens_are_noticed(completion: Completion) -> None:
    plan, faults = dataclasses.replace(PLAN, num_tokens=3), Faults()
    received: list[Chunk | Completion] = [chunk(0, 7, 8, 9), completion]
    streams.check([received, received], [[7, 8, 9], [7, 8, 8]], plan, faults)
    assert (faults.num_torn, faults.num_wrong) == (0, 1)
