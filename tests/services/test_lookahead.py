"""The draft works ahead: what it pushes is what it would have answered, and it keeps nothing in vain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_service.drafter import DraftDecider, DraftJob
from draft_service.forecast import Forecast, SharedForecast
from draft_service.lookahead import Lookahead, Request
from specwire import ResourceExhaustedError, Rule, SamplingParams, UnsupportedError, clock
from specwire.config.services import DraftConfig
from specwire.core import Preparation, Proposal
from specwire.engine import boot
from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.loop import Engine
from specwire.engine.replies import Result
from specwire.errors import RequestCancelledError
from specwire.proposals.pushes import Arrived
from specwire.rpc.wire import draft as draft_wire
from specwire.rpc.wire.draft import DraftOrder
from specwire.telemetry.tracing import Span
from specwire.v1 import common_pb2, draft_pb2
from tests.support.draft_streams import Received, draft_stream, opening, received
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, handshake, local_stack, started_services
from tests.support.integrity import check_integrity
from tests.support.jobs import result_of, submitted
from tests.support.model_streams import RawStream, raw_stream
from tests.support.pairs import save_good_draft, save_target

PROMPT = [5, 9, 11, 2, 7]
NUM_DRAFT_TOKENS = 4
REJECTION = SamplingParams(seed=1, rule=Rule.REJECTION)
PREPARATION = Preparation(num_outcomes=12, num_draft_tokens=NUM_DRAFT_TOKENS)
SETTINGS = [
    pytest.param({"rule": Rule.REJECTION, "temperature": 0}, id="greedy"),
    pytest.param({"rule": Rule.GUMBEL}, id="gumbel"),
    pytest.param({"rule": Rule.REJECTION, "temperature": 0.5}, id="rejection"),
    pytest.param({"rule": Rule.BLOCK, "temperature": 0.5}, id="block"),
]


class DraftedSequence:
    """One sequence of the draft service, message by message, with the books of what it holds."""

    def __init__(self, stream: RawStream, params: SamplingParams) -> None:
        self._stream = stream
        self._open = [opening(1, params, len(PROMPT))]
        self._number = 0
        self._arrived = Arrived()
        self.committed: list[int] = []
        self.held: list[int] = []
        self._pushed: list[tuple[list[int], Proposal]] = []

    def send(self, token_ids: Sequence[int], wanted: int, preparation: Preparation | None) -> None:
        """Commit tokens after those that are committed already."""
        committed = [*self.committed, *token_ids]
        base_len = 0
        while base_len < min(len(committed), len(self.held)) and committed[base_len] == self.held[base_len]:
            base_len += 1
        self._number += 1
        order = DraftOrder(1, self._number, base_len, committed[base_len:], wanted, prepare=preparation)
        message = draft_wire.request_to_proto(self._open, [], [order])
        message.num_arrived_bytes = self._arrived.report()
        self._stream.send(message)
        self._open = []
        self.committed, self.held = committed, committed

    def _next(self) -> Received:
        message = self._stream.read()
        if message.HasField("prepared"):
            self._arrived.add(message.ByteSize())
        if self._arrived.is_due:
            self._stream.send(draft_pb2.DraftRequest(num_arrived_bytes=self._arrived.report()))
        found = received(message)
        for error in found.errors.values():
            raise error
        return found

    def answer(self) -> Proposal:
        """To the last request; what comes before it is dropped."""
        while not (answers := [a for a in self._next().answers if a.request_id == self._number]):
            pass
        proposal = answers[0].proposal
        self.held = [*self.committed, *proposal.token_ids]
        return proposal

    def pushed(self) -> list[tuple[list[int], Proposal]]:
        """Of the next message that is no answer: tokens after the committed ones, and what follows them."""
        while not (prepared := self._next().prepared):
            pass
        before = len(self._pushed)
        for each in prepared:
            whole = [*self.committed[: each.proposal.base_len], *each.path]
            self._pushed.append((whole, replace(each.proposal, base_len=len(whole))))
        return self.known(before)

    def known(self, before: int = 0) -> list[tuple[list[int], Proposal]]:
        """Of all messages that were no answers, but for so many proposals: what may still be of use."""
        length = len(self.committed)
        return [
            (whole[length:], proposal)
            for whole, proposal in self._pushed[before:]
            if len(whole) > length and whole[:length] == self.committed  # or else it came too late
        ]


Services = dict[str, boot.ModelService]
services = entered(started_services, scope="function")


@pytest.fixture
def stack(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A new one for each test: the service learns what to expect from what it has seen."""
    directory = tmp_path_factory.mktemp("lookahead")
    target, draft = save_target(directory / "target"), save_good_draft(directory / "draft")
    with local_stack(target, draft) as running:
        yield running
        running.assert_idle_within(2.0)
        check_integrity(services["draft"].runner.pool)


