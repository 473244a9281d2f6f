"""What must be refused is refused with a typed error that names field and value; others are unaffected.

Messages of the model services are built by hand here, past everything the client and the coordinator check.
The limit of each field: `test_wire_limits`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specwire import (
    Completion,
    ContextLengthError,
    InvalidRequestError,
    PrefixMismatchError,
    Rule,
    SamplingParams,
)
from specwire.core import PARAMETERS, Proposal
from specwire.rpc.wire.draft import DraftOrder
from specwire.rpc.wire.verify import AheadOrder, VerifyOrder
from specwire.support import NO_SUPPORT, Support, certain
from specwire.v1 import common_pb2
from tests.support.harness import LocalStack, local_stack
from tests.support.model_streams import (
    SequenceFailedError,
    draft,
    opening,
    raw_stream,
    sampling,
    verify,
)
from tests.support.parameters import INVALID
from tests.support.refusals import refused

PROMPT = [3, 4, 5]
# Gumbel: its text is fixed by the seed alone. Under rejection sampling the company in a batch may change the
# last bits of a probability, and with them the order of equally likely tokens.
LONG = SamplingParams(max_tokens=200, ignore_eos=True, seed=11, rule=Rule.GUMBEL)
OUTSIDE = 64
CONTEXT_LEN = 256
MODEL = f"emulated:step_ms=0,context_len={CONTEXT_LEN}"
MAX_MESSAGE_BYTES = 200_000


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with local_stack(MODEL, MODEL, coordinator_options={"max_message_bytes": MAX_MESSAGE_BYTES}) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def bystander(stack: LocalStack) -> Iterator[None]:
    """A generation runs all the while; it must say what it says alone."""
    alone = stack.client.generate(params=LONG, prompt_token_ids=PROMPT)
    ended = threading.Event()

    def run() -> tuple[int, list[Completion]]:
        count, odd = 0, []
        while not ended.is_set() or not count:
            done = stack.client.generate(params=LONG, prompt_token_ids=PROMPT)
            count += 1
            if done.token_ids != alone.token_ids or done.speculation.draft_unavailable:
                odd.append(done)
        return count, odd

    with ThreadPoolExecutor() as pool:
        running = pool.submit(run)
        yield
        ended.set()
        count, odd = running.result(60)
    assert count
    assert odd == []
    stack.assert_idle_within(1.0)


class TestParameters:
    """Refused by the noun itself, before anything is sent."""

    @pytest.mark.parametrize("name", PARAMETERS)
    def test_field_and_value_are_named(self, name: str) -> None:
        is_switch = isinstance(PARAMETERS[name].default, bool) and name != "early_stopping"
        assert is_switch or INVALID[name]
        for value in INVALID.get(name, ()):
            with pytest.raises(InvalidRequestError) as caught:
                SamplingParams(**{name: value})
            assert caught.value.field.partition("[")[0] == name
            is_long = isinstance(value, list) and len(value) > 1
            assert caught.value.value.strip("'")[:20] in str(len(value) if is_long else value)


class TestRequests:
    """Refused by the coordinator."""

    @pytest.mark.parametrize(
        ("prompt", "params", "parts"),
        [
            ([3, OUTSIDE], {}, (f"prompt_token_ids[1]={OUTSIDE}", f"vocabulary of {OUTSIDE}")),
            (PROMPT, {"stop_token_ids": (5, OUTSIDE)}, (f"stop_token_ids[1]={OUTSIDE}", "vocabulary")),
            (PROMPT, {"logit_bias": {OUTSIDE: 1.0}}, (f"logit_bias[{OUTSIDE}]={OUTSIDE}", "vocabulary")),
        ],
    )
    def test_named(self, stack: LocalStack, prompt: Any, params: Any, parts: tuple[str, ...]) -> None:
        with refused(InvalidRequestError, *parts):
            stack.client.generate(prompt_token_ids=prompt, params=SamplingParams(max_tokens=4, **params))

    def test_over_the_context(self, stack: LocalStack) -> None:
        room = CONTEXT_LEN - 3
        with refused(ContextLengthError, f"max_tokens={room + 1}", "3 tokens", str(CONTEXT_LEN)):
            stack.client.generate(prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=room + 1))
        params = SamplingParams(max_tokens=room, stop_token_ids=tuple(range(OUTSIDE)))
        assert len(stack.client.generate(prompt_token_ids=PROMPT, params=params).token_ids) == 1

    def test_over_the_message_limit(self, stack: LocalStack) -> None:
        with refused(InvalidRequestError, "prompt=", "bytes", "message size limit"):
            stack.client.generate("x" * (MAX_MESSAGE_BYTES + 1))


HALF = np.full(2, 0.5, np.float32)


def judged(token_ids: Sequence[int] = (6, 7), **changes: Any) -> Proposal:
    """Two draft tokens with supports of two."""
    supports = [Support(np.array([6, 7]), HALF)] * 2
    return replace(Proposal(3, token_ids, supports), **changes)


def drafting(sequence_id: int = 2, **changes: Any) -> DraftOrder:
    return DraftOrder(sequence_id, 1, 0, [3, 4, 5], 2)._replace(**changes)


def verifying(sequence_id: int = 2, **changes: Any) -> VerifyOrder:
    return VerifyOrder(sequence_id, 1, 0, [3, 4, 5], judged())._replace(**changes)


Make = Callable[..., Any]
SIDES: dict[Make, tuple[str, Make]] = {drafting: ("draft", draft), verifying: ("verify", verify)}


def attempt(
    stack: LocalStack, *orders: DraftOrder | VerifyOrder, opened: common_pb2.OpenSequence | None = None
) -> list[Any]:
    """The answers to requests of sequence 2, one after the other.

    Sequence 1 of the same stream is served before and after, and by the same messages.

    Raises:
        SpecwireError: what ended sequence 2.
    """
    make = verifying if isinstance(orders[0], VerifyOrder) else drafting
    role, message = SIDES[make]
    first, found = opening(2) if opened is None else opened, list[Any]()
    with raw_stream(stack, role) as stream:
        stream.ask(message(make(1), opened=[opening(1)]))
        try:
            for number, order in enumerate(orders):
                found.append(stream.ask(message(order, opened=() if number else [first])))
        except SequenceFailedError as failed:
            raise failed.of(2) from None
        finally:
            answer = stream.ask(message(make(1, request_id=9, base_len=3, token_ids=[8])))
            assert (answer.sequence_ids, answer.request_ids, answer.base_lens) == ([1], [9], [4])
    return found


@pytest.mark.parametrize("make", SIDES)
class TestRawSequences:
    """Past the coordinator's checks: the model services repeat what concerns them.

    What is wrong with one sequence ends that one.
    """

    @pytest.mark.parametrize(
        ("opened", "name"),
        [
            (opening(2, sampling=None), "sampling=unset"),
            (opening(2, sampling=common_pb2.SamplingParams(rule=common_pb2.RULE_GUMBEL)), "seed=unset"),
            (opening(2, sampling=common_pb2.SamplingParams(seed=1)), "rule=unset"),
            (opening(2, sampling=sampling(logit_bias={400: 1.0})), "logit_bias[400]"),
            (opening(2, prompt_len=0), "prompt_len=0"),
        ],
    )
    def test_opening(self, stack: LocalStack, make: Make, opened: common_pb2.OpenSequence, name: str) -> None:
        with refused(InvalidRequestError, name):
            attempt(stack, make(), opened=opened)

    @pytest.mark.parametrize(
        ("fields", "parts"),
        [
            ({"token_ids": []}, ("token_ids=[]", "at least one token")),
            ({"token_ids": [3, 400]}, ("token_ids[1]=400", "vocabulary")),
            ({"token_ids": [2**32 - 3]}, ("token_ids[0]=4294967293", "vocabulary")),
        ],
    )
    def test_first_request(
        self, stack: LocalStack, make: Make, fields: dict[str, Any], parts: tuple[str, ...]
    ) -> None:
        with refused(InvalidRequestError, *parts):
            attempt(stack, make(**fields))

    def test_over_the_context(self, stack: LocalStack, make: Make) -> None:
        with refused(ContextLengthError, str(CONTEXT_LEN + 1), f"context of {CONTEXT_LEN}"):
            attempt(stack, make(token_ids=[3] * (CONTEXT_LEN - 1)))

    def test_a_base_beyond_what_is_held(self, stack: LocalStack, make: Make) -> None:
        with refused(PrefixMismatchError, "base_len=1 ", "0 tokens held"):
            attempt(stack, make(base_len=1))
        with pytest.raises(PrefixMismatchError) as caught:
            attempt(stack, make(), make(request_id=2, base_len=6))
        assert (caught.value.base_len, caught.value.held_len) == (6, 5)

    def test_two_of_one_message_of_which_one_is_wrong(self, stack: LocalStack, make: Make) -> None:
        role, message = SIDES[make]
        with raw_stream(stack, role) as stream:
            both = message(make(1, base_len=3), make(2), opened=[opening(1), opening(2)])
            stream.send(both)
            found = [stream.read()]
            if not (found[0].sequence_ids and found[0].errors):
                found.append(stream.read())
        assert [each for one in found for each in one.sequence_ids] == [2]
        assert [(each.sequence_id, each.reason) for one in found for each in one.errors] == [
            (1, "PREFIX_MISMATCH")
        ]


SIX = certain([6])[0]


class TestRawVerify:
    @pytest.mark.parametrize(
        ("fields", "parts"),
        [
            ({"token_ids": [6, OUTSIDE]}, (f"token_ids={OUTSIDE}",)),
            ({"token_ids": [6, 2**32 - 1]}, ("token_ids=-1",)),
            ({"token_ids": [6, 5]}, ("support_token_ids=5", "missing where it was drawn from")),
            ({"parents": [0, -1]}, ("parent_indices[0]=0",)),
            ({"parents": [-1, -1]}, ("support_lens=2", "must be 0 for a tree")),
            ({"supports": ()}, ("support_lens=0", "must be 2")),
            ({"supports": [SIX, NO_SUPPORT]}, ("support_lens=0", "must be over 0 for all 2 tokens")),
            (
                {"supports": [SIX, Support(np.array([7, OUTSIDE]), HALF)]},
                (f"support_token_ids={OUTSIDE}", "vocabulary"),
            ),
            (
                {"supports": [SIX, Support(np.array([7, 7]), HALF)]},
                ("support_token_ids=7", "is in a support twice"),
            ),
        ],
    )
    def test_refused(self, stack: LocalStack, fields: dict[str, Any], parts: tuple[str, ...]) -> None:
        with refused(InvalidRequestError, *parts):
            attempt(stack, verifying(proposal=judged(**fields)))

    @pytest.mark.parametrize(
        ("probs", "parts"),
        [
            ([0.5, 0.6], ("support_probs=[1.0, 1.1", "must add up to 1")),
            ([1.0, 0.0], ("support_probs=0.0", "must be positive")),
            ([0.5, float("nan")], ("support_probs=nan", "must be positive")),
        ],
    )
    def test_probabilities_where_it_may_go_on_by_itself(
        self, stack: LocalStack, probs: list[float], parts: tuple[str, ...]
    ) -> None:
        wrong = Support(np.array([7, 6]), np.array(probs, np.float32))
        order = verifying(proposal=judged(supports=[SIX, wrong]), needs_probs=True)
        with refused(InvalidRequestError, *parts):
            attempt(stack, order)

    def test_supports_where_tokens_are_matched(self, stack: LocalStack) -> None:
        with refused(InvalidRequestError, "support_lens=2", "must be 0"):
            attempt(stack, verifying(), opened=opening(2, sampling=sampling(temperature=0.0)))

    @pytest.mark.parametrize(
        ("ahead", "parts"),
        [
            (AheadOrder(2, 1, [OUTSIDE], Proposal(3, [4])), (f"path_token_ids[0]={OUTSIDE}",)),
            (AheadOrder(2, 1, [5], Proposal(3, [OUTSIDE])), (f"token_ids={OUTSIDE}",)),
            (AheadOrder(2, 1, [5], Proposal(3, [4], parents=[0])), ("parent_indices[0]=0",)),
        ],
    )
    def test_a_proposal_ahead_that_is_wrong_ends_its_sequence_alone(
        self, stack: LocalStack, ahead: AheadOrder, parts: tuple[str, ...]
    ) -> None:
        first = opening(2, sampling=sampling(rule=common_pb2.RULE_GUMBEL), may_go_on=True)
        with raw_stream(stack, "verify") as stream:
            stream.ask(verify(verifying(1), opened=[opening(1), first]))
            with pytest.raises(SequenceFailedError) as failed:
                stream.ask(verify(ahead))
            with refused(InvalidRequestError, *parts):
                raise failed.value.of(2)
            assert stream.ask(verify(verifying(1, request_id=2))).sequence_ids == [1]

    def test_a_chain_spelt_out_is_a_chain(self, stack: LocalStack) -> None:
        (answer,) = attempt(stack, verifying(proposal=judged(parents=[-1, 0])))
        assert answer.num_rows == [3]


@pytest.mark.parametrize("make", SIDES)
@pytest.mark.parametrize(
    ("sequence_id", "least", "closed"), [(0, 0, ()), (-3, 0, ()), (1, 1, ()), (1, 1, (1,))]
)
def test_a_sequence_id_that_is_not_new(
    stack: LocalStack, make: Make, sequence_id: int, least: int, closed: Sequence[int]
) -> None:
    """Nor is one that is used again when it is closed. The stream ends."""
    role, message = SIDES[make]
    with raw_stream(stack, role) as stream:
        if least:
            stream.ask(message(make(1), opened=[opening(1)]))
        with refused(InvalidRequestError, f"sequence_id={sequence_id}: must be over {least}"):
            stream.ask(message(opened=[opening(sequence_id)], closed=closed))


@pytest.mark.parametrize("make", SIDES)
def test_columns_that_do_not_fit_each_other(stack: LocalStack, make: Make) -> None:
    """The requests of the message are not known: the stream ends."""
    role, message = SIDES[make]
    wrong = message(make(1), make(2), opened=[opening(1), opening(2)])
    wrong.request_ids[:] = [1]
    with raw_stream(stack, role) as stream, refused(InvalidRequestError, "request_ids=1: must have 2"):
        stream.ask(wrong)
