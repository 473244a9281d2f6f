"""Beam search through real services: texts, scores and order of transformers' `generate(num_beams=...)`."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from operator import sub
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch

import coordinator.service
from coordinator.beams import checks
from specwire import Client, Completion, SamplingParams, UnsupportedError
from specwire.config.link import Link
from specwire.config.services import CoordinatorConfig
from specwire.rpc.wire.client import generate_request, resume_info_from_proto, resuming_request
from specwire.v1 import generation_pb2_grpc
from tests.support import encoder_decoders, tiny_models
from tests.support.harness import LocalStack, StackProxy, local_stack, on_own_loop
from tests.support.languages import save_speaker
from tests.support.pairs import markov_model, save_good_draft, save_hostile_draft, save_target
from tests.support.parameters import VALUES

FAMILIES = ("llama", "t5", pytest.param("gpt2", marks=pytest.mark.slow))
PROMPTS = [[5, 9, 11, 2, 7, 4], [9, 9, 5], [*range(3, 40)]]
MAX_TOKENS = 16
BEAMS = SamplingParams(
    temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, num_beams=4, num_return_sequences=4
)
PENALTIES = (0.0, 1.0, 2.0)
STOPPING: tuple[bool | str, ...] = (False, True, "never")
SETTINGS = list(itertools.product(PENALTIES, STOPPING))
SOME = SETTINGS[::4]
"""Each penalty and each way to stop once."""
SHAPES: list[dict[str, Any]] = [
    {"draft": "off"},
    {"num_draft_tokens": 3},
    {"num_draft_tokens": 8, "max_depth": 3},
    {},
]


def build(family: str) -> Any:
    return (encoder_decoders if family in encoder_decoders.FAMILIES else tiny_models).build(family)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any) -> str:
    return request.param


ONE = pytest.mark.parametrize("family", FAMILIES[:1], indirect=True, scope="module")
"""What does not depend on the family."""


@pytest.fixture(scope="module")
def pair(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp(family)
    if family in encoder_decoders.FAMILIES:
        target = encoder_decoders.save(directory / "target", family)
        return target, encoder_decoders.save(directory / "draft", family, noise=0.02)
    return save_target(directory / "target", family), save_good_draft(directory / "draft", family)


Texts = list[tuple[list[int], float]]
"""With their scores, best first."""


def expected(family: str, prompt: Sequence[int], params: SamplingParams) -> Texts:
    """By transformers' own `generate`."""
    names = ("num_beams", "num_return_sequences", "length_penalty", "early_stopping")
    settings = tuple((name, getattr(params, name)) for name in names)
    return _generated(family, tuple(prompt), params.max_tokens or 0, params.stop_token_ids, settings)


@functools.cache
@torch.inference_mode()
def _generated(
    family: str, prompt: tuple[int, ...], most: int, ends: tuple[int, ...], settings: tuple[tuple[str, Any]]
) -> Texts:
    model = build(family)
    model.generation_config.eos_token_id = list(ends) or None
    has_encoder = family in encoder_decoders.FAMILIES
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=most,
        do_sample=False,
        use_cache=not has_encoder,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        **dict(settings),
    )
    start = 1 if has_encoder else len(prompt)
    texts = [cut(sequence[start:].tolist(), ends, most) for sequence in output.sequences]
    return list(zip(texts, output.sequences_scores.tolist(), strict=True))


def cut(token_ids: list[int], ends: Sequence[int], most: int) -> list[int]:
    """Without what fills the row up: nothing of it comes before the first end token."""
    found = next((i for i, token_id in enumerate(token_ids) if token_id in ends), None)
    assert found is not None or len(token_ids) == most
    return token_ids if found is None else token_ids[: found + 1]


def ends_of(family: str, num: int) -> tuple[int, ...]:
    """Tokens that end some of the texts early: some that beams without an end have at their fourth to ninth
    place."""
    texts = [text for text, _ in expected(family, PROMPTS[0], BEAMS)]
    inner = [text[place] for place in (8, 5, 3) for text in texts]
    return tuple(dict.fromkeys(inner))[:num]


def check(done: Completion, wanted: Texts) -> None:
    assert [list(each.token_ids) for each in done.hypotheses] == [text for text, _ in wanted]
    assert [each.score for each in done.hypotheses] == pytest.approx([score for _, score in wanted], rel=1e-4)
    best = done.hypotheses[0]
    assert (done.token_ids, done.finish_reason) == (best.token_ids, best.finish_reason)


