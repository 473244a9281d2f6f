"""A request's adapter through all services: its text is peft's own, whatever runs beside it or fails."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from specwire import Rule, SamplingParams
from specwire.config.link import Link
from specwire.config.preflight import memory, plan
from specwire.config.services import VerifyConfig
from specwire.errors import ConfigError, InvalidRequestError, ModelLoadError
from specwire.rpc.wire import client as client_wire
from specwire.v1 import generation_pb2_grpc
from tests.support import adapters
from tests.support.fronts import Fronted, front
from tests.support.harness import LocalStack, handshake, local_stack, started_services
from tests.support.integrity import check_integrity
from tests.support.own_drafts import save_drafting
from tests.support.pairs import save_good_draft, save_target
from tests.support.tiny_models import written_by_transformers
from tests.support.together import together

FAMILIES = ("llama", pytest.param("gpt2", marks=pytest.mark.slow))
PROMPT = [5, 9, 11, 2, 7]
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=11, rule=Rule.GUMBEL)


@dataclass(frozen=True)
class Served:
    """A target with four adapters, and what peft writes with each and with none."""

    family: str
    target: Path
    draft: Path
    directories: dict[str, Path]
    texts: dict[str, list[int]]

    @property
    def options(self) -> dict[str, Any]:
        return {"lora_modules": adapters.as_flag(self.directories)}


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    family, path = request.param, tmp_path_factory.mktemp(request.param)
    directories = adapters.save_several(path / "adapters", family)
    texts = {
        name: adapters.written_by_peft(family, directory, PROMPT, NUM_TOKENS)
        for name, directory in ({"": None} | directories).items()
    }
    assert len({*map(tuple, texts.values())}) == 5, "they were meant to differ"
    draft = save_good_draft(path / "draft", family)
    return Served(family, save_target(path / "target", family), draft, directories, texts)


@pytest.fixture(scope="module")
def stack(served: Served) -> Iterator[LocalStack]:
    with local_stack(
        served.target, served.draft, verify_options=served.options, verify_link=Link()
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: LocalStack) -> Iterator[openai.OpenAI]:
    with front(stack.address) as address, Fronted(stack, address).openai as found:
        yield found


def each_with(params: SamplingParams, names: Iterable[str]) -> list[tuple[SamplingParams, list[int]]]:
    return [(replace(params, adapter=name), PROMPT) for name in names]


@pytest.mark.parametrize(("num_draft_tokens", "max_depth"), [(0, None), (4, None), (6, 3)])
def test_four_and_none_at_a_time_write_what_peft_writes(
    served: Served, stack: LocalStack, num_draft_tokens: int, max_depth: int | None
) -> None:
    params = replace(GREEDY, num_draft_tokens=num_draft_tokens, max_depth=max_depth)
    done = together(stack.address, each_with(params, served.texts))
    assert [list(completion.token_ids) for completion in done] == [*served.texts.values()]
    if num_draft_tokens:
        by_name = dict(zip(served.texts, done, strict=True))
        assert by_name[""].speculation.num_accepted_tokens > 0
        assert all(each.speculation.num_draft_tokens > 0 for each in done), "the draft is the base's"
    stack.assert_idle_within(1.0)


def test_a_seeded_text_does_not_depend_on_the_company(served: Served, stack: LocalStack) -> None:
    alone = {}
    for name in served.texts:
        [done] = together(stack.address, each_with(replace(SAMPLED, num_draft_tokens=0), [name]))
        alone[name] = done.token_ids
    assert len({*alone.values()}) == 5
    for num_draft_tokens in (0, 4):
        params = replace(SAMPLED, num_draft_tokens=num_draft_tokens)
        done_together = together(stack.address, each_with(params, [*served.texts, *served.texts]))
        assert [done.token_ids for done in done_together] == [*alone.values(), *alone.values()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", [Rule.BLOCK, Rule.REJECTION])
def test_under_rules_that_judge_by_probabilities(stack: LocalStack, rule: Rule) -> None:
    """Written at a temperature near 0 it is the greedy text: the target's distribution is the adapter's."""
    params = replace(SAMPLED, rule=rule, temperature=1e-3, num_draft_tokens=4)
    greedy = together(stack.address, each_with(GREEDY, ["all", ""]))
    done = together(stack.address, each_with(params, ["all", ""]))
    assert [each.token_ids for each in done] == [each.token_ids for each in greedy]


def test_prefixes_are_shared_within_an_adapter_alone(served: Served, stack: LocalStack) -> None:
    prompt = [i % 29 + 3 for i in range(100)]
    found = []
    for name in ("", "all", "some", "all", "", "some"):
        params = replace(GREEDY, adapter=name, num_draft_tokens=0, cache_salt="of this test")
        done = stack.client.generate(params=params, prompt_token_ids=prompt)
        found.append((done.usage.cached_tokens, done.token_ids))
    assert [cached for cached, _ in found] == [0, 0, 0, 96, 96, 96]
    texts = [token_ids for _, token_ids in found]
    assert (texts[0], texts[1], texts[2]) == (texts[4], texts[3], texts[5])


def test_log_probabilities_of_a_prompt_are_those_of_the_adapter(served: Served, stack: LocalStack) -> None:
    params = replace(GREEDY, adapter="all", prompt_logprobs=0, max_tokens=1)
    done = stack.client.generate(params=params, prompt_token_ids=PROMPT)
    found = [token.logprob for token in done.prompt[1:]]
    logits = adapters.logits_of_peft(served.family, served.directories["all"], PROMPT)
    expected = logits.log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]]
    assert found == pytest.approx(expected.tolist(), abs=1e-3)


def test_a_lost_target_changes_no_text(served: Served, stack: LocalStack) -> None:
    """The sequence is opened again from its tokens, with its adapter."""
    assert stack.verify_proxy is not None
    params = replace(GREEDY, adapter="uneven", num_draft_tokens=2)
    with stack.client.stream(None, params, prompt_token_ids=PROMPT) as running:
        for number, _ in enumerate(running):
            if number in (2, 6):
                stack.verify_proxy.cut()
        assert list(running.completion.token_ids) == served.texts["uneven"]
        assert running.completion.timing.failover_ms > 0
    stack.assert_idle_within(5.0)


def test_sequences_that_lose_their_pages_to_each_other(served: Served) -> None:
    options = served.options | {"num_kv_tokens": 64, "page_size": 4}
    with (
        started_services() as services,
        local_stack(served.target, served.draft, verify_options=options) as running,
    ):
        for params in (GREEDY, replace(GREEDY, num_draft_tokens=0)):
            done = together(running.address, each_with(params, served.texts))
            assert [list(completion.token_ids) for completion in done] == [*served.texts.values()]
        assert running.status("verify").num_preemptions > 0
        check_integrity(services["verify"].runner.pool)


def test_a_request_is_resumed_with_its_adapter(served: Served, stack: LocalStack) -> None:
    """By a client that lost its coordinator; with another adapter the tokens are no beginning of its text."""
    params, text = replace(GREEDY, adapter="some"), served.texts["some"]
    request = client_wire.generate_request(None, params, prompt_token_ids=PROMPT)
    with grpc.insecure_channel(stack.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        first = next(iter(stub.Generate(iter([request]), timeout=60)))
        info = client_wire.resume_info_from_proto(first.resume_info)
        again = client_wire.resuming_request(request, info, text[:9])
        answers = [*stub.Generate(iter([again]), timeout=60)]
        assert [token.id for answer in answers for token in answer.chunk.tokens] == text[9:]
        again.sampling.adapter = "all"
        with pytest.raises(grpc.RpcError, match="another target, adapter, tokenizer or prompt"):
            list(stub.Generate(iter([again]), timeout=60))


def test_a_beam_search_with_an_adapter(served: Served, stack: LocalStack) -> None:
    model = adapters.adapted_by_peft(served.family, served.directories["all"])
    expected = written_by_transformers(model, PROMPT, 12, num_beams=3)
    params = SamplingParams(temperature=0, num_beams=3, max_tokens=12, ignore_eos=True, adapter="all")
    done = stack.client.generate(params=params, prompt_token_ids=PROMPT)
    assert list(done.token_ids) == expected


def test_an_unknown_adapter_is_refused_by_name(served: Served, stack: LocalStack) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"adapter=none of them: .*which has 'all', 'rooted', 'some', 'uneven'"
    ) as refused:
        stack.client.generate(params=replace(GREEDY, adapter="none of them"), prompt_token_ids=PROMPT)
    assert refused.value.field == "adapter"
    with (
        local_stack(served.target) as plain,
        pytest.raises(
            InvalidRequestError, match="adapter=all: is not an adapter of the target, which has none"
        ),
    ):
        plain.client.generate(params=replace(GREEDY, adapter="all"), prompt_token_ids=PROMPT)


def test_the_handshake_names_them(served: Served, stack: LocalStack) -> None:
    told = handshake("verify", stack.verify_address).model.adapters
    assert {*told} == {*served.directories}
    assert len({*told.values()}) == 4
    info, _ = stack.client.get_model_info()
    assert info.adapters == dict(told)


class TestOpenAI:
    """An adapter is a model of its own there, as in vLLM."""

    def test_they_are_listed_with_their_parent(self, served: Served, client: openai.OpenAI) -> None:
        base, *others = client.models.list().data
        assert [each.id for each in others] == sorted(served.directories)
        assert {each.model_extra["parent"] for each in others if each.model_extra} == {base.id}
        assert base.model_extra is not None
        assert base.model_extra["parent"] is None
        assert client.models.retrieve("some").id == "some"

    def test_the_model_of_a_request_chooses(self, served: Served, client: openai.OpenAI) -> None:
        base = client.models.list().data[0].id
        for name in ("", "some"):
            text = served.texts[name]
            done = client.completions.create(
                model=name or base,
                prompt=PROMPT,
                temperature=0,
                max_tokens=NUM_TOKENS,
                logprobs=0,
                extra_body={"ignore_eos": True},
            )
            assert done.model == (name or base)
            [choice] = done.choices
            assert choice.logprobs is not None
            assert choice.logprobs.tokens == [f"token_id:{token_id}" for token_id in text]

    def test_another_name_is_not_found(self, client: openai.OpenAI) -> None:
        with pytest.raises(
            openai.NotFoundError, match=r"The model 'nobody' does not exist; .*'some'.* are served"
        ):
            client.completions.create(model="nobody", prompt=PROMPT, max_tokens=1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("source", ["heads", "layers", "mtp", "dflash", "eagle3", "draft_model"])
def test_a_target_that_drafts_for_itself(tmp_path: Path, source: str) -> None:
    """Its drafts read states of whatever ran; a draft model beside it is the base's."""
    target, options = save_drafting(source, tmp_path)
    family = "glm4_moe" if source == "mtp" else "llama"
    directory = adapters.save_adapter(tmp_path / "mine", family, target_modules=["q_proj", "o_proj"])
    params = replace(SAMPLED, temperature=0.5)
    with local_stack(target, verify_options=options | {"lora_modules": f"mine={directory}"}) as running:
        plain = together(running.address, each_with(replace(params, draft="off"), ["", "mine"]))
        drafted = replace(params, draft=source, num_draft_tokens=3)
        done = together(running.address, each_with(drafted, ["", "mine"]))
        running.assert_idle_within(2.0)
    assert plain[0].token_ids != plain[1].token_ids
    assert [each.token_ids for each in done] == [each.token_ids for each in plain]
    assert all(each.speculation.num_draft_tokens > 0 for each in done)


