"""A draft with a drafter of its own: the proposals that it makes without, in fewer passes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_service.drafter import DraftDecider
from draft_service.inner.hierarchy import Hierarchy
from draft_service.inner.jobs import InnerJob, InnerStream
from draft_service.inner.model import ModelDrafter
from draft_service.inner.pace import Pace
from specwire import Rule, SamplingParams
from specwire.cli import drafts
from specwire.config.client import ClientConfig
from specwire.config.services import DraftConfig
from specwire.config.stack import UpConfig
from specwire.core import Proposal
from specwire.engine import boot
from specwire.engine.drawn import Drawn
from specwire.errors import ConfigError, ModelLoadError
from specwire.proposals.history import Guess
from specwire.rpc.wire.draft import DraftOrder
from tests.support import vocabularies
from tests.support.draft_streams import draft_stream, opening
from tests.support.harness import LocalStack, local_stack
from tests.support.integrity import check_integrity
from tests.support.pairs import markov_model, save_good_draft, save_hostile_draft, save_target
from tests.support.refusals import refused
from tests.support.tiny_models import VOCAB_SIZE, save
from tests.support.vocabularies import save_tokenizer

PROMPT = [5, 9, 11, 2, 7, 5, 9, 11, 2]
NUM_DRAFT_TOKENS, NUM_ROUNDS = 6, 9
GREEDY = SamplingParams(temperature=0, rule=Rule.GUMBEL, seed=3, ignore_eos=True)
GUMBEL = replace(GREEDY, temperature=0.8)
REJECTION = replace(GUMBEL, rule=Rule.REJECTION)
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {5: 1.0}}
KINDS = [
    pytest.param(GREEDY, id="greedy"),
    pytest.param(GUMBEL, id="gumbel"),
    pytest.param(replace(GREEDY, **PENALTIES), id="greedy, penalties"),
    pytest.param(replace(GUMBEL, top_k=20, **PENALTIES), id="gumbel, penalties"),
]
INNER = ("ngram", "suffix", "same", "hostile")


class Models:
    """Tiny models: the draft, one that guesses as it does, and one that is always wrong."""

    def __init__(self, directory: Path) -> None:
        self.target = save_target(directory / "target")
        self.draft = self.same = save_good_draft(directory / "draft")
        self.hostile = save_hostile_draft(directory / "hostile")
        self._found: dict[str, tuple[list[Proposal], int]] = {}

    def inner(self, name: str) -> str:
        return str(getattr(self, name, name))

    def without(self, params: SamplingParams) -> tuple[list[Proposal], int]:
        """Proposals, and passes, of the draft alone."""
        if repr(params) not in self._found:
            self._found[repr(params)] = proposals(self.draft, "", params)
        return self._found[repr(params)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """All guesses are run, whatever they bring."""
    genuine = Pace.num_guesses

    def most(self: Pace, look: Guess | None, times: Sequence[float]) -> int:
        genuine(self, look, times)
        return len(times) - 1 if look else 0

    monkeypatch.setattr(Pace, "num_guesses", most)
    monkeypatch.setattr(Pace, "is_due", lambda _: True)


@contextlib.contextmanager
def served(
    draft: Path | str, inner: str, **options: Any
) -> Iterator[tuple[boot.ModelService, Hierarchy | None]]:
    """A draft service without a network, which holds nothing in the end."""
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_tokens": 4096, "max_support": 16, "inner": inner}
    config = DraftConfig(model=str(draft), **settings | options)
    hierarchy = Hierarchy(config) if inner else None
    service = boot.start(config, "draft", DraftDecider(config), hook=hierarchy)
    try:
        yield service, hierarchy
    finally:
        service.close()
    pools = [service.runner.pool]
    if hierarchy is not None:
        if isinstance(hierarchy.drafter, ModelDrafter):
            pools.append(hierarchy.drafter.runner.pool)
        hierarchy.drafter.close()
    for pool in pools:
        check_integrity(pool)
        assert pool.num_held_pages == 0


def proposals(
    draft: Path | str, inner: str, params: SamplingParams, prompt: Sequence[int] = PROMPT, **options: Any
) -> tuple[list[Proposal], int]:
    """Of rounds that keep 0, 1, 2, ... draft tokens in turns; and the passes that the draft took."""
    with served(draft, inner, **options) as (service, hierarchy):
        found = asyncio.run(_proposals(service, hierarchy, params, prompt))
        return found, service.engine.status().num_steps


async def _proposals(
    service: boot.ModelService,
    hierarchy: Hierarchy | None,
    params: SamplingParams,
    prompt: Sequence[int] = PROMPT,
) -> list[Proposal]:
    found: list[Proposal] = []
    async with draft_stream(service, hierarchy=hierarchy) as (call, _):
        call.send([DraftOrder(1, 1, 0, prompt, NUM_DRAFT_TOKENS)], [opening(1, params, len(prompt))])
        for number in range(NUM_ROUNDS):
            message = await call.read()
            assert not message.errors
            [answer] = message.answers
            found.append(answer.proposal)
            kept = number % (NUM_DRAFT_TOKENS + 1)
            recovered = (sum(answer.proposal.token_ids) + number) % service.info.vocab_size
            base_len = answer.proposal.base_len + kept
            call.send([DraftOrder(1, number + 2, base_len, [recovered], NUM_DRAFT_TOKENS)])
        await call.read()
        call.send(closed=[1])
    return found


def same(ours: Sequence[Proposal], theirs: Sequence[Proposal]) -> bool:
    """Token ids, and the ids and probabilities of supports but for the rounding of a wider pass."""
    return all(
        a.base_len == b.base_len
        and list(a.token_ids) == list(b.token_ids)
        and len(a.supports) == len(b.supports)
        and all(
            list(x.token_ids) == list(y.token_ids) and np.allclose(x.probs, y.probs, atol=1e-5)
            for x, y in zip(a.supports, b.supports, strict=True)
        )
        for a, b in zip(ours, theirs, strict=True)
    )


class TestProposals:
    """As without an inner drafter, for every one, and with every parameter."""

    @pytest.mark.sample(4)
    @pytest.mark.parametrize("params", KINDS)
    @pytest.mark.parametrize("inner", INNER)
    @pytest.mark.usefixtures("eager")
    def test_they_are_the_same(self, models: Models, params: SamplingParams, inner: str) -> None:
        ours, num_passes = proposals(models.draft, models.inner(inner), params)
        theirs, most = models.without(params)
        assert same(ours, theirs)
        assert num_passes <= most
        if inner == "same":  # one pass a proposal: its guesses are made with the noise of the draft
            assert num_passes == NUM_ROUNDS + 1

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("params", KINDS[:2])
    def test_guesses_that_are_believed_are_caught(
        self, models: Models, params: SamplingParams, monkeypatch: pytest.MonkeyPatch, eager: None
    ) -> None:
        """The control of the test above: whatever was guessed counts as drawn."""
        genuine = InnerJob.add

        def believe(self: InnerJob, drawn: Drawn, row: int) -> None:
            token_ids, guessed = [*drawn.token_ids], self.sequence.tokens[self.position :]
            token_ids[row : row + len(guessed)] = guessed
            genuine(self, drawn._replace(token_ids=token_ids), row)

        monkeypatch.setattr(InnerJob, "add", believe)
        ours, _ = proposals(models.draft, models.inner("hostile"), params)
        assert not same(ours, models.without(params)[0])

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("inner", ["same", "ngram"])
    def test_a_batch_invariant_draft_rounds_alike(self, models: Models, inner: str, eager: None) -> None:
        """Bit for bit: candidates and supports are those of a pass of one token."""
        options: dict[str, Any] = {"batch_invariant": True, "dtype": "bfloat16"}
        ours, _ = proposals(models.draft, models.inner(inner), GUMBEL, **options)
        theirs, _ = proposals(models.draft, "", GUMBEL, **options)
        assert [p.token_ids for p in ours] == [p.token_ids for p in theirs]

    @pytest.mark.usefixtures("eager")
    def test_a_text_that_repeats_itself_takes_fewer_passes(self, tmp_path: Path) -> None:
        """A draft whose greedy token depends on the last one alone goes in circles."""
        draft = save(markov_model(), tmp_path / "markov")
        theirs, most = proposals(draft, "", GREEDY)
        for inner in ("ngram", "suffix"):
            ours, num_passes = proposals(draft, inner, GREEDY)
            assert same(ours, theirs)
            assert num_passes < 0.8 * most

    def test_an_inner_model_as_dear_as_the_draft_is_left_alone(self, models: Models) -> None:
        """The pace is its own here: a guess costs a pass of the inner model, and brings less than one."""
        ours, num_passes = proposals(models.draft, models.inner("hostile"), GREEDY)
        theirs, most = models.without(GREEDY)
        assert same(ours, theirs)
        assert num_passes >= 0.7 * most


@pytest.mark.usefixtures("eager")
class TestRejectionSampling:
    """How long a proposal takes must not depend on its tokens: see "Time and tokens" in docs/exactness.md."""

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
    def test_a_pass_for_each_token(self, models: Models, rule: Rule) -> None:
        params = replace(REJECTION, rule=rule)
        ours, num_passes = proposals(models.draft, models.inner("same"), params)
        theirs, others = models.without(params)
        assert same(ours, theirs)
        assert num_passes == others == NUM_DRAFT_TOKENS * (NUM_ROUNDS + 1)

    def test_with_guesses_the_passes_would_tell(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The control: proposals and supports are the same, and the number of passes follows the tokens."""
        monkeypatch.setattr(Hierarchy, "open", lambda self, _: InnerStream(self.drafter))
        draft, found = save(markov_model(), tmp_path / "markov"), set()
        for seed in range(3):
            params = replace(REJECTION, seed=seed, temperature=0.5)
            ours, num_passes = proposals(draft, "ngram", params)
            assert same(ours, proposals(draft, "", params)[0])
            found.add(num_passes)
        assert len(found) > 1


