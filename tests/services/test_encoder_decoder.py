"""Encoder-decoders behind real services: transformers' own text, and refusals of what does not combine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from specwire import (
    ContextLengthError,
    HandshakeError,
    ModelLoadError,
    Rule,
    SamplingParams,
    UnsupportedError,
)
from specwire.cli import drafts
from specwire.config.client import ClientConfig
from specwire.rpc.wire.client import chunk_from_proto, generate_request
from specwire.v1 import generation_pb2_grpc
from tests.support import encoder_decoders, vocabularies
from tests.support.encoder_decoders import LENGTH, START
from tests.support.harness import LocalStack, local_stack
from tests.support.pairs import save_target
from tests.support.refusals import refused
from tests.support.together import of_prompts
from tests.support.vocabularies import OTHER_TEXTS, save_tokenizer

PROMPTS = [[5, 9, 11, 2, 7, 4], [9, 9, 5], [5, 9, 11, 2, 7, 6], [*range(3, 40)]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
GUMBEL = SamplingParams(max_tokens=24, seed=7, rule=Rule.GUMBEL, temperature=0.5, ignore_eos=True)
SHAPES: list[dict[str, Any]] = [
    {},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 6, "max_depth": 0},
    {"num_draft_tokens": 16, "max_depth": 4},
    {"draft": "ngram"},
]
SERVED = ("t5", "bart")
VOCAB_SIZE = 430


@pytest.fixture(scope="module", params=SERVED)
def family(request: Any) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp(family)
    draft = encoder_decoders.save(directory / "draft", family, noise=0.03)
    return encoder_decoders.save(directory / "target", family), draft


@torch.inference_mode()
def generated(family: str, prompt: list[int], num_tokens: int) -> list[int]:
    """By transformers' own `generate`, without an end token.

    Its cache has as many layers as the encoder, too few here.
    """
    model: Any = encoder_decoders.build(family)
    model.generation_config.eos_token_id = None
    settings = {"do_sample": False, "num_beams": 1, "use_cache": False}
    output = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, **settings)
    return output[0, 1:].tolist()


@pytest.mark.sample(1)
def test_greedy_text_is_that_of_generate(stack: LocalStack, family: str) -> None:
    """Of several inputs at once, with chains, trees and drafts from the text; the input is no output."""
    expected = [generated(family, prompt, 24) for prompt in PROMPTS]
    for shape in SHAPES:
        done = of_prompts(stack.address, replace(GREEDY, **shape), PROMPTS)
        assert [list(each.token_ids) for each in done] == expected
        assert [each.usage.prompt_tokens for each in done] == [len(prompt) for prompt in PROMPTS]
        if "draft" not in shape:
            assert sum(each.speculation.num_accepted_tokens for each in done) > 15
    stack.assert_idle_within(2.0)


@pytest.mark.sample(1)
def test_a_seeded_text_is_that_of_plain_decoding(stack: LocalStack) -> None:
    """With Gumbel coupling, and parameters that depend on the tokens before."""
    for params in (GUMBEL, replace(GUMBEL, presence_penalty=1.0, repetition_penalty=1.2, logprobs=2)):
        plain = of_prompts(stack.address, replace(params, draft="off"), PROMPTS)
        assert len({each.token_ids for each in plain}) == len(PROMPTS), "the input matters"
        for shape in SHAPES[-2:]:
            done = of_prompts(stack.address, replace(params, **shape), PROMPTS)
            assert [each.token_ids for each in done] == [each.token_ids for each in plain]


@pytest.mark.sample(1)
def test_the_end_token_ends_the_output(stack: LocalStack, family: str) -> None:
    """The decoder's first token is no end, even where it is the end token."""
    expected = generated(family, PROMPTS[0], 24)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=(expected[9],))
    done = stack.client.generate(params=params, prompt_token_ids=PROMPTS[0])
    assert list(done.token_ids) == expected[: expected.index(expected[9]) + 1]
    assert done.finish_reason == "stop"