def test_their_weights_count_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save_target(tmp_path / "target")
    adapter = adapters.save_adapter(tmp_path / "adapter")
    options: dict[str, Any] = {"model": str(target), "address": "127.0.0.1:0", "num_kv_tokens": 16}
    room = (target / "model.safetensors").stat().st_size + 16 * 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr(memory, "free_host_bytes", lambda: room)
    plan.check(VerifyConfig(**options))
    with pytest.raises(ConfigError, match=r"(weights take|KV cache takes)"):
        plan.check(VerifyConfig(**options, lora_modules=f"mine={adapter}"))
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(
        ConfigError, match=f"--lora-modules {adapter}: no adapter_config.json in this directory"
    ):
        plan.check(VerifyConfig(**options, lora_modules=f"mine={adapter}"))


def test_what_is_refused_at_the_start(served: Served, tmp_path: Path) -> None:
    """Without the tensors of an adapter, and for quantised weights."""
    directory = adapters.save_adapter(tmp_path / "mine", served.family)
    (directory / "adapter_model.safetensors").unlink()
    target = save_target(tmp_path / "target", served.family)
    path = target / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    path.write_text(json.dumps(config))
    for model, options, problem in (
        (served.target, {"lora_modules": f"mine={directory}"}, f"{directory}: no adapter_model.safetensors"),
        (target, served.options, "has quantised weights, which are not served with --lora-modules"),
    ):
        with pytest.raises(ModelLoadError, match=problem), local_stack(model, verify_options=options):
            pass