class TestLimits:
    """Guesses give way, and proposals stay what they are."""

    @pytest.mark.usefixtures("eager")
    def test_no_room_in_the_inner_cache(self, models: Models) -> None:
        with served(models.draft, models.inner("same")) as (service, hierarchy):
            assert hierarchy is not None
            assert isinstance(hierarchy.drafter, ModelDrafter)
            runner = hierarchy.drafter.runner
            with runner.new_sequence() as other:
                other.append(runner.pool.num_free_pages * runner.pool.page_size)
                found = asyncio.run(_proposals(service, hierarchy, GREEDY))
            assert same(found, models.without(GREEDY)[0])
            assert service.engine.status().num_steps == models.without(GREEDY)[1]

    @pytest.mark.usefixtures("eager")
    def test_a_long_prompt_is_run_in_parts(self, models: Models) -> None:
        prompt = np.random.default_rng(0).integers(VOCAB_SIZE, size=100).tolist()
        options = {"max_prefill_tokens": 16}
        ours, num_passes = proposals(models.draft, models.inner("same"), GREEDY, prompt, **options)
        theirs, most = proposals(models.draft, "", GREEDY, prompt, **options)
        assert same(ours, theirs)
        assert num_passes < most

    def test_one_that_fails_is_asked_no_more(
        self, models: Models, monkeypatch: pytest.MonkeyPatch, eager: None
    ) -> None:
        calls: list[object] = []

        def fail(*arguments: object) -> None:
            calls.append(arguments)
            raise RuntimeError("on purpose")

        monkeypatch.setattr(ModelDrafter, "guess", fail)
        ours, _ = proposals(models.draft, models.inner("same"), GREEDY)
        assert same(ours, models.without(GREEDY)[0])
        assert len(calls) == 1


