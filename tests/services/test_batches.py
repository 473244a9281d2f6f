"""Proposals for an engine that judges them itself, and the options of the plug-in for vLLM."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import draft_service.service
from coordinator import batches
from coordinator.batches import BatchDrafter, StepRow
from coordinator.cost import CallOutcome
from specwire import SamplingParams, sglang
from specwire.cli.process import Service
from specwire.config.services import CoordinatorConfig, DraftConfig
from specwire.core import ModelInfo
from specwire.errors import ConfigError, HandshakeError, ServiceUnavailableError
from specwire.rpc import descriptors
from specwire.vllm import check_version, read_options
from tests.support.harness import LOOPBACK, handshake, local_stack, on_own_loop
from tests.support.processes import wait_until
from tests.support.tiny_models import VOCAB_SIZE, build, reference_model, save, written_by_transformers

NUM_TOKENS = 61
NUM_STEPS, MOST_ACCEPTED = 13, 48
"""The first step has no draft tokens, and each of the others accepts 4."""
LONGEST = 200
TARGET = ModelInfo(name="target", vocab_size=VOCAB_SIZE, context_len=LONGEST)


class Engine:
    """Rows of known greedy texts, judged as an engine judges one-point proposals."""

    def __init__(self, texts: Sequence[tuple[list[int], list[int]]]) -> None:
        self.texts = [prompt + output for prompt, output in texts]
        self.lengths = [len(prompt) for prompt, _ in texts]
        self.proposals: list[list[int]] = [[] for _ in texts]
        self.num_steps = 0
        self.num_accepted = 0

    @property
    def running(self) -> list[int]:
        """Those whose text is not whole."""
        return [i for i, text in enumerate(self.texts) if self.lengths[i] < len(text)]

    def step(self, drafts: BatchDrafter, order: Sequence[int] | None = None) -> None:
        """One pass over the rows, in this order, and the proposals for the next one."""
        rows: list[StepRow | None] = []
        places = [i for i in (self.running if order is None else order) if i in self.running]
        for i in places:
            text, length = self.texts[i], self.lengths[i]
            rest = text[length:]
            agreed = 0
            while agreed < len(self.proposals[i]) and self.proposals[i][agreed] == rest[agreed]:
                agreed += 1
                if agreed == len(rest):
                    agreed -= 1
                    break
            self.num_accepted += agreed
            self.lengths[i] += agreed + 1
            tokens = np.zeros(LONGEST, dtype=np.int32)
            tokens[: self.lengths[i]] = text[: self.lengths[i]]
            rows.append(StepRow(tokens, self.lengths[i], agreed + 1))
        for i, proposal in zip(places, drafts.propose(rows), strict=True):
            self.proposals[i] = proposal
        self.num_steps += 1

    def finish(self, drafts: BatchDrafter) -> None:
        """All steps that are left."""
        while self.running:
            self.step(drafts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def texts() -> list[tuple[list[int], list[int]]]:
    """The draft's own, of prompts of equal lengths of which two are the same."""
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12], [9, 10, 11, 12], [13, 14, 15, 3]]
    draft = reference_model("llama")
    return [(prompt, written_by_transformers(draft, prompt, NUM_TOKENS)) for prompt in prompts]


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    config = DraftConfig(
        model=str(model), dtype="float32", num_kv_tokens=16384, grace_s=0.0, address=LOOPBACK
    )
    with on_own_loop(lambda: draft_service.service.serving(config)) as address:
        yield address


def drafter(address: str, **options: Any) -> BatchDrafter:
    options = {"num_draft_tokens": "4", "draft_timeout_ms": 20_000.0, **options}
    return BatchDrafter(CoordinatorConfig(draft_address=address, **options), TARGET, 8)


@pytest.fixture
def drafts(address: str) -> Iterator[BatchDrafter]:
    found = drafter(address, num_outcomes="0")
    yield found
    found.close()


