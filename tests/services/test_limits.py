"""Limits of each service over real gRPC: who is over them is refused with a time to come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specwire import AsyncClient, Completion, ResourceExhaustedError, SamplingParams
from tests.support.harness import local_stack
from tests.support.pairs import save_good_draft, save_target

PROMPT = [5, 9, 11, 2, 7]
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("limits")
    return save_target(directory / "target"), save_good_draft(directory / "draft")


async def flood(address: str, num_requests: int) -> list[Completion | BaseException]:
    async with AsyncClient(address) as client:
        requests = [client.generate(params=LONG, prompt_token_ids=PROMPT) for _ in range(num_requests)]
        return await asyncio.gather(*requests, return_exceptions=True)


def test_a_full_coordinator_refuses_and_what_it_took_is_served(pair: tuple[Path, Path]) -> None:
    with local_stack(*pair, coordinator_options={"max_running": 2, "max_waiting": 3}) as stack:
        results = asyncio.run(flood(stack.address, 12))
        refused = [result for result in results if isinstance(result, ResourceExhaustedError)]
        served = [result for result in results if isinstance(result, Completion)]
        assert (len(served), len(refused)) == (5, 7)
        assert all(error.retry_after_ms for error in refused)
        assert len({done.token_ids for done in served}) == 1
        stack.assert_idle_within(1.0)


@pytest.mark.slow
def test_a_full_draft_service_costs_speed_only(pair: tuple[Path, Path]) -> None:
    with local_stack(*pair, draft_options={"max_sequences": 1}) as stack:
        results = asyncio.run(flood(stack.address, 4))
        served = [done for done in results if isinstance(done, Completion)]
        assert len(served) == 4
        assert len({done.token_ids for done in served}) == 1
        without = [done for done in served if "sequences are open" in done.speculation.draft_unavailable]
        assert len(without) == 3
        again = stack.client.generate(params=LONG, prompt_token_ids=PROMPT)
        assert again.speculation.draft_unavailable == ""
