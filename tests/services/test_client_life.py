"""Deadlines of clients, servers that are not there, and how either of them ends."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specwire import (
    AsyncClient,
    Client,
    Completion,
    DeadlineExceededError,
    GenerationLostError,
    InvalidRequestError,
    RequestCancelledError,
    RetryPolicy,
    SamplingParams,
    ServiceUnavailableError,
)
from specwire.client.streaming import Part
from specwire.rpc import channel
from tests.support.harness import LocalStack, local_stack

PROMPT = "The quick brown"
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True, seed=1)
UNREACHABLE = "127.0.0.1:1"


class TestDeadline:
    def test_there_is_one_by_default(self) -> None:
        assert inspect.signature(Client).parameters["timeout_s"].default == 120.0

    def test_passing_it_is_typed_and_frees_memory(self, stack: LocalStack) -> None:
        """That of the call, or the client's own default."""
        with Client(stack.address, timeout_s=0.3) as short:
            for client, options in ((stack.client, {"timeout_s": 0.3}), (short, {})):
                started = time.monotonic()
                with pytest.raises(DeadlineExceededError) as caught:
                    client.generate(PROMPT, ENDLESS, **options)
                assert isinstance(caught.value, TimeoutError)
                assert time.monotonic() - started < 2.0
        stack.assert_idle_within(1.0)

    def test_a_draft_stream_at_its_deadline_is_not_a_lost_draft(self, stack: LocalStack) -> None:
        for _ in range(3):
            with pytest.raises(DeadlineExceededError):
                stack.client.generate(PROMPT, ENDLESS, timeout_s=0.1)
            assert stack.client.get_status().draft_unavailable == ""

    @pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf")])
    def test_none_that_cannot_be(self, client: Client, timeout_s: float) -> None:
        with pytest.raises(InvalidRequestError, match=r"timeout_s=.*number over 0, at most"):
            client.generate(PROMPT, timeout_s=timeout_s)
        with pytest.raises(InvalidRequestError, match="timeout_s"):
            Client("127.0.0.1:7070", timeout_s=timeout_s)
        with pytest.raises(InvalidRequestError, match="timeout_s"):
            client.get_status(timeout_s=timeout_s)


