"""A lost coordinator: another one goes on where the client is, or the client says how far it came."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.resuming import context_digest
from specwire import (
    Client,
    Completion,
    GenerationLostError,
    HandshakeError,
    InvalidRequestError,
    ResourceExhaustedError,
    RetryPolicy,
    Rule,
    SamplingParams,
    ServiceUnavailableError,
)
from specwire.core import ModelInfo
from specwire.rpc import channel, statuses
from specwire.rpc.wire import client as client_wire
from specwire.v1 import generation_pb2
from tests.support import texts
from tests.support.harness import LocalStack, StackProxy, local_stack, proxied
from tests.support.raw_streams import Wire

PROMPT = "The quick brown"
UNREACHABLE = "127.0.0.1:1"
SEEDED = SamplingParams(max_tokens=120, ignore_eos=True, seed=7, rule=Rule.GUMBEL, num_draft_tokens=3)


@pytest.fixture(scope="module")
def stack(pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    """A message for each round: of a target that goes on by itself, one may bring several."""
    with local_stack(*pair, coordinator_options={"verify_ahead": False}) as running:
        yield running


@pytest.fixture
def proxy(stack: LocalStack) -> Iterator[StackProxy]:
    """A second way to the coordinator, which a test may cut."""
    with proxied(stack.address) as way:
        yield way


def generate_cut(address: str, params: SamplingParams, *cuts: int) -> Completion:
    async def run() -> Completion:
        async with Wire(address) as wires:
            return await wires.generate(client_wire.generate_request(PROMPT, params), *cuts)

    return asyncio.run(run())


def messages_of(address: str, request: generation_pb2.GenerateRequest) -> list[Any]:
    async def run() -> list[Any]:
        async with Wire(address) as wires:
            return await wires.read(request)

    return asyncio.run(run())


class TestSeam:
    """Where one stream ends and the next begins, nothing shows."""

    @pytest.mark.parametrize("rule", [Rule.GUMBEL, "greedy"])
    def test_same_tokens_texts_and_log_probabilities_wherever_it_lies(
        self, stack: LocalStack, rule: str
    ) -> None:
        sampling: dict[str, Any] = {"temperature": 0.0} if rule == "greedy" else {"rule": rule}
        params = SamplingParams(
            max_tokens=40,
            ignore_eos=True,
            seed=3,
            num_draft_tokens=3,
            logprobs=1,
            presence_penalty=0.5,
            repetition_penalty=1.1,
            **sampling,
        )
        whole = stack.client.generate(PROMPT, params)
        for cuts in [(1,), (3, 1, 2)]:
            done = generate_cut(stack.address, params, *cuts)
            assert [(t.token_id, t.text) for t in done.tokens] == [(t.token_id, t.text) for t in whole.tokens]
            ours, theirs = ([t.logprob for t in each.tokens] for each in (done, whole))
            assert ours == pytest.approx(theirs, abs=1e-4)
            assert done.finish_reason is whole.finish_reason
            assert done.usage.prompt_tokens == whole.usage.prompt_tokens
            assert done.usage.completion_tokens == 40

    def test_stop_strings_and_characters_may_straddle_it(self, stack: LocalStack) -> None:
        """Stop strings of three tokens, with a seam between any two of them and within characters."""
        free = stack.client.generate(PROMPT, SEEDED)
        for i in range(4, 40, 8):
            stop = "".join(token.text for token in free.tokens[i : i + 3])
            if not stop or "\N{REPLACEMENT CHARACTER}" in stop or stop in free.text[: free.text.index(stop)]:
                continue
            params = SamplingParams(max_tokens=120, ignore_eos=True, seed=7, rule=Rule.GUMBEL, stop=(stop,))
            params = dataclasses.replace(params, num_draft_tokens=0)
            whole = stack.client.generate(PROMPT, params)
            assert whole.stop_reason == stop
            num_tokens = len(whole.token_ids)
            for cut in range(max(1, num_tokens - 4), num_tokens):
                done = generate_cut(stack.address, params, cut)
                assert (done.text, done.token_ids) == (whole.text, whole.token_ids)
                assert done.stop_reason == stop

    def test_every_round_names_all_that_it_emitted(self, stack: LocalStack) -> None:
        """Held back or not: the distribution of what follows the resume point rests on it."""
        params = SamplingParams(
            max_tokens=60, seed=5, ignore_eos=True, num_draft_tokens=2, stop=("the lazy dog",)
        )
        *chunks, end = messages_of(stack.address, client_wire.generate_request(PROMPT, params))
        assert any(message.chunk.held for message in chunks)
        num_named = 0
        for message in chunks:
            chunk = message.chunk
            num_named = max(num_named, chunk.first_index + len(chunk.tokens)) + len(chunk.held)
        assert num_named == end.completion.usage.completion_tokens == 60
        assert len(chunks) == end.completion.speculation.num_rounds

    def test_the_first_message_says_what_it_takes(self, stack: LocalStack) -> None:
        messages = messages_of(
            stack.address, client_wire.generate_request(PROMPT, SamplingParams(max_tokens=20))
        )
        info = client_wire.resume_info_from_proto(messages[0].resume_info)
        end = client_wire.completion_from_proto(messages[-1].completion, ())
        assert (info.seed, info.rule) == (end.seed, end.rule)
        assert info.context_digest
        assert not any(message.HasField("resume_info") for message in messages[1:])

    def test_a_generation_whose_completion_alone_was_lost(self, stack: LocalStack) -> None:
        for params in (SEEDED, SamplingParams(seed=7, rule=Rule.GUMBEL, stop=("e",), ignore_eos=True)):
            whole = stack.client.generate(PROMPT, params)
            request = client_wire.generate_request(PROMPT, params)
            request.generated_token_ids.extend(whole.token_ids)
            (message,) = messages_of(stack.address, request)
            again = client_wire.completion_from_proto(message.completion, whole.tokens)
            assert again.stop_reason == whole.stop_reason
            assert again.usage.completion_tokens == len(whole.token_ids)
            assert again.speculation.num_rounds == 0


class TestRefused:
    """Requests that go on with what cannot have been."""

    @staticmethod
    def refusal(stack: LocalStack, token_ids: list[int], digest: str = "", **params: Any) -> Exception:
        request = client_wire.generate_request(PROMPT, SamplingParams(**{"max_tokens": 4} | params))
        request.generated_token_ids.extend(token_ids)
        request.context_digest = digest
        with pytest.raises(grpc.RpcError) as caught:
            messages_of(stack.address, request)
        return statuses.from_rpc_error(caught.value)

    @pytest.mark.parametrize("token_id", [-1, texts.VOCAB_SIZE])
    def test_ids_outside_the_vocabulary(self, stack: LocalStack, token_id: int) -> None:
        error = self.refusal(stack, [5, token_id])
        assert isinstance(error, InvalidRequestError)
        assert (error.field, error.value) == ("generated_token_ids[1]", str(token_id))

    def test_more_than_were_asked_for(self, stack: LocalStack) -> None:
        error = self.refusal(stack, [5] * 5, ignore_eos=True)
        assert isinstance(error, InvalidRequestError)
        assert error.field == "generated_token_ids[4]"

    @pytest.mark.parametrize("params", [{"stop_token_ids": [9]}, {"stop": "\t"}])
    def test_tokens_after_the_end(self, stack: LocalStack, params: dict[str, Any]) -> None:
        tab = texts.build_tokenizer().encode("\t")
        end = [9] if "stop_token_ids" in params else tab
        error = self.refusal(stack, [*end, 5], **params)
        assert isinstance(error, InvalidRequestError)
        assert error.field == f"generated_token_ids[{len(end)}]"

    def test_another_context(self, stack: LocalStack) -> None:
        assert isinstance(self.refusal(stack, [5], digest="0123456789abcdef"), HandshakeError)

    def test_the_digest_is_of_model_tokenizer_and_prompt(self) -> None:
        base: dict[str, Any] = {
            "name": "a",
            "vocab_size": 10,
            "context_len": 99,
            "tokenizer_fingerprint": "f",
        }
        digests = {context_digest([1, 2], ModelInfo(**base | {"incarnation": i})) for i in "xy"}
        assert len(digests) == 1
        others = {
            "name": "b",
            "vocab_size": 11,
            "tokenizer_fingerprint": "g",
            "weights_fingerprint": "w",
            "dtype": "bfloat16",
            "batch_invariant": True,
        }
        for name, value in others.items():
            digests.add(context_digest([1, 2], ModelInfo(**base | {name: value})))
        digests.add(context_digest([1, 3], ModelInfo(**base)))
        digests.add(context_digest([1, 2], ModelInfo(**base | {"batch_invariant": True, "num_ranks": 2})))
        assert len(digests) == 3 + len(others)

    def test_only_the_first_request_may_say_it(self) -> None:
        request = generation_pb2.GenerateRequest(generated_token_ids=[1])
        with pytest.raises(InvalidRequestError, match="generated_token_ids"):
            client_wire.acknowledged_tokens(request)


def read_on(stream: Any, done: list[Any]) -> Completion:
    """To the end; every index once."""
    for chunk in stream:
        assert chunk.first_index == len(done)
        done += chunk.tokens
    assert tuple(done) == stream.completion.tokens
    return stream.completion


class TestClient:
    """The SDK, with a way to the coordinator that is cut."""

    @pytest.mark.parametrize("addresses", [2, 1])
    def test_a_reset_in_mid_stream_is_not_seen(
        self, stack: LocalStack, proxy: StackProxy, addresses: int
    ) -> None:
        """With another address, or the same one again. The generation is longer than the window, so that the
        second coordinator waits for acknowledgements, too."""
        whole = stack.client.generate(PROMPT, SEEDED)
        with (
            Client([proxy.address, stack.address][:addresses]) as client,
            client.stream(PROMPT, SEEDED) as stream,
        ):
            done = list(next(iter(stream)).tokens)
            proxy.cut()
            completion = read_on(stream, done)
            assert stream.num_resumes == completion.num_resumes == 1
        assert (completion.text, completion.token_ids) == (whole.text, whole.token_ids)
        assert completion.usage.completion_tokens == 120
        assert (completion.seed, completion.rule) == (whole.seed, whole.rule)

    def test_silence_is_noticed(
        self, stack: LocalStack, proxy: StackProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(channel, "TOWARDS_CLIENTS", channel.BETWEEN_SERVICES)  # 20 s otherwise
        whole = stack.client.generate(PROMPT, SEEDED)
        with Client(f"{proxy.address},{stack.address}") as client, client.stream(PROMPT, SEEDED) as stream:
            done = list(next(iter(stream)).tokens)
            proxy.stall()
            started = time.monotonic()
            completion = read_on(stream, done)
            assert time.monotonic() - started < 10.0
            assert completion.num_resumes == 1
        assert completion.token_ids == whole.token_ids

    def test_what_the_server_chose_stays_chosen(
        self, stack: LocalStack, proxy: StackProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params = SamplingParams(max_tokens=120, ignore_eos=True, temperature=0.0)
        with Client([proxy.address, stack.address]) as client, client.stream(PROMPT, params) as stream:
            done = list(next(iter(stream)).tokens)
            seen: list[Any] = []
            progress = stream._stream._progress
            open_ = progress.request

            def noted() -> Any:
                seen.append(open_())
                return seen[-1]

            monkeypatch.setattr(progress, "request", noted)
            proxy.cut()
            completion = read_on(stream, done)
        assert (seen[0].sampling.seed, completion.num_resumes) == (completion.seed, 1)

    @pytest.mark.parametrize("retry", [RetryPolicy(resume=False), RetryPolicy(max_resumes=0)])
    def test_without_leave_to_resume_it_says_how_far_it_came(
        self, stack: LocalStack, proxy: StackProxy, retry: RetryPolicy
    ) -> None:
        whole = stack.client.generate(PROMPT, SEEDED)
        with (
            Client([proxy.address, stack.address], retry=retry) as client,
            client.stream(PROMPT, SEEDED) as stream,
        ):
            next(iter(stream))
            proxy.cut()
            with pytest.raises(GenerationLostError, match="lost after") as caught:
                list(stream)
            error = caught.value
            assert error.tokens == tuple(stream.tokens)
            assert 0 < error.num_tokens == len(error.tokens) < 120
            assert whole.text.startswith(error.text)
        assert isinstance(error, ServiceUnavailableError)

    def test_a_loss_after_progress_does_not_count(self, stack: LocalStack, proxy: StackProxy) -> None:
        retry = RetryPolicy(max_resumes=1)
        params = SamplingParams(max_tokens=400, ignore_eos=True, seed=7)
        with Client(proxy.address, retry=retry) as client, client.stream(PROMPT, params) as stream:
            next(iter(stream))
            for num in (1, 2, 3):
                proxy.cut()
                while stream.num_resumes < num:  # what was on its way comes first
                    next(iter(stream))

    def test_cancelled_while_it_searches(self, stack: LocalStack, proxy: StackProxy) -> None:
        retry = RetryPolicy(patience_s=60.0, pause_s=30.0)
        with ThreadPoolExecutor(1) as pool:
            with Client(proxy.address, retry=retry) as client, client.stream(PROMPT, SEEDED) as stream:
                next(iter(stream))
                proxy.cut()
                reading = pool.submit(list, stream)
                stream.cancel()
            with pytest.raises(Exception, match=r"cancelled|closed"):
                reading.result(20)

    def test_an_address_without_a_server_is_passed_over(self, stack: LocalStack) -> None:
        params = SamplingParams(max_tokens=8, seed=1)
        with Client([UNREACHABLE, stack.address]) as client:
            assert client.get_status().num_running == 0
            assert client.generate(PROMPT, params).num_resumes == 0
        with Client([UNREACHABLE, stack.address]) as client:
            assert client.get_model_info()[0].name == "target"

    def test_no_server_at_any_address_is_an_error_at_once(self) -> None:
        started = time.monotonic()
        with Client([UNREACHABLE, "127.0.0.1:2"]) as client:
            for call in (lambda: client.generate(PROMPT), client.get_status):
                with pytest.raises(ServiceUnavailableError, match=r"127\.0\.0\.1:1 .*; .*127\.0\.0\.1:2 "):
                    call()
        assert time.monotonic() - started < 8.0


def test_a_full_server_is_asked_again_only_when_wanted() -> None:
    limits = {"max_running": 1, "max_waiting": 0}
    params = SamplingParams(max_tokens=8, seed=1)
    with (
        local_stack("emulated:step_ms=1", coordinator_options=limits) as stack,
        ThreadPoolExecutor(1) as pool,
        Client(stack.address, retry=RetryPolicy(wait_when_full=True)) as patient,
        stack.client.stream(params=SamplingParams(max_tokens=4000), prompt_token_ids=[1]) as running,
    ):
        next(iter(running))
        with pytest.raises(ResourceExhaustedError):
            stack.client.generate(params=params, prompt_token_ids=[1])
        waiting = pool.submit(patient.generate, params=params, prompt_token_ids=[1])
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        running.cancel()
        assert waiting.result(30).usage.completion_tokens == 8
