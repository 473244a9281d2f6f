"""What goes into a step: rounds before prompts, and no sequence starves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from torch import Tensor

from benchmarks.simulation.devices import LogitsDecider
from specwire import AsyncClient, SamplingParams
from specwire.core import Proposal
from specwire.engine.batch import Feed
from specwire.engine.emulated import EmulatedModel, EmulatedRunner
from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.loop import Engine
from specwire.engine.threads import ComputeThread
from tests.support.fixtures import entered
from tests.support.harness import LoopThread, local_stack
from tests.support.jobs import result_of
from verify_service.verifier import VerifyJob

PARAMS = SamplingParams(seed=0)
MAX_NUM_TOKENS, MAX_PREFILL_TOKENS = 400, 64


class CountingEngine:
    """The real engine over an emulated device; notes the size of every job's piece, step by step."""

    def __init__(self, num_pages: int = 256) -> None:
        runner = EmulatedRunner(EmulatedModel(step_ms=1.0), num_pages=num_pages, page_size=16)
        self.steps: list[list[int]] = []
        self.goes_on: TokenSequence | None = None
        self.engine = Engine(
            runner,
            LogitsDecider(self.consume),
            max_num_tokens=MAX_NUM_TOKENS,
            max_prefill_tokens=MAX_PREFILL_TOKENS,
            context_len=num_pages * 16,
            thread=ComputeThread("test"),
            prefix_sharing=False,
        )
        forward = runner.forward

        def noted(feeds: Sequence[Feed]) -> Any:
            self.steps.append([len(feed.token_ids) for feed in feeds])
            return forward(feeds)

        runner.forward = noted  # type: ignore[method-assign]
        self.thread = LoopThread()

    def consume(self, jobs: list[Job], logits: Tensor) -> None:
        for job in jobs:
            job.result = True
            if job.sequence is self.goes_on:
                job.following = VerifyJob(job.sequence, job.committed_len, [3], goes_on=True)

    def close(self) -> None:
        self.engine.close()
        self.thread.close()


counting = entered(lambda: closing(CountingEngine()), scope="function")


def test_running_streams_do_not_wait_for_a_long_prompt(counting: CountingEngine) -> None:
    engine = counting.engine
    reader, prompt = engine.open(PARAMS, 5), engine.open(PARAMS, 1000)

    async def both() -> None:
        await result_of(engine, VerifyJob(reader, 0, [1] * 5))
        counting.steps.clear()
        long = asyncio.create_task(result_of(engine, VerifyJob(prompt, 0, [2] * 1000)))
        length = 5
        while not long.done():
            await result_of(engine, VerifyJob(reader, length, [3], proposal=Proposal(length + 1, [4, 5])))
            length += 1
        await long

    counting.thread.run(both())
    chunks = [max(step) for step in counting.steps if max(step) > 3]
    assert max(chunks) <= MAX_PREFILL_TOKENS, "whether the reader is in the step, or will be back in a moment"
    rounds = [step for step in counting.steps if min(step) <= 3]
    assert len(rounds) >= len(chunks) // 3, "the reader gets on meanwhile"


def test_nor_do_streams_that_go_on_by_themselves(counting: CountingEngine) -> None:
    engine = counting.engine
    reader, prompt = engine.open(PARAMS, 5), engine.open(PARAMS, 1000)
    counting.goes_on = reader

    async def both() -> None:
        await result_of(engine, VerifyJob(reader, 0, [1] * 5))
        await result_of(engine, VerifyJob(prompt, 0, [2] * 1000))
        counting.goes_on = None

    counting.thread.run(both())
    assert max(map(max, counting.steps)) <= MAX_PREFILL_TOKENS


def test_a_prompt_without_company_takes_whole_steps(counting: CountingEngine) -> None:
    prompt = counting.engine.open(PARAMS, 1000)
    counting.thread.run(result_of(counting.engine, VerifyJob(prompt, 0, [2] * 1000)))
    assert [sum(step) for step in counting.steps] == [400, 400, 200]


def test_the_oldest_sequence_gets_on_whatever_the_others_do() -> None:
    """Its prompt needs the memory of all others, who keep coming back with rounds."""

    async def read(reader: TokenSequence, long: asyncio.Task[Any]) -> None:
        length = 5
        while not long.done():
            await result_of(engine, VerifyJob(reader, 0, [1] * length))
            length = min(length + 1, 60)

    async def all_of_them() -> None:
        long = asyncio.create_task(result_of(engine, VerifyJob(prompt, 0, [2] * 300)))
        await asyncio.gather(*(read(reader, long) for reader in readers))

    with closing(CountingEngine(num_pages=20)) as made:
        engine = made.engine
        prompt = engine.open(PARAMS, 300)
        readers = [engine.open(PARAMS, 5) for _ in range(4)]
        made.thread.run(all_of_them(), timeout_s=20)
        assert engine.status().num_preemptions > 0


def test_an_answer_may_come_before_anyone_waits_for_it(counting: CountingEngine) -> None:
    """The engine's thread can be through with a job before the caller goes on from handing it over."""
    engine = counting.engine
    inbox = engine._inbox

    class Slow:
        def put(self, order: Any) -> None:
            inbox.put(order)
            while job.result is None:
                pass

        def __getattr__(self, name: str) -> Any:
            return getattr(inbox, name)

    sequence = engine.open(PARAMS, 5)
    job = VerifyJob(sequence, 0, [1] * 5)
    engine._inbox = Slow()  # type: ignore[assignment]
    assert counting.thread.run(result_of(engine, job), timeout_s=10) is True


def test_streams_that_began_apart_share_their_steps() -> None:
    """Left alone they would fall into groups that take turns: two steps for each round."""
    num_rounds, step_s = 15, 0.05

    async def generate(address: str) -> None:
        async with AsyncClient(address) as client:
            params = SamplingParams(max_tokens=num_rounds, num_draft_tokens=0)

            async def one(i: int) -> None:
                await asyncio.sleep(i * step_s / 2)  # the second half in the middle of the first one's step
                await client.generate(params=params, prompt_token_ids=[1])

            await asyncio.gather(*(one(i % 2) for i in range(6)))

    with local_stack(f"emulated:step_ms={step_s * 1e3}") as stack:
        asyncio.run(generate(stack.address))
        assert stack.status("verify").num_steps < 1.5 * num_rounds


def test_a_stream_that_is_slow_to_return_delays_no_other(counting: CountingEngine) -> None:
    engine = counting.engine
    quick, slow = engine.open(PARAMS, 5), engine.open(PARAMS, 5)

    async def run() -> None:
        for sequence in (quick, slow):
            await result_of(engine, VerifyJob(sequence, 0, [1] * 5))
        await asyncio.sleep(0.05)
        await asyncio.gather(*(result_of(engine, VerifyJob(s, 5, [1])) for s in (quick, slow)))

    counting.thread.run(run())
    assert slow.turnaround_ns >= 50e6
    assert not engine._gathering.expected