@pytest.mark.parametrize(
    ("num_ends", "settings"),
    [
        pytest.param(2, SOME, id="some"),
        pytest.param(1, SETTINGS, id="all, one end token", marks=pytest.mark.slow),
        pytest.param(2, SETTINGS, id="all, two end tokens", marks=pytest.mark.slow),
    ],
)
def test_texts_scores_and_order_are_those_of_generate(
    stack: LocalStack, family: str, num_ends: int, settings: Sequence[tuple[float, Any]]
) -> None:
    """For each length penalty and way to stop; draft shapes and prompts in turns."""
    base = replace(BEAMS, stop_token_ids=ends_of(family, num_ends))
    shapes, prompts = itertools.cycle(SHAPES), itertools.cycle(PROMPTS)
    lengths = set()
    for length_penalty, early_stopping in settings:
        params = replace(base, length_penalty=length_penalty, early_stopping=early_stopping)
        prompt = next(prompts)
        wanted = expected(family, prompt, params)
        lengths |= {len(text) for text, _ in wanted}
        done = stack.client.generate(params=replace(params, **next(shapes)), prompt_token_ids=prompt)
        check(done, wanted)
        assert done.usage.prompt_tokens == len(prompt)
    assert len(lengths) > 2, "texts end at several places"
    stack.assert_idle_within(2.0)


def test_drafts_save_passes(stack: LocalStack, family: str) -> None:
    """Steps that a draft covers take no pass of their own; without one, a pass is a step."""
    prompt, counts = PROMPTS[0], {}
    shapes: dict[str, dict[str, Any]] = {
        "off": {"draft": "off"},
        "tree": {"num_draft_tokens": 12, "max_depth": 4},
    }
    for name, shape in shapes.items():
        done = stack.client.generate(params=replace(BEAMS, **shape), prompt_token_ids=prompt)
        counts[name] = done.speculation
    assert (counts["off"].num_rounds, counts["off"].num_draft_tokens) == (MAX_TOKENS, 0)
    assert counts["tree"].num_accepted_tokens == MAX_TOKENS - counts["tree"].num_rounds > 2
    assert [each.source for each in counts["tree"].by_source] == ["num_beams"]


@pytest.mark.parametrize("num_beams", [pytest.param(2, marks=pytest.mark.slow), 12])
def test_other_widths(stack: LocalStack, family: str, num_beams: int) -> None:
    """Live beams of 12 do not fit into one tree once they part: they are verified in several."""
    params = replace(BEAMS, num_beams=num_beams, num_return_sequences=2, max_tokens=10)
    done = stack.client.generate(params=params, prompt_token_ids=PROMPTS[2])
    check(done, expected(family, PROMPTS[2], params))


@ONE
def test_at_the_end_of_the_context(stack: LocalStack, family: str) -> None:
    """Where the tokens of all beams no longer fit into one tree they are verified in several."""
    prompt = [token_id % 90 + 3 for token_id in range(tiny_models.CONTEXT_LEN - MAX_TOKENS)]
    for shape in SHAPES:
        done = stack.client.generate(params=replace(BEAMS, **shape), prompt_token_ids=prompt)
        check(done, expected(family, prompt, BEAMS))


def test_a_hostile_draft_and_a_target_of_chains(tmp_path: Path) -> None:
    """A draft that is always wrong saves nothing and changes nothing; a target without trees runs each beam
    alone."""
    target, draft = save_target(tmp_path / "target"), save_hostile_draft(tmp_path / "draft")
    params = replace(BEAMS, num_draft_tokens=3)
    wanted = expected("llama", PROMPTS[0], BEAMS)
    with local_stack(target, draft) as stack:
        done = stack.client.generate(params=params, prompt_token_ids=PROMPTS[0])
        check(done, wanted)
        assert done.speculation.num_rounds >= MAX_TOKENS - 1
    with local_stack(target, draft, verify_options={"batch_invariant": True}) as stack:
        check(stack.client.generate(params=params, prompt_token_ids=PROMPTS[0]), wanted)


