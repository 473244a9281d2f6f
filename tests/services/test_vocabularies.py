"""Drafts whose tokenizer is not the target's: who is used, who is refused, and what the handshake says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specwire import ConfigError, Grammar, HandshakeError, ModelLoadError, Rule, SamplingParams
from specwire.config.services import DraftConfig
from tests.support import texts, vocabularies
from tests.support.harness import local_stack
from tests.support.pairs import save_target
from tests.support.refusals import refused
from tests.support.vocabularies import OTHER_TEXTS, save_tokenizer

CONFIG = {"speculative_config": json.dumps({"method": "draft_model", "use_heterogeneous_vocab": True})}
VOCAB_SIZE = 430


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Tiny random models with two tokenizers."""
    directory = tmp_path_factory.mktemp("pair")
    target = save_target(directory / "target", vocab_size=VOCAB_SIZE)
    draft = save_target(directory / "draft", seed=4, vocab_size=VOCAB_SIZE)
    save_tokenizer(vocabularies.byte_level(), target)
    save_tokenizer(vocabularies.pieces(OTHER_TEXTS), draft)
    return target, draft


def test_what_is_shared_is_in_the_handshake(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    options = {"target_tokenizer": str(target)}
    with local_stack(target, draft, draft_options=options, coordinator_options=CONFIG) as stack:
        theirs, ours = stack.client.get_model_info()
        assert ours is not None
        assert ours.target_tokenizer_fingerprint == theirs.tokenizer_fingerprint != ours.tokenizer_fingerprint
        assert 0.2 < ours.shared_vocab < ours.shared_text < 1
        assert theirs.target_tokenizer_fingerprint == ""
        assert (theirs.costs is None, ours.costs is None) == (False, True), "a token is not a pass here"


def test_a_draft_with_the_same_tokenizer_needs_no_translation(pair: tuple[Path, Path]) -> None:
    target, _ = pair
    options = {"target_tokenizer": str(target)}
    with local_stack(target, target, draft_options=options, coordinator_options=CONFIG) as stack:
        _, ours = stack.client.get_model_info()
        assert ours is not None
        assert ours.target_tokenizer_fingerprint == ""


def test_a_grammar_without_tokens_of_the_draft_costs_its_request_alone(tmp_path: Path) -> None:
    """The draft is not lost: it has nothing to propose there."""
    target, _ = texts.save_pair(tmp_path)
    draft = save_target(tmp_path / "letters", vocab_size=26)
    save_tokenizer(vocabularies.letters("abcdefghijklmnopqrstuvwxyz"), draft)
    options = {"target_tokenizer": str(target)}
    coordinator_options = CONFIG | {"num_outcomes": "0"}
    with local_stack(target, draft, draft_options=options, coordinator_options=coordinator_options) as stack:
        digits = SamplingParams(max_tokens=8, num_draft_tokens=4, seed=3, grammar=Grammar(regex="[0-9]{8}"))
        done = stack.client.generate("The quick", digits)
        assert done.text.isdigit()
        assert "allows no token that the draft has" in done.speculation.draft_unavailable
        usual = SamplingParams(max_tokens=12, num_draft_tokens=4, seed=1)
        assert stack.client.generate("The quick", usual).speculation.num_draft_tokens > 0


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"rule": Rule.GUMBEL, "repetition_penalty": 1.3}])
def test_padding_of_the_target_costs_no_draft(pair: tuple[Path, Path], params: dict[str, Any]) -> None:
    """Ids that the target has and its tokenizer lacks, in the prompt, the output and the biases."""
    target, draft = pair
    options = {"target_tokenizer": str(target)}
    given = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, **params)
    biased = replace(given, logit_bias={VOCAB_SIZE - 1: 2.0, 7: -100.0})
    with local_stack(target, draft, draft_options=options, coordinator_options=CONFIG) as stack:
        for each in (given, biased):
            prompt = [5, VOCAB_SIZE - 1, 9, VOCAB_SIZE - 2]
            plain = stack.client.generate(params=replace(each, draft="off"), prompt_token_ids=prompt)
            assert any(token_id >= 330 for token_id in plain.token_ids), "it was meant to write some"
            done = stack.client.generate(params=replace(each, num_draft_tokens=3), prompt_token_ids=prompt)
            assert done.token_ids == plain.token_ids
            assert done.speculation.draft_unavailable == ""
            assert done.speculation.num_draft_tokens > 24


def test_a_bias_of_a_token_that_the_draft_lacks_costs_no_draft(tmp_path: Path) -> None:
    """Of one tokenizer, and padded less."""
    target, draft = save_target(tmp_path / "target", vocab_size=110), save_target(tmp_path / "draft")
    for directory in (target, draft):
        save_tokenizer(vocabularies.letters("abcdefgh"), directory)
    bias = dict.fromkeys(range(97, 110), -100.0)
    params = SamplingParams(max_tokens=8, seed=3, num_draft_tokens=3, temperature=0, logit_bias=bias)
    with local_stack(target, draft) as stack:
        done = stack.client.generate(params=params, prompt_token_ids=[5])
        assert done.speculation.draft_unavailable == ""
        assert done.speculation.num_draft_tokens > 0


class TestRefusals:
    """By name, and with the flag that would help."""

    @staticmethod
    def start(target: Path, draft: Path, named: Path | None, config: dict[str, str] | None = None) -> None:
        """With a draft that is told the tokenizer of this target, or none."""
        options = {"target_tokenizer": str(named)} if named else {}
        with local_stack(target, draft, draft_options=options, coordinator_options=config):
            pass

    def test_without_the_key(self, pair: tuple[Path, Path]) -> None:
        target, draft = pair
        parts = "'target'", "'draft'", "different tokenizers", "use_heterogeneous_vocab"
        for named in (None, target):
            with refused(HandshakeError, *parts):
                self.start(target, draft, named)

    def test_a_draft_for_another_target(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        target, draft = pair
        other = save_target(tmp_path / "other", vocab_size=VOCAB_SIZE)
        save_tokenizer(vocabularies.byte_level(["entirely other words\n"]), other)
        parts = "'target'", "'draft'", "--target-tokenizer has to name the target's"
        for named in (None, other):
            with refused(HandshakeError, *parts):
                self.start(target, draft, named, CONFIG)

    def test_next_to_nothing_shared(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        draft = save_target(tmp_path / "letters", vocab_size=VOCAB_SIZE)
        save_tokenizer(vocabularies.letters("XYZ"), draft)
        parts = f"--target-tokenizer {pair[0]}", "letters", "% of those of a text", "10%"
        with refused(ModelLoadError, *parts):
            self.start(pair[0], draft, pair[0])

    def test_no_tokenizer(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        bare = save_target(tmp_path / "bare")
        for target, draft, name in ((bare, pair[1], "--target-tokenizer"), (pair[0], bare, "--model")):
            with refused(ModelLoadError, name, "bare", "has no tokenizer"):
                self.start(target, draft, target)

    def test_more_tokens_than_the_model_has(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        narrow = save_target(tmp_path / "narrow", vocab_size=300)
        save_tokenizer(vocabularies.byte_level(OTHER_TEXTS, 310), narrow)
        with refused(ModelLoadError, "narrow", "300 tokens", "in its tokenizer"):
            self.start(pair[0], narrow, pair[0])

    def test_several_devices(self) -> None:
        with refused(ConfigError, "--target-tokenizer", "one device"):
            DraftConfig(target_tokenizer="x", tensor_parallel_size=2)
