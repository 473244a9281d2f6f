"""A stream of the draft service: many sequences, each with its own end, and answers before all else."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from draft_service.drafter import DraftDecider, DraftJob
from specwire import Grammar, Rule, SamplingParams
from specwire.config.services import DraftConfig
from specwire.core import Preparation
from specwire.engine import boot
from specwire.errors import InternalError
from specwire.rpc.wire.draft import DraftOrder
from specwire.rule.random import Purpose, uniforms
from tests.support.draft_streams import FakeCall, draft_stream, opening
from tests.support.integrity import check_integrity

PARAMS = SamplingParams(seed=1, rule=Rule.REJECTION)
PROMPT = [5, 9, 11]
OPEN_TWO = [opening(1, PARAMS, 3), opening(2, PARAMS, 3)]
ASK_TWO = [DraftOrder(1, 1, 0, PROMPT, 4), DraftOrder(2, 1, 0, PROMPT, 2)]


@pytest.fixture
def service() -> Iterator[boot.ModelService]:
    config = DraftConfig(model="emulated:step_ms=1", max_support=20)
    running = boot.start(config, "draft", DraftDecider(config))
    yield running
    running.close()
    check_integrity(running.runner.pool)
    assert running.runner.pool.num_held_pages == 0


async def answered(call: FakeCall, num: int) -> list[tuple[int, int]]:
    """Sequence and request of the next answers."""
    found: list[tuple[int, int]] = []
    while len(found) < num:
        message = await call.read()
        assert not message.errors
        found += [(each.sequence_id, each.request_id) for each in message.answers]
    return found


async def test_requests_of_one_message_are_answered_each_as_it_asked(service: boot.ModelService) -> None:
    """The shorter first; those that end with the same step are answered in the same message."""
    async with draft_stream(service) as (call, _):
        call.send(ASK_TWO, OPEN_TWO)
        answers = [*(await call.read()).answers]
        while len(answers) < 2:  # one message, if both wait for the one before to be taken
            answers += (await call.read()).answers
        short, long = answers
        assert (short.sequence_id, len(short.proposal.token_ids)) == (2, 2)
        assert (long.sequence_id, len(long.proposal.token_ids)) == (1, 4)
        call.send([DraftOrder(each, 2, 3, [7], 3) for each in (1, 2)])
        assert [(a.sequence_id, a.proposal.base_len) for a in (await call.read()).answers] == [
            (1, 4),
            (2, 4),
        ]


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
async def test_draft_tokens_are_drawn_with_the_numbers_of_their_base(
    service: boot.ModelService, rule: Rule
) -> None:
    """By inverting what was sent: of two requests, and of what is prepared for the second one."""
    async with draft_stream(service) as (call, _):
        call.send([DraftOrder(1, 1, 0, PROMPT, 4)], [opening(1, replace(PARAMS, rule=rule), 3)])
        [first] = (await call.read()).answers
        call.send([DraftOrder(1, 2, 3, [7], 4, prepare=Preparation(4, 3))])
        [second] = (await call.read()).answers
        prepared = (await call.read()).prepared
        proposals = [first.proposal, second.proposal, *(each.proposal for each in prepared)]
        bases = [3, 4, *(each.proposal.base_len + len(each.path) for each in prepared)]
        for base, proposal in zip(bases, proposals, strict=True):
            numbers = uniforms(1, Purpose.DRAFT, range(base, base + len(proposal.token_ids)), base)
            for number, token_id, support in zip(numbers, proposal.token_ids, proposal.supports, strict=True):
                assert len(support.token_ids) <= 20
                cumulative = support.probs.astype(np.float64).cumsum()
                place = np.searchsorted(cumulative, number * cumulative[-1], side="right")
                assert support.token_ids[place] == token_id


@pytest.mark.parametrize("rule", list(Rule))
async def test_nothing_is_prepared_whose_time_depends_on_tokens(
    service: boot.ModelService, rule: Rule
) -> None:
    """Where tokens are sampled: under a grammar, and by a draft with another vocabulary."""
    order = DraftOrder(1, 1, 0, PROMPT, 4, prepare=Preparation(4, 3))
    plain = replace(PARAMS, rule=rule)
    masked = replace(plain, grammar=Grammar(regex="a"))
    async with draft_stream(service) as (_, stream):
        assert stream._checked(order, plain).prepare
        assert bool(stream._checked(order, masked).prepare) is plain.matches_tokens
        stream._servicer.shared = mock.Mock()
        assert bool(stream._checked(order, plain).prepare) is plain.matches_tokens


async def test_after_a_half_close_all_is_answered_in_order(service: boot.ModelService) -> None:
    """Requests of a sequence are served one after another, those without an answer too."""
    async with draft_stream(service) as (call, stream):
        orders = [
            DraftOrder(1, 1, 0, PROMPT, 4, prepare=Preparation(4, 4)),
            DraftOrder(1, 2, 3, [7], 0, prepare=Preparation(4, 4)),  # it holds a proposal for these tokens
            DraftOrder(1, 3, 3, [8], 2),
            DraftOrder(2, 1, 0, PROMPT, 0),
        ]
        call.send(orders, OPEN_TWO)
    messages = call.unread()
    answers = [(a.sequence_id, a.request_id) for message in messages for a in message.answers]
    assert sorted(answers) == [(1, 1), (1, 3), (2, 1)]
    assert answers.index((1, 1)) < answers.index((1, 3))
    assert not stream.sequences
    assert service.engine.status().num_sequences == 0


async def test_a_defect_ends_its_sequence_alone(
    service: boot.ModelService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Results come by a callback, where an exception would be lost, and with it the results of others."""
    async with draft_stream(service) as (call, stream):
        call.send(ASK_TWO, OPEN_TWO)
        await answered(call, 2)
        monkeypatch.setattr(stream.sequences[1].state.lookahead, "answer", None)
        call.send([DraftOrder(each, 2, 3, [7], 3) for each in (1, 2)])
        message = await call.read()
        assert {id_: type(error) for id_, error in message.errors.items()} == {1: InternalError}
        assert [each.sequence_id for each in message.answers] == [2]
    assert "'NoneType' object is not callable" in caplog.text