@pytest.fixture(scope="module", params=["ngram", "same"])
def stack(models: Models, request: pytest.FixtureRequest) -> Iterator[LocalStack]:
    """The draft's passes are slept to 3 ms, so that guesses of a model as dear as the draft pay."""
    options = {"inner": models.inner(request.param), "least_pass_ms": 3.0}
    outcomes = {"num_outcomes": "4"}
    with local_stack(
        models.target, models.draft, draft_options=options, coordinator_options=outcomes
    ) as running:
        yield running


class TestThroughTheServices:
    """Text as of plain decoding, over gRPC; chains, trees and prepared outcomes."""

    SHAPES: tuple[dict[str, Any], ...] = (
        {"num_draft_tokens": 6, "max_depth": 0},
        {"num_draft_tokens": 16, "max_depth": 4},
        {},
    )

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("params", [KINDS[0], KINDS[3]])
    def test_the_text_is_that_of_plain_decoding(self, stack: LocalStack, params: SamplingParams) -> None:
        params = replace(params, max_tokens=30)
        plain = stack.client.generate(params=replace(params, num_draft_tokens=0), prompt_token_ids=PROMPT)
        for shape in self.SHAPES:
            done = stack.client.generate(params=replace(params, **shape), prompt_token_ids=PROMPT)
            assert done.token_ids == plain.token_ids
            assert done.speculation.num_draft_tokens > 0
            assert not done.speculation.draft_unavailable
        stack.assert_idle_within(5.0)

    @pytest.mark.sample(1)
    def test_the_handshake_and_the_command_drafts_name_it(self, stack: LocalStack) -> None:
        _, draft = stack.client.get_model_info()
        assert draft is not None
        assert draft.inner in ("ngram", "draft")
        stack.client.generate(params=replace(GREEDY, max_tokens=8), prompt_token_ids=PROMPT)
        shown = drafts.show(ClientConfig(server=stack.address), colour=False).splitlines()
        [(here, num_rounds)] = [
            (words[1], words[-5]) for line in shown if (words := line.split()) and words[0] == "INNER>model"
        ]
        assert here == "yes"
        assert int(num_rounds) > 0


