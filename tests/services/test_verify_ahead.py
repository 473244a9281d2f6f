"""A target that goes on by itself: the text is the same as without it, and nothing is left behind.

The pass takes long enough for the draft's proposals to arrive before its end, so most rounds whose outcome
was prepared for are begun by the verify service; `num_begun` says how many, as the coordinator counts them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import grpc
import pytest

import coordinator.servicer
from coordinator.generation import Plan, Round
from coordinator.servicer import GenerationServicer
from specwire import Completion, Rule, SamplingParams
from specwire.config.link import Link
from specwire.core import MIN_CREDIT_TOKENS, Outcome, Proposal, Verdict, Wanted
from specwire.engine import boot
from specwire.rpc.wire import model as model_wire
from specwire.rpc.wire.verify import AheadOrder, VerifyOrder
from specwire.v1 import common_pb2, generation_pb2_grpc
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, local_stack, started_coordinators, started_services
from tests.support.integrity import check_integrity
from tests.support.model_streams import error_of, raw_stream, verify
from tests.support.paused import most_ahead, opening
from verify_service.ahead import MAX_AHEAD, Ahead, Next
from verify_service.stream import VerifyStream
from verify_service.verifier import VerifyJob

TARGET, DRAFT = "emulated:step_ms=24", "emulated:step_ms=0.5,alpha=0.85,runner_up=0.6"
PROMPT = [1, 2, 3]
GUMBEL = SamplingParams(max_tokens=40, seed=7, rule=Rule.GUMBEL)
KINDS = [
    pytest.param(replace(GUMBEL, temperature=0), id="greedy"),
    pytest.param(GUMBEL, id="gumbel"),
    pytest.param(replace(GUMBEL, num_draft_tokens=8, max_depth=3), id="trees"),
    pytest.param(replace(GUMBEL, logprobs=2, presence_penalty=1.0, repetition_penalty=1.2), id="logprobs"),
    pytest.param(replace(GUMBEL, temperature=0, num_draft_tokens=0), id="plain greedy"),
    pytest.param(replace(GUMBEL, logprobs=2, num_draft_tokens=0), id="plain"),
]
PLAIN = replace(GUMBEL, num_draft_tokens=0)
BOTH = pytest.mark.parametrize(
    "params", [pytest.param(GUMBEL, id="drafted"), pytest.param(PLAIN, id="plain")]
)


@dataclass
class Watched:
    """A stack, and what its services know."""

    stack: LocalStack
    servicer: GenerationServicer
    verify: boot.ModelService
    streams: list[VerifyStream]

    @property
    def stream(self) -> VerifyStream:
        """The coordinator's, the first one of this stack."""
        return next(stream for stream in self.streams if stream.service is self.verify)

    @property
    def num_begun(self) -> int:
        """Rounds that the verify service began by itself, and that were used."""
        return self.servicer.totals.tally.num_begun

    @property
    def num_disagreements(self) -> int:
        return self.servicer.verify.num_disagreements

    def generate(self, params: SamplingParams) -> Completion:
        return self.stack.client.generate(params=params, prompt_token_ids=PROMPT)

    def assert_free(self) -> None:
        self.stack.assert_idle_within(2.0)
        check_integrity(self.verify.runner.pool)