@ONE
def test_a_search_that_was_cut_off_begins_again(stack: LocalStack, family: str) -> None:
    """A stream is one chunk with the best text, then the completion; another coordinator sends what is left
    of the text, and the same completion."""
    [text, *_] = [text for text, _ in expected(family, PROMPTS[0], BEAMS)]
    request = generate_request(None, BEAMS, PROMPTS[0])
    with grpc.insecure_channel(stack.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        first, last = stub.Generate(iter([request]), timeout=60)
        again = resuming_request(request, resume_info_from_proto(first.resume_info), text[:5])
        chunk, completion = stub.Generate(iter([again]), timeout=60)
    assert [token.id for token in first.chunk.tokens] == text
    assert [token.id for token in chunk.chunk.tokens] == text[5:]
    assert completion.completion.hypotheses == last.completion.hypotheses


@pytest.mark.sample(1)
@ONE
@pytest.mark.parametrize("fault", ["lost", "hung"])
def test_a_search_goes_on_at_another_replica(pair: tuple[Path, Path], fault: str) -> None:
    """Its verify service is lost, or does not answer any more, in mid-search: the result is generate's."""
    target, draft = pair
    paced: dict[str, Any] = {"verify_link": Link(), "verify_options": {"least_pass_ms": 10.0}}
    params = replace(BEAMS, num_draft_tokens=6, max_depth=3, max_tokens=32)
    with contextlib.ExitStack() as stack:
        several = [stack.enter_context(local_stack(target, each, **paced)) for each in (draft, None)]
        proxies = [cast(StackProxy, each.verify_proxy) for each in several]
        config = CoordinatorConfig(
            verify_address=",".join(each.address for each in proxies),
            draft_address=several[0].draft_address,
            draft_timeout_ms=60_000.0,
            grace_s=0.0,
        )
        address = stack.enter_context(on_own_loop(lambda: coordinator.service.serving(config)))
        client = stack.enter_context(Client(address))
        before = [each.status("verify").num_steps for each in several]
        searching = stack.enter_context(ThreadPoolExecutor(1)).submit(
            client.generate, params=params, prompt_token_ids=PROMPTS[0]
        )

        def num_passes() -> list[int]:
            now = [each.status("verify").num_steps for each in several]
            return list(map(sub, now, before))

        while max(at_fault := num_passes()) < 5:
            assert not searching.done()
        victim = int(at_fault[1] > at_fault[0])
        proxies[victim].stall()
        if fault == "lost":
            proxies[victim].cut()
        done = searching.result(timeout=60)
        assert num_passes()[1 - victim] > at_fault[1 - victim], "the other one has finished it"
        assert done.timing.failover_ms > 0
        proxies[victim].resume()
    check(done, expected("llama", PROMPTS[0], params))


REFUSED: dict[str, dict[str, Any]] = {
    **{name: {name: value} for name, value in VALUES.items() if name not in checks._ALLOWED},
    "temperature": {"temperature": 1.0},
    "seed": {"seed": 3},
    "draft": {"draft": "ngram"},
    "num_beams": {"num_beams": 16, "stop_token_ids": (3, 4, 5, 6, 7)},
}
"""Every parameter that is not allowed, and values of others."""


@ONE
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_combine_is_refused_by_name(stack: LocalStack, name: str) -> None:
    """Before anything is run."""
    with pytest.raises(UnsupportedError) as refusal:
        stack.client.generate(params=replace(BEAMS, **REFUSED[name]), prompt_token_ids=PROMPTS[0])
    assert refusal.value.field == name


HELD: dict[str, dict[str, Any]] = {
    "max_tokens": {"ignore_eos": True, "max_tokens": 5},
    "stop_token_ids": {"ignore_eos": True, "stop_token_ids": (1, 2, 4, 5)},
    "ignore_eos": {"ignore_eos": True},
    "skip_special_tokens": {"ignore_eos": True, "skip_special_tokens": False},
    "length_penalty": {"length_penalty": 8.0},
    "early_stopping": {"early_stopping": True},
    "num_beams": {"num_beams": 6},
    "num_return_sequences": {"num_return_sequences": 1},
    "num_draft_tokens": {"num_draft_tokens": 1},
    "max_depth": {"num_draft_tokens": 4, "max_depth": 1},
    "draft": {"num_draft_tokens": None, "draft": "off"},
    "cache_salt": {"cache_salt": "mine"},
}
"""A change of each parameter that shows in the completion, beside others that let it show."""


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Likely to say its end token, which is a special one with a name, often."""
    model = markov_model()
    with torch.no_grad():
        model.lm_head.weight[0].copy_(model.lm_head.weight[3] * 1.2)
        model.lm_head.weight[3].mul_(0.9)
    target = save_speaker(model, tmp_path_factory.mktemp("speaker"))
    with local_stack(target, target) as running:
        yield running


def test_every_parameter_is_refused_or_known_to_be_held() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert names == {*REFUSED, *HELD, "adapter"}, "test_lora has a search with an adapter"


@pytest.mark.parametrize("name", HELD)
def test_what_is_held_shows(speaker: LocalStack, name: str) -> None:
    """In texts, scores, rounds or cached tokens: what was ignored would change none of them."""
    base: dict[str, Any] = {"num_draft_tokens": 4, "max_depth": 2} | {
        k: v for k, v in HELD[name].items() if k != name
    }
    seen = []
    for changes in (base, base | HELD[name]):
        params = replace(BEAMS, **{"max_tokens": 12, "ignore_eos": False} | changes)
        prompt = [3] * 40
        speaker.client.generate(params=replace(params, cache_salt=""), prompt_token_ids=prompt)
        done = speaker.client.generate(params=params, prompt_token_ids=prompt)
        counts = done.speculation
        seen.append(
            (done.hypotheses, counts.num_rounds, counts.num_draft_tokens, done.usage.cached_tokens > 0)
        )
        if name == "skip_special_tokens":
            best = done.hypotheses[0]
            assert 0 in best.token_ids
            written = 0 if params.skip_special_tokens else best.token_ids.count(0)
            assert best.text.count("<end>") == written
    assert seen[0] != seen[1]