@pytest.mark.sample(1)
def test_a_resumed_generation_says_the_same(stack: LocalStack, family: str) -> None:
    """The output so far is the decoder's, after the same input."""
    expected = generated(family, PROMPTS[0], 24)
    request = generate_request(None, GREEDY, PROMPTS[0])
    request.generated_token_ids.extend(expected[:9])
    with grpc.insecure_channel(stack.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        chunks = [each.chunk for each in stub.Generate(iter([request]), timeout=60) if each.HasField("chunk")]
    found = [token_id for chunk in chunks for token_id in chunk_from_proto(chunk).token_ids]
    assert found == expected[9:]


@pytest.mark.sample(1)
def test_a_small_cache_preempts_and_the_text_stays(pair: tuple[Path, Path], family: str) -> None:
    """The input is encoded again when its sequence runs again; nothing is held at the end."""
    prompts = [[*range(3, 40)], [*range(4, 40)], [*range(5, 44)]]
    expected = [generated(family, prompt, 24) for prompt in prompts]
    small = {"num_kv_tokens": 128}
    with local_stack(*pair, verify_options=small, draft_options=small) as stack:
        done = of_prompts(stack.address, replace(GREEDY, num_draft_tokens=3), prompts)
        assert [list(each.token_ids) for each in done] == expected
        assert stack.status("verify").num_preemptions > 0
        stack.assert_idle_within(2.0)


@pytest.mark.sample(1)
def test_the_handshake_and_the_command_drafts(stack: LocalStack, family: str) -> None:
    target, draft = stack.client.get_model_info()
    assert draft is not None
    for info in (target, draft):
        assert info.decoder_token_ids == (START,)
        assert info.encoder_len == info.context_len == (2048 if "t5" in family else LENGTH)
    shown = drafts.show(ClientConfig(server=stack.address), colour=False).splitlines()
    [model] = [line for line in shown if line.startswith("model ")]
    assert "encoder-decoder" in model
    assert model.split()[1] == "yes"


def test_limits_of_both_halves(stack: LocalStack, family: str) -> None:
    most = stack.client.get_model_info()[0].encoder_len
    with refused(ContextLengthError, "prompt", f"{most + 1} tokens", f"the encoder reads {most}"):
        stack.client.generate(params=GREEDY, prompt_token_ids=[5] * (most + 1))
    with refused(ContextLengthError, "max_tokens", f"over the context of {most}"):
        stack.client.generate(params=replace(GREEDY, max_tokens=most), prompt_token_ids=[5])
    if family == "bart":
        whole = replace(GREEDY, max_tokens=most - 1, num_draft_tokens=5)
        done = stack.client.generate(params=whole, prompt_token_ids=[5] * most)
        assert list(done.token_ids) == generated(family, [5] * most, most - 1)


# --- refusals -----------------------------------------------------------------------------------------


def test_pairs_that_do_not_fit(tmp_path: Path) -> None:
    """Of two kinds, and of decoders that begin differently."""
    t5, decoder = encoder_decoders.save(tmp_path / "t5", "t5"), save_target(tmp_path / "decoder")
    other = encoder_decoders.save(tmp_path / "other", "t5", decoder_start_token_id=3)
    kinds = "'t5' is an encoder-decoder, and the other is not"
    for target, draft, parts in (
        (t5, decoder, ("t5", "decoder", kinds)),
        (decoder, t5, ("decoder", "t5", kinds)),
        (t5, other, ("decoders that begin with different tokens", "(0,)", "(3,)")),
    ):
        with refused(HandshakeError, *parts), local_stack(target, draft):
            pass


def test_conversations_and_other_vocabularies(tmp_path: Path) -> None:
    target, draft = (
        encoder_decoders.save(tmp_path / name, "t5", vocab_size=VOCAB_SIZE) for name in ("target", "draft")
    )
    save_tokenizer(vocabularies.byte_level(), target)
    save_tokenizer(vocabularies.pieces(OTHER_TEXTS), draft)
    with local_stack(target) as stack:
        with refused(UnsupportedError, "messages", "target", "encoder-decoder"):
            stack.client.generate(messages=[{"role": "user", "content": "Hello"}])
        done = stack.client.generate("Hello", params=replace(GREEDY, max_tokens=5))
        assert done.usage.prompt_tokens > 0
    with (
        refused(ModelLoadError, "draft", "encoder-decoder", "--target-tokenizer"),
        local_stack(target, draft, draft_options={"target_tokenizer": str(target)}),
    ):
        pass