@contextlib.contextmanager
def watched(*, verify_ahead: bool = True, **options: Any) -> Iterator[Watched]:
    streams: list[VerifyStream] = []
    init = VerifyStream.__init__

    def noted(self: VerifyStream, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        streams.append(self)

    coordinator = {"num_outcomes": "8", "verify_ahead": verify_ahead}
    with (
        mock.patch.object(VerifyStream, "__init__", noted),
        started_coordinators() as servicers,
        started_services() as services,
        local_stack(TARGET, DRAFT, coordinator_options=coordinator, **options) as stack,
    ):
        yield Watched(stack, servicers[0], services["verify"], streams)


off = entered(lambda: watched(verify_ahead=False))


running = entered(lambda: watched(draft_link=Link()))


@pytest.fixture
def on(running: Watched) -> Iterator[Watched]:
    """Whatever a test did, everything is free afterwards."""
    yield running
    running.assert_free()


@pytest.fixture(scope="module")
def expected(off: Watched) -> Completion:
    return off.generate(GUMBEL)


@pytest.mark.sample(2)
@pytest.mark.parametrize("params", KINDS)
def test_the_text_is_the_same_with_and_without(on: Watched, off: Watched, params: SamplingParams) -> None:
    num_before = on.num_begun
    with_it, without = on.generate(params), off.generate(params)
    assert [(t.token_id, t.top_logprobs) for t in with_it.tokens] == [
        (t.token_id, t.top_logprobs) for t in without.tokens
    ]
    assert (off.num_begun, on.num_disagreements) == (0, 0)
    num_begun, num_rounds = on.num_begun - num_before, with_it.speculation.num_rounds
    assert num_begun > 0
    # Of plain rounds all but the first, which has no round before it.
    assert params.num_draft_tokens != 0 or num_rounds - num_begun <= 3


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("params", "rule"), [(GUMBEL, Rule.REJECTION), (GUMBEL, Rule.BLOCK), (PLAIN, Rule.REJECTION)]
)
def test_both_come_to_the_same_where_probabilities_decide(
    on: Watched, params: SamplingParams, rule: Rule
) -> None:
    """The distribution itself is tested in tests/exactness."""
    num_before = on.num_begun
    on.generate(replace(params, rule=rule))
    assert on.num_begun > num_before
    assert on.num_disagreements == 0


class Alternating:
    """Plans drafts and none by turns, some rounds each."""

    limit = 4

    def __init__(self, num_plain: int) -> None:
        self._plans = itertools.cycle([*[Plan(0)] * num_plain, *[Plan(4, num_outcomes=8)] * 3])

    def plan(self) -> Plan:
        return next(self._plans)

    def observe(self, done: Round, elapsed_ns: int) -> None:
        pass


@pytest.mark.parametrize("num_plain", [1, 5])
def test_it_goes_on_with_drafts_and_without_by_turns(
    on: Watched, expected: Completion, monkeypatch: pytest.MonkeyPatch, num_plain: int
) -> None:
    """What was begun for the plan before is used or dropped."""
    monkeypatch.setattr(on.servicer.assembly, "planner", lambda checked: Alternating(num_plain))
    num_before = on.num_begun
    done = on.generate(GUMBEL)
    assert done.token_ids == expected.token_ids
    assert done.speculation.num_accepted_tokens > 0
    assert on.num_begun > num_before
    assert on.num_disagreements == 0


@BOTH
def test_another_outcome_is_counted_and_changes_nothing(
    on: Watched,
    expected: Completion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    params: SamplingParams,
) -> None:
    """A verify service that does not apply the rule: the coordinator notices, and keeps its own outcome."""
    after, judge = Ahead.after, VerifyJob.judge

    def other(outcome: Outcome) -> Outcome:
        return replace(outcome, next_token=(outcome.next_token + 1) % 64)

    def wrong_after(self: Ahead, proposal: Proposal, verdict: Verdict) -> Next | None:
        following = after(self, proposal, verdict)
        if following is None:
            return None
        continuation, token_ids, judged = following
        outcome = other(continuation.outcome)
        return Next(continuation._replace(outcome=outcome), [*token_ids[:-1], outcome.next_token], judged)

    def wrong_judge(self: VerifyJob) -> list[int]:
        judge(self)
        assert self.outcome is not None
        self.outcome = other(self.outcome)
        return [self.outcome.next_token]

    monkeypatch.setattr(Ahead, "after", wrong_after)
    monkeypatch.setattr(VerifyJob, "judge", wrong_judge)
    num_before = on.num_begun
    with caplog.at_level(logging.ERROR):
        assert on.generate(params).token_ids == expected.token_ids
    assert on.num_begun == num_before
    assert on.num_disagreements == 1, "of a sequence, none is believed after the first"
    assert sum("verify came to" in record.getMessage() for record in caplog.records) == 1
    on.servicer.verify.num_disagreements = 0


@BOTH
def test_a_defect_of_going_on_does_not_fail_the_round(
    on: Watched,
    expected: Completion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    params: SamplingParams,
) -> None:
    broken = mock.Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(Ahead, "after", broken)
    monkeypatch.setattr(VerifyJob, "judge", broken)
    num_before = on.num_begun
    with caplog.at_level(logging.ERROR):
        assert on.generate(params).token_ids == expected.token_ids
    assert on.num_begun == num_before
    assert any("going on failed" in record.getMessage() for record in caplog.records)