class TestUnreachable:
    def test_refused_at_once_with_the_address(self) -> None:
        started = time.monotonic()
        with Client(UNREACHABLE) as client:
            with pytest.raises(
                ServiceUnavailableError, match=r"nothing serves at 127\.0\.0\.1:1 \(.*refused"
            ):
                client.generate(PROMPT)
            with pytest.raises(ServiceUnavailableError, match=r"nothing serves at 127\.0\.0\.1:1"):
                client.get_status()
        assert time.monotonic() - started < 5.0

    def test_a_port_that_accepts_and_never_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(channel, "_CONNECT_TIMEOUT_MS", 300)
        started = time.monotonic()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            with (
                Client(address) as client,
                pytest.raises(ServiceUnavailableError, match=f"nothing serves at {address}"),
            ):
                client.generate(PROMPT)
        assert time.monotonic() - started < 5.0

    def test_a_proxy_for_the_web_is_not_for_us(
        self, stack: LocalStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("http_proxy", f"http://{UNREACHABLE}")
        for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        with Client(stack.address) as client:
            assert client.get_status().num_running == 0

    @pytest.mark.parametrize(
        ("address", "hint"),
        [
            ("", ""),
            ("localhost", "; did you mean localhost:7070?"),
            (
                "http://llm:8080/v1",
                "; this is gRPC, without a scheme: llm:8080 if the coordinator listens there",
            ),
            (7070, ""),
            (("localhost", 7070), "; did you mean localhost:7070?"),
        ],
    )
    def test_an_address_that_is_none(self, address: Any, hint: str) -> None:
        first = address[0] if isinstance(address, tuple) else address
        with pytest.raises(InvalidRequestError, match=f"address={first}: is not HOST:PORT{re.escape(hint)}$"):
            Client(address)


class TestArguments:
    """What people pass by habit: a typed error says what to pass instead; nothing is sent."""

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls) -> Iterator[Client]:
        with Client("127.0.0.1:1") as client:
            yield client

    @pytest.mark.parametrize(
        ("prompt", "problem"),
        [
            (
                ["a", "b"],
                r"prompt=\['a', 'b'\]: is of type list, and not a text; generate_many takes several",
            ),
            ([1, 2], "give token ids as prompt_token_ids="),
            ([{"role": "user", "content": "a"}], "give messages as messages="),
            (123, "prompt=123: is of type int, and not a text$"),
            (b"a", "is of type bytes, and not a text$"),
        ],
    )
    def test_a_prompt_that_is_no_text(self, client: Client, prompt: Any, problem: str) -> None:
        with pytest.raises(InvalidRequestError, match=problem):
            client.generate(prompt)
        with pytest.raises(InvalidRequestError, match=problem), client.stream(prompt):
            pass

    @pytest.mark.parametrize("params", [{"max_tokens": 3}, 3, "greedy"])
    def test_parameters_of_another_type(self, client: Client, params: Any) -> None:
        with pytest.raises(InvalidRequestError, match=rf"^params=.*is of type {type(params).__name__}; give"):
            client.generate("a", params)

    def test_parameters_as_arguments(self, client: Client) -> None:
        problem = r"^max_tokens=3: belongs into SamplingParams: generate\(prompt, SamplingParams\(max_tokens"
        for call in (client.generate, client.generate_many):
            with pytest.raises(InvalidRequestError, match=problem):
                call("a", max_tokens=3)

    def test_messages_that_are_none(self, client: Client) -> None:
        for messages in ("hello", {"role": "user"}):
            with pytest.raises(InvalidRequestError, match=r"^messages=.*must be a list of"):
                client.generate(messages=messages)
        with pytest.raises(InvalidRequestError, match=r"^messages\[0\]=hello: must have role and content"):
            client.generate(messages=["hello"])

    def test_several_prompts_that_are_none(self, client: Client) -> None:
        with pytest.raises(InvalidRequestError, match=r"^prompts=a: is no list of prompts; generate takes"):
            client.generate_many("a")
        with pytest.raises(InvalidRequestError, match=r"^params=.*1 for 2 prompts; give one for all"):
            client.generate_many(["a", "b"], [SamplingParams()])
        with pytest.raises(InvalidRequestError, match=r"^max_concurrent=0: must be"):
            client.generate_many(["a"], max_concurrent=0)
        assert client.generate_many([]) == []


