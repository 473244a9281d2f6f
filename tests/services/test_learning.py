"""A draft that learns, through real services: what teaches it, what is forgotten, what is refused."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from draft_service import learner, lessons
from draft_service.learner import Learner
from draft_service.lessons import Window
from draft_service.student import Student
from specwire import Rule, SamplingParams
from specwire.cli import drafts
from specwire.config.client import ClientConfig
from specwire.config.services import DraftConfig
from specwire.config.stack import UpConfig
from specwire.core import Learning
from specwire.errors import ConfigError
from specwire.rpc.wire import model as wire
from tests.support.harness import LocalStack, handshake, local_stack
from tests.support.pairs import markov_model
from tests.support.processes import wait_until
from tests.support.tiny_models import save

PROMPT = [3]
PARAMS = SamplingParams(max_tokens=200, rule=Rule.GUMBEL, seed=1, ignore_eos=True)
LEARN: dict[str, Any] = {"learn": True, "learn_rate": 0.02, "learn_share": 1.0}
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The draft likes other tokens than the target."""
    directory = tmp_path_factory.mktemp("pair")
    return save(markov_model(), directory / "target"), save(markov_model(1.0, 1), directory / "draft")


@pytest.fixture
def stack(pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    with local_stack(*pair, draft_options=LEARN) as running:
        yield running


def learning(stack: LocalStack) -> Learning:
    """As the draft service says now; the coordinator asks it every second."""
    found = wire.model_info_from_proto(handshake("draft", stack.draft_address).model).learning
    assert found is not None
    return found


def generate(stack: LocalStack, **settings: Any) -> None:
    stack.client.generate(params=replace(PARAMS, **settings), prompt_token_ids=PROMPT)


def generate_until(stack: LocalStack, num_versions: int) -> Learning:
    seeds = itertools.count()

    def is_far_enough() -> bool:
        generate(stack, seed=next(seeds))
        return learning(stack).num_versions >= num_versions

    wait_until(is_far_enough, TIMEOUT_S)
    return learning(stack)


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> list[Window]:
    """What sequences hand over meanwhile."""
    found: list[Window] = []
    monkeypatch.setattr(Learner, "_hand_over", lambda self, window: found.append(window))
    return found


def teaches(stack: LocalStack, taught: list[Window], **settings: Any) -> bool:
    """Whether a generation hands over windows."""
    taught.clear()
    generate(stack, max_tokens=30, **settings)
    stack.assert_idle_within(5.0)
    return bool(taught)


def test_what_teaches(stack: LocalStack, taught: list[Window]) -> None:
    """Outputs of the target's own distribution; not those of a request that keeps to itself."""
    for own in ({"temperature": 0.0}, {"rule": Rule.REJECTION}, {"rule": Rule.BLOCK, "top_p": 0.9}):
        assert teaches(stack, taught, **own), own
    for other in (
        {"logit_bias": {3: 1.0}},
        {"presence_penalty": 1.0},
        {"cache_salt": "mine"},
        {"draft": "off"},
    ):
        assert not teaches(stack, taught, **other), other


def test_requests_with_a_salt_teach_if_they_may(pair: tuple[Path, Path], taught: list[Window]) -> None:
    with local_stack(*pair, draft_options=LEARN | {"learn_shared": True}) as stack:
        assert teaches(stack, taught, cache_salt="mine")


def test_random_numbers_that_may_be_used_again_teach_nothing(
    pair: tuple[Path, Path], taught: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that does not know yet that the draft learns keeps the seed of the request."""
    known = wire.model_info_from_proto
    monkeypatch.setattr(wire, "model_info_from_proto", lambda message: replace(known(message), learning=None))
    with local_stack(*pair, draft_options=LEARN) as stack:
        assert not teaches(stack, taught, rule=Rule.REJECTION)
        assert teaches(stack, taught)


@pytest.mark.slow
def test_a_seed_that_is_given_twice_has_other_numbers(stack: LocalStack) -> None:
    """The draft has learnt from the first text, whose numbers decided about it."""
    settings = replace(PARAMS, rule=Rule.REJECTION)
    texts = [stack.client.generate(params=settings, prompt_token_ids=PROMPT).token_ids for _ in range(2)]
    assert texts[0] != texts[1]


def test_prompts_computed_with_other_weights_are_not_found(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the weights are replaced they are; afterwards they are computed anew."""
    monkeypatch.setattr(lessons.Grades, "decide", lambda _: True)  # after its first step
    prompt = [*range(16)] * 8

    def num_hits() -> int:
        before = stack.status("draft").num_hit_tokens
        stack.client.generate(params=replace(PARAMS, max_tokens=4), prompt_token_ids=prompt)
        return stack.status("draft").num_hit_tokens - before

    num_hits()
    assert num_hits() >= 96
    generate_until(stack, 1)
    monkeypatch.setattr(Learner, "wait_s", lambda _: None)  # nothing more is studied
    settle(stack)
    assert num_hits() == 0
    assert num_hits() >= 96


def settle(stack: LocalStack) -> None:
    """Until the step that was under way has replaced the weights, or not."""
    deadline, now = time.monotonic() + TIMEOUT_S, learning(stack)
    while True:
        time.sleep(0.3)
        if now == (now := learning(stack)):
            return
        assert time.monotonic() < deadline


@pytest.mark.serial
def test_requests_do_not_wait_for_more_than_one_piece(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pieces of 30 ms all the time, a proposal comes at most one piece later."""
    study = Student.study

    def slow(self: Student, window: Window, *, is_graded: bool) -> Any:
        time.sleep(0.03)
        return study(self, window, is_graded=is_graded)

    monkeypatch.setattr(Student, "study", slow)
    monkeypatch.setattr(learner, "NUM_REPEATS", 200)
    with local_stack(*pair, draft_options=LEARN) as stack:
        generate(stack, max_tokens=20)
        done = stack.client.generate(params=replace(PARAMS, max_tokens=40), prompt_token_ids=PROMPT)
        queued_ms = done.timing.draft_queue_ms / done.speculation.num_rounds
        assert queued_ms < 60


def test_a_share_of_the_time(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 20 ms at a share of a quarter begin at least 80 ms apart."""
    starts: list[float] = []

    def noted(self: Student, window: Window, *, is_graded: bool) -> None:
        starts.append(time.monotonic())
        time.sleep(0.02)

    monkeypatch.setattr(Student, "study", noted)
    monkeypatch.setattr(learner, "NUM_REPEATS", 10)
    with local_stack(*pair, draft_options=LEARN | {"learn_share": 0.25}) as stack:
        generate(stack, max_tokens=20)
        wait_until(lambda: len(starts) >= 5, TIMEOUT_S)
    assert min(later - earlier for earlier, later in itertools.pairwise(starts)) >= 0.079


@pytest.mark.slow
def test_a_failure_ends_the_learning_and_not_the_service(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Student, window: Window, *, is_graded: bool) -> None:
        raise MemoryError

    monkeypatch.setattr(Student, "study", fail)
    plain = stack.client.generate(params=replace(PARAMS, num_draft_tokens=0), prompt_token_ids=PROMPT)
    for _ in range(3):
        done = stack.client.generate(params=PARAMS, prompt_token_ids=PROMPT)
        assert done.token_ids == plain.token_ids
        assert not done.speculation.draft_unavailable
    assert caplog.text.count("the draft learns no more") == 1


@pytest.mark.slow
def test_what_it_says(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """In the handshake and in `specwire drafts`; and the weights are written at the end."""
    out = tmp_path / "out"
    with local_stack(*pair, draft_options=LEARN | {"learn_out": str(out)}) as stack:
        now = generate_until(stack, 1)
        assert now.num_steps > 0
        assert now.num_judged_tokens >= lessons.MIN_TESTED
        assert 0 < now.first_agreement < 1
        shown = drafts.show(ClientConfig(server=stack.address), colour=False)
        assert "draft learns: " in shown
        assert "tokens of the target judged" in shown
        assert not out.exists()
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (pair[1], out))
    assert not before.lm_head.weight.equal(after.lm_head.weight)
    with local_stack(pair[0], out) as stack:
        generate(stack)
        _, draft = stack.client.get_model_info()
        assert draft is not None
        assert draft.learning is None
        assert "learns:" not in drafts.show(ClientConfig(server=stack.address), colour=False)


def test_another_model_is_not_replaced(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = save(markov_model(num_layers=2), tmp_path / "other")
    with (
        pytest.raises(ConfigError, match=f"--learn-out {other}: has another model, of num_hidden_layers 2"),
        local_stack(*pair, draft_options=LEARN | {"learn_out": str(other)}),
    ):
        pass


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: DraftConfig(model="emulated:step_ms=1", learn=True), "has no weights"),
        (lambda: DraftConfig(learn=True, tensor_parallel_size=2), "--tensor-parallel-size 2: does not go"),
        (lambda: DraftConfig(learn=True, least_pass_ms=5.0), "--least-pass-ms 5.0: does not go"),
        (lambda: DraftConfig(learn_share=0.0), "--learn-share 0.0: must lie in"),
        (lambda: DraftConfig(learn_rate=0.0), "--learn-rate 0.0"),
        (lambda: DraftConfig(learn_out="x"), "--learn-out x: is of use together with --learn only"),
        (lambda: DraftConfig(learn=True, model="x/y", learn_out="x/y"), "--learn-out x/y: is --model itself"),
        (
            lambda: DraftConfig(learn=True, model="x", learn_out=str(Path("x").absolute())),
            "x: is --model itself",
        ),
        (lambda: UpConfig(draft="ngram", draft_learn=True), "--draft ngram is no model"),
        (lambda: UpConfig(draft="emulated:step_ms=1", draft_learn=True), "has no weights"),
        (
            lambda: UpConfig(
                draft_learn=True,
                speculative_config='{"method": "draft_model", "use_heterogeneous_vocab": true}',
            ),
            "another vocabulary",
        ),
    ],
)
def test_what_does_not_combine(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()