class TestEndsInMidFlight:
    @BOTH
    @pytest.mark.parametrize("max_tokens", [1, 2, 6, 37])
    def test_max_tokens(
        self, on: Watched, expected: Completion, params: SamplingParams, max_tokens: int
    ) -> None:
        num_before = on.verify.engine.status().num_tokens
        done = on.generate(replace(params, max_tokens=max_tokens))
        assert done.token_ids == expected.token_ids[:max_tokens]
        if params is PLAIN:
            num_run = on.verify.engine.status().num_tokens - num_before
            assert num_run == len(PROMPT) + max_tokens - 1, "nothing is begun beyond the end"

    @BOTH
    def test_a_stop_token(self, on: Watched, expected: Completion, params: SamplingParams) -> None:
        stop = expected.token_ids[25]
        num_tokens = expected.token_ids.index(stop) + 1
        done = on.generate(replace(params, stop_token_ids=(stop,)))
        assert done.token_ids == expected.token_ids[:num_tokens]

    def test_the_context_ends(self, expected: Completion) -> None:
        """Of what was prepared for, nothing is judged that has no room."""
        with watched(verify_options={"model": TARGET + ",context_len=32"}) as small:
            for params in (GUMBEL, PLAIN):
                done = small.generate(replace(params, max_tokens=None))
                assert done.token_ids == expected.token_ids[: 32 - len(PROMPT)]
            small.assert_free()

    @BOTH
    def test_a_cancel(self, on: Watched, params: SamplingParams) -> None:
        with on.stack.client.stream(params=params, prompt_token_ids=PROMPT) as stream:
            list(itertools.islice(stream, 2))
            stream.cancel()

    def test_a_draft_that_is_lost(self, on: Watched, expected: Completion) -> None:
        assert on.stack.draft_proxy is not None
        with on.stack.client.stream(params=GUMBEL, prompt_token_ids=PROMPT) as stream:
            for number, _ in enumerate(stream):
                if number == 3:
                    on.stack.draft_proxy.cut()
            assert stream.completion.token_ids == expected.token_ids