@pytest.fixture
def emulated() -> Iterator[boot.ModelService]:
    config = DraftConfig(model="emulated:step_ms=1")
    running = boot.start(config, "draft", DraftDecider(config))
    yield running
    running.close()
    check_integrity(running.runner.pool)
    assert running.runner.pool.num_held_pages == 0


@contextlib.contextmanager
def drafted(stack: LocalStack, params: SamplingParams) -> Iterator[DraftedSequence]:
    """On a stream of its own."""
    with raw_stream(stack, "draft") as stream:
        yield DraftedSequence(stream, params)


def fresh(stack: LocalStack, params: SamplingParams, committed: Sequence[int]) -> Proposal:
    """What a stream that never worked ahead proposes."""
    with drafted(stack, params) as sequence:
        sequence.send(committed, NUM_DRAFT_TOKENS, None)
        return sequence.answer()


def assert_same(one: Proposal, other: Proposal) -> None:
    assert (one.base_len, list(one.token_ids)) == (other.base_len, list(other.token_ids))
    for ours, theirs in zip(one.supports, other.supports, strict=True):
        order, other_order = np.argsort(ours.token_ids), np.argsort(theirs.token_ids)
        np.testing.assert_array_equal(ours.token_ids[order], theirs.token_ids[other_order])
        np.testing.assert_allclose(ours.probs[order], theirs.probs[other_order], atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_pushed_is_what_would_have_been_answered(stack: LocalStack, settings: dict[str, Any]) -> None:
    """Rounds of every kind: hits that are only told, hits that are asked for again, misses."""
    params = SamplingParams(seed=3, **settings)
    depths = set()
    with drafted(stack, params) as sequence:

        def longest() -> int:
            return max(len(path) for path, _ in sequence.known())

        def shortest() -> int:
            return min(len(path) for path, _ in sequence.known())

        sequence.send(PROMPT, NUM_DRAFT_TOKENS, PREPARATION)
        assert_same(sequence.answer(), fresh(stack, params, PROMPT))
        for number in range(12):
            kind = number % 3
            # After all was accepted, and after a rejection; later on, either may not be worth the work.
            is_enough = {0: lambda: longest() > NUM_DRAFT_TOKENS, 1: lambda: shortest() <= NUM_DRAFT_TOKENS}
            while not (sequence.known() and is_enough.get(number, lambda: True)()):
                for path, prepared in sequence.pushed()[:3]:
                    assert_same(prepared, fresh(stack, params, [*sequence.committed, *path]))
            if kind < 2:
                path, prepared = (min if kind else max)(sequence.known(), key=lambda push: len(push[0]))
                depths.add(len(path))
                sequence.send(path, NUM_DRAFT_TOKENS if number % 2 else 0, PREPARATION)
                if number % 2:
                    assert_same(sequence.answer(), prepared)
                sequence.held = [*sequence.committed, *prepared.token_ids]
            else:
                sequence.send([96], NUM_DRAFT_TOKENS, PREPARATION)
                assert_same(sequence.answer(), fresh(stack, params, sequence.committed))
    assert len(depths) > 1


def test_it_gets_more_than_one_round_ahead(stack: LocalStack) -> None:
    """Without news from the coordinator it goes on with the outcomes of what it has prepared."""
    with drafted(stack, SamplingParams(seed=1, rule=Rule.GUMBEL)) as sequence:
        sequence.send(PROMPT, NUM_DRAFT_TOKENS, replace(PREPARATION, num_outcomes=32))
        proposal = sequence.answer()
        paths: list[list[int]] = []
        while not any(len(path) > NUM_DRAFT_TOKENS + 1 for path in paths):
            paths += [path for path, _ in sequence.pushed()]
    assert len({tuple(path) for path in paths}) == len(paths)
    assert [*proposal.token_ids] in [path[:NUM_DRAFT_TOKENS] for path in paths]


def test_memory_of_what_was_prepared_in_vain_is_free_after_a_miss(stack: LocalStack) -> None:
    with drafted(stack, SamplingParams(seed=1, rule=Rule.GUMBEL)) as sequence:
        sequence.send(PROMPT * 20, NUM_DRAFT_TOKENS, PREPARATION)
        sequence.answer()
        while not sequence.pushed():
            pass
        # Not among the prepared outcomes, and nothing more is to be prepared.
        sequence.send([96], NUM_DRAFT_TOKENS, None)
        sequence.answer()
        one_sequence = -(-len([*sequence.held]) // 16)
        assert stack.status("draft").num_held_pages <= one_sequence
        assert stack.status("draft").num_sequences == 1


async def test_a_push_that_outlives_its_round_leaves_nothing_behind(emulated: boot.ModelService) -> None:
    """Branches of its round would begin at tokens that were not committed, and draft with judged random
    numbers."""
    params, prepare = SamplingParams(seed=1, rule=Rule.REJECTION), Preparation(8, 4)
    async with draft_stream(emulated) as (call, stream):
        call.send([DraftOrder(1, 1, 0, [1, 2, 3], 4, prepare=PREPARATION)], [opening(1, params, 3)])
        assert (await call.read()).answers
        call.may_write.clear()
        assert (await call.read()).prepared
        call.send([DraftOrder(1, 2, 3, [63, 62], 4, prepare=prepare)])
        [sequence] = stream.sequences.values()
        async with asyncio.timeout(20):
            while not sequence.num_unanswered:  # noqa: ASYNC110
                await asyncio.sleep(0)
            while sequence.num_unanswered:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        call.may_write.set()
        lookahead = sequence.state.lookahead
        while not (len(lookahead._branches) >= 8 and all(branch.done for branch in lookahead._branches)):
            await call.read()
        starts = [(branch.job.committed_len, len(branch.path)) for branch in lookahead._branches]
    assert [start - num for start, num in starts] == [5] * len(starts)


def test_a_service_that_prepares_nothing_says_so(tmp_path: Path) -> None:
    draft = save_good_draft(tmp_path / "draft")
    with local_stack(save_target(tmp_path / "target"), draft, draft_options={"max_outcomes": 0}) as running:
        info = handshake("draft", running.draft_address).model
        assert common_pb2.CAPABILITY_PREPARED_OUTCOMES not in info.capabilities
        with drafted(running, SamplingParams(seed=1, rule=Rule.REJECTION)) as sequence:
            sequence.send(PROMPT, NUM_DRAFT_TOKENS, PREPARATION)
            with pytest.raises(UnsupportedError, match="prepare"):
                sequence.answer()
        done = running.client.generate(params=SamplingParams(max_tokens=20), prompt_token_ids=PROMPT)
        assert done.speculation.num_draft_tokens > 0
        assert done.speculation.num_prepared == 0


class Alone:
    """The lookahead of one sequence, with nothing around it."""

    def __init__(self, engine: Engine, sequence: TokenSequence) -> None:
        self._answers: asyncio.Queue[Request] = asyncio.Queue()
        self.lookahead = Lookahead(
            engine,
            sequence,
            sequence_id=1,
            vocab_limit=0,
            forecast=Forecast(SharedForecast()),
            sink=self._settle,
            answer=self._answers.put_nowait,
        )

    def _settle(self, results: Sequence[Result]) -> None:
        for job, result in results:
            _, branch = job.tag
            self.lookahead.settle(branch, job, result)

    async def ask(self, order: DraftOrder) -> Request:
        self.lookahead.request(Request(order, 0, Span()))
        return await self._answers.get()


class TestBackgroundJobs:
    """The engine's side: they give way."""

    @pytest.fixture
    def steps(self) -> list[tuple[int, list[Job]]]:
        """When each step began, and the jobs in it."""
        return []

    @pytest.fixture
    def service(self, steps: list[tuple[int, list[Job]]]) -> Iterator[boot.ModelService]:
        class Recording(DraftDecider):
            def ask(self, jobs: Sequence[Job]) -> Any:
                steps.append((clock.stopwatch_ns(), [*jobs]))
                return super().ask(jobs)

        config = DraftConfig(model="emulated:step_ms=20", num_kv_tokens=160)
        running = boot.start(config, "draft", Recording(config))
        yield running
        for sequence in [*running.engine._sequences]:
            running.engine.close_sequence(sequence)
        running.engine.close()
        check_integrity(running.runner.pool)
        assert running.runner.pool.num_held_pages == 0

    async def test_a_request_is_not_kept_waiting(
        self, service: boot.ModelService, steps: list[tuple[int, list[Job]]]
    ) -> None:
        engine = service.engine
        ahead, asked = (engine.open(REJECTION, 3) for _ in range(2))
        slow = DraftJob(ahead, 0, [1, 2, 3], num_draft_tokens=8)
        quick = DraftJob(asked, 0, [1, 2, 3], num_draft_tokens=4)
        waits = submitted(engine, slow, 8, background=True)
        await result_of(engine, quick, 4)
        assert not waits.done()
        await waits
        assert len(slow.drafted) == 8
        waited = [jobs for began, jobs in steps if quick.arrived_ns < began < quick.finished_ns]
        without = [jobs for jobs in waited if quick not in jobs]
        assert len(waited) - len(without) == 4
        assert len(without) <= 1  # it was about to run

    async def test_hurried_it_is_like_any_other(self, service: boot.ModelService) -> None:
        engine = service.engine
        ahead, asked = (engine.open(REJECTION, 3) for _ in range(2))
        job = DraftJob(ahead, 0, [1, 2, 3], num_draft_tokens=2)
        waits = submitted(engine, job, 2, background=True)
        long = submitted(engine, DraftJob(asked, 0, [1, 2, 3], num_draft_tokens=8), 8)
        engine.promote(job)
        await waits
        assert not long.done()
        await long

    async def test_the_next_request_on_its_sequence_cancels_it(self, service: boot.ModelService) -> None:
        engine = service.engine
        sequence = engine.open(REJECTION, 3)
        job = DraftJob(sequence, 0, [1, 2, 3], num_draft_tokens=9)
        waits = submitted(engine, job, 9, background=True)
        proposal = await result_of(engine, DraftJob(sequence, 0, [4, 5], num_draft_tokens=2), 2)
        assert proposal.base_len == 2
        with pytest.raises(RequestCancelledError):
            await waits

    async def test_it_takes_no_memory_that_others_hold(self, service: boot.ModelService) -> None:
        """Ten pages of 16 tokens: a stream that idles keeps its own."""
        engine = service.engine
        idle = engine.open(REJECTION, 3)
        await result_of(engine, DraftJob(idle, 0, [7] * 140, num_draft_tokens=2), 2)
        other = engine.open(REJECTION, 3)
        job = DraftJob(other, 0, [9] * 40, num_draft_tokens=2)
        with pytest.raises(ResourceExhaustedError):
            await submitted(engine, job, 2, background=True)
        engine.close_sequence(other)
        fork = engine.open_fork(idle)
        ahead = DraftJob(fork, 140, [3], num_draft_tokens=2, parent=idle)
        await submitted(engine, ahead, 2, background=True)
        assert engine.status().num_sequences == 1
        assert engine.status().num_preemptions == 0
        engine.replace_with_fork(idle, fork)
        proposal = await result_of(engine, DraftJob(idle, 141, [4], num_draft_tokens=1), 1)
        assert proposal.base_len == 142

    async def test_where_it_fails_while_it_is_waited_for_the_request_is_served_without(
        self, service: boot.ModelService, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Memory to work ahead in may have run out just before the engine hears of a waiting request."""
        engine, params = service.engine, SamplingParams(seed=1, rule=Rule.GUMBEL)
        stream, other = (engine.open(params, 3) for _ in range(2))

        def too_late(_: DraftJob) -> None:
            engine._inbox.put(lambda: engine._queues.cancel_background(stream, "no memory"))

        monkeypatch.setattr(engine, "promote", too_late)
        alone = Alone(engine, stream)
        await alone.ask(DraftOrder(1, 1, 0, [1, 2, 3], 4, prepare=PREPARATION))
        alone.lookahead.work_ahead()
        path = alone.lookahead._branches[0].path
        answer = await alone.ask(DraftOrder(1, 2, 2 + len(path), [path[-1]], 4))
        alone.lookahead.close()
        fresh = DraftJob(other, 0, [1, 2, 3, *path], num_draft_tokens=4)
        expected = await result_of(engine, fresh, 4)
        assert not answer.was_prepared
        assert_same(answer.proposal, expected)