class TestRefusals:
    """By name, with what is wrong."""

    @pytest.mark.parametrize(
        ("draft", "part"),
        [
            ("ngram>", "no draft model"),
            ("bigram>embedded", "bigram is none of ngram, suffix"),
            ("ngram>suffix", "suffix is no draft model"),
            ("ngram>suffix>embedded", "more than one inner drafter"),
            ("embedded>emulated:step_ms=1", "has no tokenizer to compare"),
            ("/nowhere>embedded", "no such model directory"),
        ],
    )
    def test_of_up(self, draft: str, part: str) -> None:
        with refused(ConfigError, "--draft", part):
            UpConfig(draft=draft)

    def test_what_does_not_combine(self) -> None:
        """Another vocabulary, and several devices."""
        with refused(ConfigError, "--inner", "another vocabulary"):
            DraftConfig(inner="ngram", target_tokenizer="x")
        config = '{"method": "draft_model", "use_heterogeneous_vocab": true}'
        with refused(ConfigError, "--draft", "use_heterogeneous_vocab"):
            UpConfig(draft="ngram>embedded", speculative_config=config)
        with refused(ConfigError, "--inner", "one device"):
            DraftConfig(inner="ngram", tensor_parallel_size=2)

    def test_another_tokenizer(self, tmp_path: Path) -> None:
        for name, tokenizer in (("one", vocabularies.byte_level()), ("two", vocabularies.pieces())):
            save_tokenizer(tokenizer, save_target(tmp_path / name, vocab_size=430))
        with (
            refused(ModelLoadError, "--inner", "two", "its tokenizer is not that of --model", "one"),
            served(tmp_path / "one", str(tmp_path / "two")),
        ):
            pass

    def test_a_model_that_cannot_be_served(self, models: Models, tmp_path: Path) -> None:
        inner = save_target(tmp_path / "mamba", "mamba")
        with refused(ModelLoadError, "--inner", "mamba"), served(models.draft, str(inner)):
            pass


def test_up_passes_it_on() -> None:
    config = UpConfig(draft="suffix,ngram>embedded")
    assert (config.named.model, config.named.inner) == ("embedded", "ngram")
    assert "suffix" in config.coordinator_speculation
    assert UpConfig(draft="embedded").named.inner == ""