def test_every_proposal_follows_its_row(
    drafts: BatchDrafter, address: str, texts: list[tuple[list[int], list[int]]]
) -> None:
    """Draft and target are the same, so all is accepted while each row has its own sequence."""
    engine, rng = Engine(texts), np.random.default_rng(0)
    while engine.running:
        engine.step(drafts, rng.permutation(len(texts)).tolist())
    assert engine.num_steps == NUM_STEPS
    counts = drafts.take_counts()
    assert counts.outcomes == {CallOutcome.ASKED: len(texts) * engine.num_steps}
    assert counts.num_accepted_tokens == engine.num_accepted
    assert handshake("draft", address).status.num_sequences == len(texts)
    assert drafts.take_counts().num_accepted_tokens == 0


def test_a_row_that_was_put_off_goes_on(
    drafts: BatchDrafter, texts: list[tuple[list[int], list[int]]]
) -> None:
    engine = Engine(texts)
    engine.step(drafts)
    for _ in range(3):
        engine.step(drafts, [0, 1, 2])
    num_tokens = engine.lengths[3]
    engine.step(drafts)
    assert engine.lengths[3] == num_tokens + 5
    engine.finish(drafts)
    assert engine.num_accepted == len(texts) * MOST_ACCEPTED


def test_rows_that_no_longer_come_are_closed(
    drafts: BatchDrafter,
    address: str,
    texts: list[tuple[list[int], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "_UNSEEN_STEPS", 3)
    monkeypatch.setattr(batches, "_IDLE_S", 0.2)
    engine = Engine(texts)
    engine.step(drafts)
    for _ in range(4):
        engine.step(drafts, [0, 1])
    assert handshake("draft", address).status.num_sequences == 2

    def is_free() -> bool:
        status = handshake("draft", address).status
        return not (status.num_sequences or status.num_held_pages)

    wait_until(is_free, 20)
    engine.finish(drafts)
    assert engine.num_accepted == len(texts) * MOST_ACCEPTED


def test_a_step_that_waits_is_not_idle(
    drafts: BatchDrafter, texts: list[tuple[list[int], list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that begins just before idle sequences would have ended keeps them, and all of its rows."""
    monkeypatch.setattr(batches, "_IDLE_S", 0.002)
    engine = Engine(texts)
    engine.finish(drafts)
    assert engine.num_accepted == len(texts) * MOST_ACCEPTED


def test_prompts_in_parts_and_none_worth_drafting_get_nothing(drafts: BatchDrafter) -> None:
    tokens = np.arange(LONGEST, dtype=np.int32) % VOCAB_SIZE
    assert drafts.propose([None, None]) == [[], []]
    found = drafts.propose([None, StepRow(tokens, 5, 1), StepRow(tokens, LONGEST - 1, 1)])
    assert (found[0], len(found[1]), found[2]) == ([], 4, [])  # the context has no room after the last


def test_a_row_to_which_the_step_added_nothing_costs_no_other_its_proposal(drafts: BatchDrafter) -> None:
    tokens = np.arange(3, LONGEST + 3, dtype=np.int32) % VOCAB_SIZE
    rows = [StepRow(tokens, 5, 1), StepRow(tokens, 9, 1)]
    found = drafts.propose(rows)
    assert drafts.propose([StepRow(tokens, 5, 0), StepRow(tokens, 10, 1)])[0] == found[0]
    assert len(drafts.propose([StepRow(tokens, 6, 1), StepRow(tokens, 11, 1)])[1]) == 4


def test_after_the_end_there_is_nothing_and_no_wait(address: str) -> None:
    drafts = drafter(address)
    drafts.close()
    found: list[list[list[int]]] = []
    row = StepRow(np.array([5, 6, 7], dtype=np.int32), 3, 1)
    asking = threading.Thread(target=lambda: found.append(drafts.propose([row, None])), daemon=True)
    asking.start()
    asking.join(5)
    assert found == [[[], []]]


def test_the_end_waits_for_a_step(address: str) -> None:
    """A step that other threads end meanwhile has its proposals, and no descriptor is left."""
    num_open = descriptors.num_open()
    drafts, done = drafter(address), threading.Event()
    row = StepRow(np.array([5, 6, 7], dtype=np.int32), 3, 1)

    def ask() -> None:
        while not done.is_set():
            drafts.propose([row, None])

    asking, *closing = (
        threading.Thread(target=each, daemon=True) for each in (ask, drafts.close, drafts.close)
    )
    asking.start()
    time.sleep(0.1)
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(5)
    done.set()
    asking.join(5)
    assert not any(thread.is_alive() for thread in (asking, *closing))
    with pytest.raises(ServiceUnavailableError):
        drafter("127.0.0.1:1")
    assert descriptors.num_open() <= num_open


def test_what_was_prepared_needs_no_request(address: str, texts: list[tuple[list[int], list[int]]]) -> None:
    drafts = drafter(address, num_outcomes="4")
    engine = Engine(texts)

    def is_prepared() -> bool:
        opened = [each.drafter._sequence for each in drafts._rows if each is not None]
        return all(each is not None and each.prepared for each in opened)

    while engine.running:
        engine.step(drafts)
        if engine.num_steps < NUM_STEPS - 1:  # the draft works during the target's pass, but not at the end
            wait_until(is_prepared, 20)
    outcomes = drafts.take_counts().outcomes
    assert outcomes[CallOutcome.READY] > outcomes[CallOutcome.ASKED]
    assert engine.num_accepted == len(texts) * MOST_ACCEPTED
    drafts.close()


def test_lengths_follow_what_pays(address: str, texts: list[tuple[list[int], list[int]]]) -> None:
    drafts = drafter(address, num_draft_tokens="auto", num_outcomes="0")
    other = written_by_transformers(build("llama", seed=5), texts[0][0], 190)
    engine = Engine([(texts[0][0], other)])
    while engine.running:
        time.sleep(0.002)
        engine.step(drafts)
    few = drafts.take_counts()
    assert few.num_draft_tokens < 190, "drafts that are never right are given up"
    drafts.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_draft_costs_its_proposals(
    model: Path, address: str, texts: list[tuple[list[int], list[int]]], fault: signal.Signals
) -> None:
    flags = ["--model", str(model), "--dtype", "float32", "--address", LOOPBACK, "--num-threads", "1"]
    lost = Service("draft_service", flags)
    drafts = drafter(lost.ready(240), draft_timeout_ms=200.0)
    engine = Engine(texts)
    engine.step(drafts)
    lost.process.send_signal(fault)
    took_s: list[float] = []
    while engine.running:
        began_s = time.monotonic()
        engine.step(drafts, {0: [0, 1], 1: [2, 3]}.get(len(took_s)))
        took_s.append(time.monotonic() - began_s)
    assert max(took_s) < 2, "a step is held up no longer than proposals are worth"
    assert sum(each > 0.19 for each in took_s) <= (fault is signal.SIGSTOP), "once for all rows"
    assert engine.num_accepted < len(texts) * NUM_TOKENS / 2
    lost.process.kill()
    lost.process.wait()
    drafts.close()
    drafts = drafter(f"{lost.address},{address}")
    engine = Engine(texts)
    engine.finish(drafts)
    assert engine.num_accepted == len(texts) * MOST_ACCEPTED, "another replica does"
    drafts.close()


class TestRefusals:
    def test_nothing_serves(self) -> None:
        with pytest.raises(ServiceUnavailableError, match=r"127.0.0.1:1: nothing serves at this address"):
            drafter("127.0.0.1:1")

    def test_another_vocabulary(self, address: str) -> None:
        target = replace(TARGET, vocab_size=VOCAB_SIZE + 1)
        with pytest.raises(HandshakeError, match=f"'target' .* {VOCAB_SIZE + 1} and {VOCAB_SIZE} tokens"):
            BatchDrafter(CoordinatorConfig(draft_address=address), target, 8)

    @pytest.mark.parametrize("version", ["0.21.1", "0.34.0", "1.0.0"])
    def test_another_version(self, version: str) -> None:
        with pytest.raises(ConfigError, match=rf"vLLM {version}: this plug-in is for 0.22 to 0.33"):
            check_version(version)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({}, "specwire.draft_address: unset, and so is SPECWIRE_DRAFT_ADDRESS"),
            ({"draft_adress": "a:1"}, "specwire.draft_adress: is not known; did you mean draft_address?"),
            ({"verify_address": "a:1"}, "specwire.verify_address: is not known"),
            ({"draft_address": "a"}, "specwire.draft_address: a: is not HOST:PORT"),
            (
                {"draft_address": "a:1", "draft_timeout_ms": "soon"},
                "specwire.draft_timeout_ms: must be a number",
            ),
            ({"draft_address": "127.0.0.1:1", "num_draft_tokens": 65}, "specwire.num_draft_tokens: 65"),
        ],
    )
    def test_options(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError) as refused:
            read_options(given, {})
        assert said in str(refused.value)


def test_options_come_from_variables_too() -> None:
    environ = {"SPECWIRE_DRAFT_ADDRESS": "127.0.0.1:7071", "SPECWIRE_MAX_RUNNING": "of another process"}
    config = read_options({"num_outcomes": 4}, environ)
    assert (config.draft_address, config.fixed_outcomes) == ("127.0.0.1:7071", 4)


class TestSGLang:
    """With a stand-in that has the names and signatures that the plug-in uses: SGLang does not run here."""

    @pytest.fixture
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        registered: dict[str, Any] = {}

        class Worker:
            draft_token_num = 5

            def __init__(self, server_args: Any) -> None:
                pass

        class SpeculativeAlgorithm:
            @classmethod
            def register(cls, name: str, *, supports_overlap: bool, spec_class: type[Any]) -> Any:
                assert spec_class().is_ngram()
                assert not supports_overlap
                return lambda factory: registered.setdefault(name, factory)

        def module(name: str, **contents: Any) -> None:
            monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", SimpleNamespace(**contents))

        for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        module("speculative.spec_info", SpeculativeAlgorithm=SpeculativeAlgorithm)
        module("speculative.spec_registry", CustomSpecAlgo=type("CustomSpecAlgo", (), {}))
        module("speculative.ngram_worker", NGRAMWorker=Worker)
        module("distributed", get_tp_group=lambda: SimpleNamespace(rank_in_group=0, world_size=1))
        return registered

    def test_chains_take_the_place_of_n_grams(
        self, engine: Any, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target, draft = pair
        with local_stack(target, draft) as stack:
            monkeypatch.setenv("SPECWIRE_DRAFT_ADDRESS", stack.draft_address)
            monkeypatch.setenv("SPECWIRE_NUM_DRAFT_TOKENS", "3")
            sglang.register()
            args = SimpleNamespace(model_path=str(target), tokenizer_path=None, context_length=None)
            worker = engine["SPECWIRE"](args)(args)
            asked = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, num_draft_tokens=0)
            for done in range(3):
                prompts = [[5, 6, 7], [8, 9]]
                texts = [
                    stack.client.generate(prompt_token_ids=prompt, params=asked).token_ids
                    for prompt in prompts
                ]
                reqs = [
                    SimpleNamespace(rid=str(i), origin_input_ids=prompt, output_ids=list(text[: 1 + done]))
                    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
                ]
                drafted, mask = worker._prepare_draft_tokens(SimpleNamespace(reqs=reqs))
                assert drafted.reshape(2, 5)[:, 0].tolist() == [text[done] for text in texts]
                assert drafted.reshape(2, 5)[:, 1:4].any()
                assert not drafted.reshape(2, 5)[:, 4].any()
                assert (mask.reshape(2, 5, 5) == np.tril(np.ones((5, 5), dtype=bool))).all()
            worker._chains._drafts.close()