async def test_what_was_answered_leaves_nothing_to_collect(service: boot.ModelService) -> None:
    """Jobs hold supports; in cycles they would pile up until the collector runs."""
    gc.collect()
    gc.disable()
    try:
        async with draft_stream(service) as (call, _):
            call.send([ASK_TWO[0]._replace(prepare=Preparation(8, 4))], OPEN_TWO)
            for number in range(2, 20):
                call.send([DraftOrder(1, number, 3, [number], 4, prepare=Preparation(8, 4))])
                await answered(call, 1)
        assert sum(type(each) is DraftJob for each in gc.get_objects()) < 20
    finally:
        gc.enable()


async def test_answers_go_before_prepared_proposals(service: boot.ModelService) -> None:
    """A full link: what was asked for waits for one message that was pushed, however much is prepared."""
    async with draft_stream(service) as (call, stream):
        stream._window.num_bytes = 1  # one proposal under way
        ahead = DraftOrder(1, 1, 0, PROMPT, 4, prepare=Preparation(16, 4))
        call.send([ahead], OPEN_TWO)
        assert (await call.read()).answers
        call.may_write.clear()
        first = await call.read()
        call.send([DraftOrder(2, 1, 0, PROMPT, 4)])
        other = stream.sequences[2]
        async with asyncio.timeout(20):
            while not (other.state.last and not other.num_unanswered):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert not call.unread()
        call.may_write.set()
        second, third = await call.read(), await call.read()
        assert len(first.prepared) == len(third.prepared) == 1
        assert [each.sequence_id for each in second.answers] == [2]
        call.may_write.clear()
        call.may_write.set()
        assert not call.unread(), "the last one is still under way"