def test_a_client_that_stops_reading(on: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The credit is used up while the target goes on: that ends where its proposals do, and shows nowhere."""
    paused, wait = threading.Event(), coordinator.servicer._Served.wait

    async def noted(served: Any) -> None:
        paused.set()
        await wait(served)

    def num_emitted() -> int:
        tally = on.servicer.totals.tally
        return tally.num_rounds + tally.speculation().num_accepted_tokens

    monkeypatch.setattr(coordinator.servicer._Served, "wait", noted)
    num_before = num_emitted()
    with grpc.insecure_channel(on.stack.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(iter([opening(MIN_CREDIT_TOKENS, 10_000, num_draft_tokens=4)]), timeout=30)
        assert paused.wait(10)
        while on.stream.sequences:  # until the coordinator gives up its place
            for sequence in list(on.stream.sequences.values()):
                kept = sequence.state.ahead
                assert kept is not None
                assert max(len(sequence.state.begun), len(kept._prepared._arrived)) <= MAX_AHEAD
            time.sleep(0.01)
        assert 0 < num_emitted() - num_before <= most_ahead(5)
        call.cancel()


@pytest.mark.slow
def test_a_sequence_that_went_on_loses_its_cache(off: Watched, expected: Completion) -> None:
    """Room for two of four sequences: what was begun runs its tokens again."""
    params = [replace(GUMBEL, seed=seed, max_tokens=60) for seed in range(4)]
    texts = [off.generate(each).token_ids for each in params]
    with watched(verify_options={"num_kv_tokens": 160}) as tight:
        with ThreadPoolExecutor(len(params)) as clients:
            done = list(clients.map(tight.generate, params))
        assert [each.token_ids for each in done] == texts
        assert tight.stack.status("verify").num_preemptions > 0
        assert tight.num_begun > 0
        assert tight.num_disagreements == 0
        tight.assert_free()


@BOTH
def test_no_memory_to_go_on_in(
    on: Watched, expected: Completion, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    """The round that was announced fails, and is judged when it is asked for."""
    on.generate(replace(params, max_tokens=1))  # opens the stream
    begun_again = mock.Mock(side_effect=on.stream._begin_again)
    monkeypatch.setattr(on.verify.engine._scheduler, "fill", lambda *_: None)
    monkeypatch.setattr(on.stream, "_begin_again", begun_again)
    assert on.generate(params).token_ids == expected.token_ids
    assert begun_again.called


def opened(prompt_len: int, *, may_go_on: bool = True, **fields: Any) -> common_pb2.OpenSequence:
    """Sequence 1, coupled."""
    opening = model_wire.open_sequence(GUMBEL, prompt_len, may_go_on=may_go_on, **fields)
    opening.sequence_id = 1
    return opening


class TestRefusals:
    """By name, and one sequence at a time; of values out of range: `test_wire_limits`."""

    def test_of_a_sequence_that_may_not_go_on(self, on: Watched) -> None:
        order = AheadOrder(1, 1, [], Proposal(3, [4]))
        with raw_stream(on.stack, "verify") as stream:
            error = error_of(stream, verify(order, opened=[opened(3, may_go_on=False)]))
        assert "without may_go_on" in str(error)

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"proposal": Proposal(4, [4])}, "num_tokens=1: must be 0 with an ahead_id"),
            ({"token_ids": [4, 5]}, "num_tokens=2"),
            ({"base_len": 3}, "base_lens=3: must be 4"),
            ({"ahead_id": 2}, "ahead_ids=2: is not what the sequence goes on with"),
        ],
    )
    def test_of_requests_for_a_round_that_was(
        self, on: Watched, expected: Completion, change: dict[str, Any], problem: str
    ) -> None:
        first = AheadOrder(1, 1, expected.token_ids[:1], Proposal(len(PROMPT), [4]))
        with raw_stream(on.stack, "verify") as stream:
            answer = stream.ask(verify(VerifyOrder(1, 1, 0, PROMPT), first, opened=[opened(len(PROMPT))]))
            assert list(answer.continuations.ahead_ids) == [1]
            confirm = VerifyOrder(1, 2, len(PROMPT) + 1, (), ahead_id=1)
            stream.send(verify(confirm._replace(**change)))
            while not (answer := stream.read()).errors:  # the round's verdict may be on its way
                pass
        assert problem in answer.errors[0].message


def test_plain_rounds_are_begun_as_far_as_was_asked_for(on: Watched, expected: Completion) -> None:
    """Each that is asked for lets it begin one more. A coordinator that is gone leaves nothing behind."""
    start = opened(len(PROMPT), end_len=200)
    num_before = on.verify.engine.status().num_steps
    with raw_stream(on.stack, "verify") as stream:
        stream.send(verify(VerifyOrder(1, 1, 0, PROMPT, wanted=Wanted(num_plain=3)), opened=[start]))
        answers = [stream.read() for _ in range(4)]
        assert [list(each.ahead_ids) for each in answers] == [[], [-1], [-2], [-3]]
        assert [list(each.continuations.ahead_ids) for each in answers] == [[-1], [-2], [-3], []]
        assert on.verify.engine.status().num_steps == num_before + 4
        confirm = VerifyOrder(1, 2, len(PROMPT) + 1, (), ahead_id=-1, wanted=Wanted(num_plain=3))
        again = VerifyOrder(1, 3, len(PROMPT) + 1, expected.token_ids[1:2], wanted=Wanted(num_plain=1))
        stream.send(verify(confirm))
        answers = [stream.ask(verify(again)), stream.read()]
        assert [list(each.continuations.ahead_ids) for each in answers] == [[-5], []], (
            "ids are not used again"
        )


def test_a_sequence_goes_on_a_bounded_number_of_rounds(on: Watched, expected: Completion) -> None:
    """Nothing is asked for: it stops when as many rounds are begun as proposals may be kept."""
    text, num = expected.token_ids, len(PROMPT)
    with mock.patch("verify_service.stream.MAX_AHEAD", 3), raw_stream(on.stack, "verify") as stream:
        # The text is known: each is for one more token of it, and proposes one that is wrong.
        orders = [AheadOrder(1, i, text[:i], Proposal(num, [(text[i] + 1) % 64])) for i in range(1, 9)]
        stream.send(verify(VerifyOrder(1, 1, 0, PROMPT), *orders, opened=[opened(num)]))
        begun = [each for _ in range(4) for each in stream.read().continuations.ahead_ids]
        assert begun == [1, 2, 3]
