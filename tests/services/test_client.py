"""The client SDK over real gRPC: methods, streams and reflection."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specwire import (
    AsyncClient,
    Client,
    ContextLengthError,
    Fate,
    InvalidRequestError,
    RequestCancelledError,
    Rule,
    SamplingParams,
    SpecwireError,
    UnsupportedError,
)
from specwire.text.tokenizer import Tokenizer
from specwire.v1 import generation_pb2
from tests.support import texts
from tests.support.harness import LocalStack, local_stack

PROMPT = "The quick brown"
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True, seed=1)


class TestShape:
    def test_clients_cover_every_method_of_the_service(self) -> None:
        service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
        calls = {"".join("_" + c.lower() if c.isupper() else c for c in m.name)[1:] for m in service.methods}
        for kind in (Client, AsyncClient):
            public = {name for name in vars(kind) if not name.startswith("_")}
            assert public == calls | {"stream", "generate_many", "close"}

    def test_sync_and_async_methods_take_the_same_arguments(self) -> None:
        for name in ("get_model_info", "get_tokenizer", "get_status", "close", "__init__"):
            ours, theirs = (inspect.signature(getattr(k, name)) for k in (Client, AsyncClient))
            assert list(ours.parameters) == list(theirs.parameters), name
        for name in ("stream", "generate"):
            parameters = list(inspect.signature(getattr(Client, name)).parameters)
            assert parameters == ["self", "prompt", "params", "options"]
        parameters = list(inspect.signature(Client.generate_many).parameters)
        assert parameters == ["self", "prompts", "params", "options"]


class TestGenerate:
    def test_all_prompt_forms_give_the_same(self, client: Client, tokenizer: Tokenizer) -> None:
        params = SamplingParams(max_tokens=24, seed=3)
        by_text = client.generate(PROMPT, params)
        by_ids = client.generate(prompt_token_ids=tokenizer.encode(PROMPT), params=params)
        assert by_text.token_ids == by_ids.token_ids
        assert by_text.text == by_ids.text == tokenizer.decode(by_text.token_ids)
        assert by_text.usage.prompt_tokens == len(tokenizer.encode(PROMPT))

    def test_messages_go_through_the_chat_template(self, client: Client, tokenizer: Tokenizer) -> None:
        params = SamplingParams(max_tokens=24, seed=3)
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        rendered = tokenizer.apply_chat_template(messages)
        chat = client.generate(messages=messages, params=params)
        assert chat.token_ids == client.generate(prompt_token_ids=rendered, params=params).token_ids
        assert chat.usage.prompt_tokens == len(rendered)
        with pytest.raises(InvalidRequestError, match=r"messages=.*unknown role robot"):
            client.generate(messages=[{"role": "robot", "content": "hello"}])
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]"):
            client.generate(messages=[{"role": "user"}])

    def test_a_chosen_seed_repeats_the_text(self, client: Client) -> None:
        drawn = client.generate(PROMPT, SamplingParams(max_tokens=24))
        again = client.generate(PROMPT, SamplingParams(max_tokens=24, seed=drawn.seed, rule=drawn.rule))
        assert again.token_ids == drawn.token_ids
        other = client.generate(PROMPT, SamplingParams(max_tokens=24))
        assert other.seed != drawn.seed

    def test_defaults_work(self, client: Client) -> None:
        done = client.generate(PROMPT)
        assert 1 <= done.usage.completion_tokens == len(done.token_ids) <= 256
        assert done.model == "target"
        assert done.timing.total_ms > 0

    def test_speculation_adds_up(self, client: Client) -> None:
        done = client.generate(PROMPT, SamplingParams(max_tokens=60, seed=1, ignore_eos=True))
        spec = done.speculation
        assert sum(k * n for k, n in enumerate(spec.acceptance_histogram)) == spec.num_accepted_tokens > 0
        assert sum(spec.drafted_per_position) == spec.num_draft_tokens
        assert sum(spec.accepted_per_position) == spec.num_accepted_tokens
        assert done.usage.completion_tokens == 60 == spec.num_accepted_tokens + spec.num_rounds
        assert spec.draft_unavailable == spec.why_plain == ""
        assert spec.num_tokens == 60
        assert spec.mean_acceptance_length > 1

    @pytest.mark.parametrize(
        ("changes", "why_plain"),
        [
            ({"num_draft_tokens": 0}, "the request asks for num_draft_tokens=0"),
            ({"draft": "off"}, "the request asks for draft=off"),
            ({"num_draft_tokens": 0, "num_beams": 2}, "the request asks for num_draft_tokens=0"),
        ],
    )
    def test_plain_decoding_says_why(self, client: Client, changes: dict[str, Any], why_plain: str) -> None:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, **changes)
        done = client.generate(PROMPT, params)
        assert done.speculation.why_plain == why_plain
        assert done.to_dict()["speculation"]["why_plain"] == why_plain
        is_search = params.num_beams > 1
        assert {token.fate for token in done.tokens} == {Fate.BONUS if is_search else Fate.PLAIN}

    def test_describes_models_and_status(self, client: Client) -> None:
        target, draft = client.get_model_info()
        assert draft is not None
        assert (target.name, draft.name) == ("target", "draft")
        assert (target.vocab_size, draft.vocab_size) == (texts.VOCAB_SIZE, texts.DRAFT_VOCAB_SIZE)
        assert target.tokenizer_fingerprint == draft.tokenizer_fingerprint != ""
        with client.stream(PROMPT, ENDLESS) as stream:
            next(iter(stream))
            assert client.get_status().num_running == 1
            with pytest.raises(SpecwireError, match="not complete"):
                _ = stream.completion


class TestMany:
    PROMPTS = ("The quick brown", [5, 6, 7], "jumps over")

    def test_completions_are_in_order_and_those_of_single_calls(self, client: Client) -> None:
        each = [SamplingParams(temperature=0.0, max_tokens=n) for n in (24, 3, 12)]
        got = client.generate_many(self.PROMPTS, each)
        single = [
            client.generate(prompt if isinstance(prompt, str) else None, params, prompt_token_ids=ids)
            for prompt, params in zip(self.PROMPTS, each, strict=True)
            for ids in [None if isinstance(prompt, str) else prompt]
        ]
        assert [done.token_ids for done in got] == [done.token_ids for done in single]
        assert [len(done.token_ids) for done in got] == [24, 3, 12]

    def test_they_run_at_the_same_time_and_no_more_than_allowed(self, stack: LocalStack) -> None:
        async def most(num: int, max_concurrent: int) -> int:
            async with AsyncClient(stack.address) as client:
                while (await client.get_status()).num_running:  # some that were cancelled may not have ended
                    pass
                params = SamplingParams(max_tokens=400, ignore_eos=True)
                many = client.generate_many(["a"] * num, params, max_concurrent=max_concurrent)
                task, seen = asyncio.create_task(many), 0
                while not task.done() and seen < min(num, max_concurrent):
                    seen = max(seen, (await client.get_status()).num_running)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                return seen

        assert asyncio.run(most(3, 256)) == 3
        assert asyncio.run(most(3, 2)) == 2
        stack.assert_idle_within(5.0)

    def test_the_first_failure_is_raised_and_cancels_the_others(self, stack: LocalStack) -> None:
        endless = SamplingParams(max_tokens=400, ignore_eos=True)
        too_long = SamplingParams(max_tokens=10**6)
        with pytest.raises(ContextLengthError, match="max_tokens"):
            stack.client.generate_many(["a", "b"], [endless, too_long])
        stack.assert_idle_within(5.0)


class TestStream:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("rule", list(Rule))
    @pytest.mark.parametrize("stop", [(), ("e", "zz"), ("\ufffd\ufffd",)])
    def test_every_index_once_in_order_then_one_completion(
        self, client: Client, rule: Rule, stop: tuple[str, ...]
    ) -> None:
        params = SamplingParams(max_tokens=50, rule=rule, seed=5, stop=stop, ignore_eos=True)
        with client.stream(PROMPT, params) as stream:
            token_ids: list[int] = []
            text = ""
            for chunk in stream:
                assert chunk.first_index == len(token_ids)
                assert chunk.text == "".join(token.text for token in chunk.tokens)
                token_ids += chunk.token_ids
                text += chunk.text
            done = stream.completion
            assert list(stream) == [], "an ended stream stays at its end"
        assert tuple(token_ids) == done.token_ids
        assert text == done.text
        assert tuple(stream.tokens) == done.tokens
        assert client.generate(PROMPT, params).token_ids == done.token_ids

    def test_cancel_from_another_thread_is_told_to_the_reader(self, stack: LocalStack) -> None:
        with stack.client.stream(PROMPT, ENDLESS) as stream:
            next(iter(stream))
            threading.Thread(target=stream.cancel).start()
            with pytest.raises(RequestCancelledError):
                list(stream)
        stack.assert_idle_within(1.0)

    def test_a_forgotten_iterator_leaves_no_warnings_and_no_memory(self, stack: LocalStack) -> None:
        gc.collect()  # what other tests left behind
        problems: list[object] = []
        previous, sys.unraisablehook = sys.unraisablehook, problems.append
        try:
            with Client(stack.address) as client, client.stream(PROMPT, ENDLESS) as stream:
                for _ in stream:
                    assert stack.status("verify").num_held_pages > 0
                    break
            del stream
            gc.collect()
        finally:
            sys.unraisablehook = previous
        assert problems == []
        stack.assert_idle_within(1.0)

    async def test_cancelling_the_task_cancels_the_generation(self, stack: LocalStack) -> None:
        async with AsyncClient(stack.address) as client:
            started = asyncio.Event()

            async def read() -> None:
                async with client.stream(PROMPT, ENDLESS) as stream:
                    async for _ in stream:
                        started.set()

            task = asyncio.create_task(read())
            await asyncio.wait_for(started.wait(), 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(stack.assert_idle_within, 1.0)


def test_a_target_alone_says_why_nothing_was_drafted() -> None:
    """Without a tokenizer there is no text either; `test_http_errors` has the refusals."""
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    with local_stack("emulated:step_ms=0") as bare:
        done = bare.client.generate(prompt_token_ids=[3, 4, 5], params=params)
        assert len(done.token_ids) == 9 == done.speculation.num_rounds
        assert done.text == ""
        assert done.speculation.num_draft_tokens == 0
        assert "no draft service" in done.speculation.draft_unavailable
        expected = "the draft is unavailable: no draft service is configured"
        assert done.speculation.why_plain == bare.client.get_status().why_plain == expected
        assert bare.client.get_model_info()[1] is None
        with pytest.raises(UnsupportedError, match="no tokenizer; give prompt_token_ids"):
            bare.client.generate(PROMPT)


def test_reflection_lists_the_service(stack: LocalStack) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    addresses = {"Generation": stack.address, "Draft": stack.draft_address, "Verify": stack.verify_address}
    for name, address in addresses.items():
        with grpc.insecure_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            answer = next(stub.ServerReflectionInfo(iter([request]), timeout=5))
        listed = {service.name for service in answer.list_services_response.service}
        assert listed >= {f"specwire.v1.{name}Service", "grpc.health.v1.Health"}