class TestLife:
    def test_a_closed_client_says_so(self, stack: LocalStack) -> None:
        client = Client(stack.address)
        client.close()
        client.close()
        for call in (client.generate, client.get_status):
            with pytest.raises(RequestCancelledError, match="closed"):
                call()

    def test_closing_ends_what_other_threads_wait_for(self, stack: LocalStack) -> None:
        client = Client(stack.address)
        running = threading.Event()

        def read() -> None:
            with client.stream(PROMPT, ENDLESS) as stream:
                for _ in stream:
                    running.set()

        with ThreadPoolExecutor() as pool:
            reading = pool.submit(read)
            assert running.wait(30)
            client.close()
            with pytest.raises(RequestCancelledError):
                reading.result(10)
        stack.assert_idle_within(1.0)

    def test_a_program_that_forgets_to_close_ends(self, stack: LocalStack) -> None:
        code = (
            "import sys\nfrom specwire import Client, SamplingParams\n"
            f"client = Client('{stack.address}')\n"
            "context = client.stream('The', SamplingParams(max_tokens=4000, ignore_eos=True))\n"
            "for _ in context.__enter__(): sys.exit(3)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
        stack.assert_idle_within(1.0)

    def test_no_thread_is_left(self, stack: LocalStack) -> None:
        before = threading.active_count()
        with Client(stack.address) as client:
            client.get_status()
        assert threading.active_count() == before

    async def test_it_ends_where_a_loop_runs(self, stack: LocalStack) -> None:
        """As in a notebook; its calls block that loop."""
        before = threading.active_count()
        with Client(stack.address) as client:
            client.get_status()
        assert threading.active_count() == before

    def test_threads_share_one_client(self, client: Client) -> None:
        def generate(seed: int) -> Completion:
            return client.generate(PROMPT, SamplingParams(max_tokens=20, seed=seed))

        alone = [generate(seed).token_ids for seed in range(4)]
        with ThreadPoolExecutor(4) as pool:
            together = [done.token_ids for done in pool.map(generate, range(4))]
        assert together == alone

    def test_a_killed_client_process_frees_memory(self, stack: LocalStack) -> None:
        code = (
            "import sys\nfrom specwire import Client, SamplingParams\n"
            "params = SamplingParams(max_tokens=4000, ignore_eos=True)\n"
            f"with Client('{stack.address}') as client, client.stream('The', params) as stream:\n"
            "    for chunk in stream: print('.', flush=True)\n"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            assert stack.status("verify").num_sequences == 1
            process.kill()
        stack.assert_idle_within(1.0)


def test_a_stop_without_grace_is_a_typed_error() -> None:
    running = threading.Event()

    def read(address: str) -> None:
        retry = RetryPolicy(patience_s=0.5)
        with (
            Client(address, retry=retry) as client,
            client.stream(params=ENDLESS, prompt_token_ids=[1]) as stream,
        ):
            for _ in stream:
                running.set()

    with ThreadPoolExecutor() as pool:
        with local_stack("emulated:step_ms=1") as stack:
            reading = pool.submit(read, stack.address)
            assert running.wait(30)
        with pytest.raises(GenerationLostError):
            reading.result(10)


class TestCollected:
    """A generator that nobody closes is closed by the garbage collector, on any thread at any time."""

    @staticmethod
    def abandon(client: Client) -> None:
        def tokens() -> Iterator[Any]:
            with client.stream(PROMPT, ENDLESS) as stream:
                yield from stream

        generator = tokens()
        next(generator)
        cycle: list[Any] = [generator]
        cycle.append(cycle)

    def test_on_the_clients_own_thread(self, stack: LocalStack) -> None:
        with Client(stack.address) as client:
            self.abandon(client)
            client._loop.call_soon_threadsafe(gc.collect)
            assert client.get_status(timeout_s=5)
            stack.assert_idle_within(2.0)

    def test_within_a_call(self, stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
        submit = asyncio.run_coroutine_threadsafe

        def collecting(*args: Any) -> Any:
            gc.collect()
            return submit(*args)

        with Client(stack.address) as client:
            self.abandon(client)
            monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", collecting)
            with ThreadPoolExecutor() as other:
                assert other.submit(client.get_status).result(10)
            stack.assert_idle_within(2.0)


class TestClosed:
    async def test_while_it_connects_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """gRPC does not end the wait for a connection of a call that is cancelled before it has begun."""
        connect = Part.connect

        async def cancelled(self: Part, timeout_s: float) -> None:
            self.cancel()
            await connect(self, timeout_s)

        monkeypatch.setattr(Part, "connect", cancelled)
        async with AsyncClient([UNREACHABLE, UNREACHABLE.replace(":1", ":2")]) as client, asyncio.timeout(5):
            with pytest.raises(RequestCancelledError):
                await client.generate(PROMPT)

    async def test_calls_of_a_closed_client_are_refused(self, stack: LocalStack) -> None:
        client = AsyncClient(stack.address)
        calls = [asyncio.create_task(call()) for call in (client.get_status, client.get_model_info)]
        await asyncio.sleep(0)
        await client.close()
        calls += [asyncio.create_task(client.get_status()), asyncio.create_task(client.generate(PROMPT))]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in found] == [RequestCancelledError] * 4

    def test_after_a_fork(self, stack: LocalStack) -> None:
        """Refused in the child, where it would wait for a thread that is not there."""
        with Client(stack.address) as client:
            child = os.fork()
            if not child:
                try:
                    client.get_status()
                except RequestCancelledError:
                    client.close()
                    os._exit(0)
                os._exit(1)
            ends_s = time.monotonic() + 5
            while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < ends_s:
                time.sleep(0.01)
            if ended == (0, 0):
                os.kill(child, 9)
            assert ended == (child, 0)
            assert client.get_status()
