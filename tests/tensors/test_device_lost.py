"""A device that loses its memory: the engine begins again from the tokens, and gives up in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest

from specwire import SamplingParams, ServiceUnavailableError
from specwire.core import Proposal
from specwire.engine.batch import Feed
from specwire.engine.device import Decide, DeviceLostError
from specwire.engine.emulated import EmulatedModel, EmulatedRunner
from specwire.engine.loop import Engine
from specwire.engine.threads import ComputeThread
from tests.support.fixtures import entered
from tests.support.harness import LoopThread
from tests.support.integrity import check_integrity
from tests.support.jobs import result_of
from verify_service.verifier import VerifyDecider, VerifyJob

PARAMS = SamplingParams(temperature=0, seed=1)
PROMPT = list(range(3, 43))


class LosableRunner(EmulatedRunner):
    """Dies in the steps whose numbers it is told; notes how many tokens each step ran."""

    def __init__(self) -> None:
        super().__init__(EmulatedModel(step_ms=0.1), num_pages=64, page_size=4)
        self.dies: set[int] = set()
        self.steps: list[int] = []
        self.num_recoveries = 0
        self.comes_back = True
        self.is_lost = False

    def run(self, feeds: Sequence[Feed], question: Any, decide: Decide) -> Any:
        self.check()
        self.steps.append(sum(len(feed.token_ids) for feed in feeds))
        answer = super().run(feeds, question, decide)
        if len(self.steps) - 1 in self.dies:
            self.is_lost = True
            self.check()
        return answer

    def check(self) -> None:
        if self.is_lost:
            raise DeviceLostError("rank 1 was lost")

    def recover(self, is_wanted: Callable[[], bool]) -> None:
        assert is_wanted()
        assert self.pool.num_held_pages == self.pool.num_cached_pages == 0
        self.num_recoveries += 1
        if not self.comes_back:
            raise ServiceUnavailableError("no devices")
        self.is_lost = False


class Losing:
    def __init__(self) -> None:
        self.runner = LosableRunner()
        self.engine = Engine(
            self.runner,
            VerifyDecider(),
            max_num_tokens=256,
            max_prefill_tokens=256,
            context_len=256,
            thread=ComputeThread("test"),
        )
        self.thread = LoopThread()
        self.sequence = self.engine.open(PARAMS, len(PROMPT))

    def verify(self, base_len: int, tokens: list[int], draft: list[int]) -> list[int]:
        job = VerifyJob(self.sequence, base_len, tokens, proposal=Proposal(base_len + len(tokens), draft))
        return list(self.thread.run(result_of(self.engine, job)).target_token_ids)

    def close(self) -> None:
        self.engine.close()
        self.thread.close()


losing = entered(lambda: closing(Losing()), scope="function")


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    with closing(Losing()) as made:
        return [made.verify(0, PROMPT, [5, 6]), made.verify(40, [9], [7, 8, 9])]


def test_a_step_that_was_lost_is_run_again_from_the_tokens(
    losing: Losing, undisturbed: list[list[int]]
) -> None:
    losing.runner.dies = {1}
    assert [losing.verify(0, PROMPT, [5, 6]), losing.verify(40, [9], [7, 8, 9])] == undisturbed
    assert losing.runner.steps == [42, 4, 44], "nothing is found in a cache that is gone"
    check_integrity(losing.runner.pool)


def test_a_loss_between_steps_is_mended_before_the_next_request(
    losing: Losing, undisturbed: list[list[int]]
) -> None:
    assert losing.verify(0, PROMPT, [5, 6]) == undisturbed[0]
    losing.runner.is_lost = True
    losing.engine.check_device()
    assert losing.verify(40, [9], [7, 8, 9]) == undisturbed[1]
    assert losing.runner.num_recoveries == 1
    losing.engine.check_device()
    assert losing.verify(41, [9], []) is not None
    assert losing.runner.num_recoveries == 1, "a device that is there is left alone"


def test_a_request_that_kills_the_device_again_and_again_fails(
    losing: Losing, undisturbed: list[list[int]]
) -> None:
    losing.runner.dies = {0, 1, 2}
    with pytest.raises(ServiceUnavailableError, match="the device was lost, 3 times at this request"):
        losing.verify(0, PROMPT, [5, 6])
    assert losing.verify(0, PROMPT, [5, 6]) == undisturbed[0]


def test_a_device_that_stays_away_fails_requests_until_it_is_back(
    losing: Losing, undisturbed: list[list[int]]
) -> None:
    losing.runner.dies, losing.runner.comes_back = {0}, False
    with pytest.raises(ServiceUnavailableError, match=r"the device did not come back$"):
        losing.verify(0, PROMPT, [5, 6])
    losing.runner.comes_back = True
    assert losing.verify(0, PROMPT, [5, 6]) == undisturbed[0]
