"""Prompts as text on a coordinator: encoded off its event loop, after admission, unless cancelled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coordinator.prompts import fitted
from specwire import Client, SamplingParams
from specwire.core import ModelInfo
from specwire.errors import (
    ContextLengthError,
    InvalidRequestError,
    RequestCancelledError,
    ResourceExhaustedError,
)
from specwire.text.tokenizer import Tokenizer
from tests.support import texts
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, local_stack
from tests.support.processes import wait_until

FEW = SamplingParams(max_tokens=2)
LONG = "long " * 8_000
"""Over 16 KiB: its thread is that of the long ones."""


class Encoding:
    """Lets the test say when the tokenizer is done with a text.

    Attributes:
        begun: the texts that it was given, in order.
    """

    def __init__(self, encode: Callable[..., list[int]]) -> None:
        self._encode = encode
        self._may_end = threading.Event()
        self.begun: list[str] = []

    def __call__(self, tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        self.begun.append(text)
        if text.startswith("long"):
            assert self._may_end.wait(30)
            text = "hello"
        return self._encode(tokenizer, text, **options)

    def await_begin(self, num_texts: int) -> None:
        wait_until(lambda: len(self.begun) >= num_texts, 20)

    def end(self) -> None:
        self._may_end.set()


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoding]:
    found = Encoding(Tokenizer.encode)

    def encode(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        return found(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    yield found
    found.end()


threads = entered(lambda: ThreadPoolExecutor(4), scope="function")


def test_others_are_served_while_a_prompt_is_encoded(
    client: Client, encoding: Encoding, threads: ThreadPoolExecutor
) -> None:
    waiting = threads.submit(client.generate, LONG, FEW)
    encoding.await_begin(1)
    assert client.get_status(timeout_s=10).num_running == 1, "it has its place"
    assert client.generate("hello", FEW, timeout_s=10).usage.completion_tokens == 2, "nor do short ones wait"
    encoding.end()
    assert waiting.result(20).usage.completion_tokens == 2


def test_what_finds_no_place_is_not_encoded(
    pair: tuple[Path, Path], encoding: Encoding, threads: ThreadPoolExecutor
) -> None:
    with local_stack(pair[0], coordinator_options={"max_running": 1, "max_waiting": 0}) as stack:
        waiting = threads.submit(stack.client.generate, LONG, FEW)
        encoding.await_begin(1)
        with pytest.raises(ResourceExhaustedError):
            stack.client.generate(LONG, FEW, timeout_s=10)
        with pytest.raises(InvalidRequestError):
            stack.client.generate(prompt_token_ids=[10**6], timeout_s=10)
        encoding.end()
        waiting.result(20)
    assert len(encoding.begun) == 1


def test_what_is_cancelled_before_its_turn_is_not_encoded(
    stack: LocalStack, client: Client, encoding: Encoding, threads: ThreadPoolExecutor
) -> None:
    first = threads.submit(client.generate, LONG, FEW)
    encoding.await_begin(1)
    with client.stream(LONG + "!", FEW) as left:
        leaving = threads.submit(next, iter(left))
        running(client, 2)
        left.cancel()
        with pytest.raises(RequestCancelledError):
            leaving.result(20)
    running(client, 1)
    encoding.end()
    first.result(20)
    client.generate(LONG + "?", FEW)
    assert encoding.begun == [LONG, LONG + "?"]
    stack.assert_idle_within(10)


def running(client: Client, number: int) -> None:
    """Wait until so many have a place."""
    wait_until(lambda: client.get_status().num_running == number, 20)


@pytest.mark.serial
def test_the_tokenizer_lets_other_threads_run() -> None:
    """While it encodes 400 kB, and when it hands over the tokens, which transformers takes long for."""
    tokenizer = Tokenizer(texts.build_tokenizer())
    text = "".join(f"{i * 7919 % 10_007} is number {i}\n" for i in range(20_000))
    started_s = time.monotonic()
    expected = tokenizer.encode(text)
    took_s = time.monotonic() - started_s
    longest_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(tokenizer.encode, "!" + text)
        last_s = time.monotonic()
        while not encoding.done():
            time.sleep(0.001)
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
    assert len(encoding.result()) >= len(expected)
    assert longest_s < max(0.25 * took_s, 0.05)


def test_text_is_encoded_as_transformers_does(tokenizer: Tokenizer) -> None:
    for text in (
        "",
        "hello there",
        "  def f(x):\n\treturn x",
        "<s>hello</s>",
        "\u4f60\u597d \U0001f44b",
        "\x00",
    ):
        for special in (True, False):
            theirs = tokenizer._backend.encode(text, add_special_tokens=special)
            assert tokenizer.encode(text, add_special_tokens=special) == theirs


class TestMaxTokens:
    ALL = SamplingParams(max_tokens=None, ignore_eos=True)

    def test_without_a_number_the_context_is_filled(self, client: Client, tokenizer: Tokenizer) -> None:
        text = "hello"
        while len(tokenizer.encode(text)) < texts.CONTEXT_LEN - 120:
            text += " x" * 50
        usage = client.generate(text, self.ALL).usage
        assert usage.prompt_tokens + usage.completion_tokens == texts.CONTEXT_LEN

    @pytest.mark.parametrize(
        ("prompt_len", "most", "found"), [(7, None, 1), (3, 9, 5), (3, 2, 2)], ids=["last", "room", "token"]
    )
    def test_the_number(self, prompt_len: int, most: int | None, found: int) -> None:
        """Whichever is less: room in the context, or what the token allows."""
        target = ModelInfo(name="m", vocab_size=8, context_len=8)
        assert fitted(SamplingParams(max_tokens=None), prompt_len, target, most).max_tokens == found

    @pytest.mark.parametrize(("given", "prompt_len"), [(None, 8), (None, 9), (6, 3), (1, 8)])
    def test_no_room(self, given: int | None, prompt_len: int) -> None:
        target = ModelInfo(name="m", vocab_size=8, context_len=8)
        with pytest.raises(
            ContextLengthError, match=f"with a prompt of {prompt_len} tokens is over the context"
        ):
            fitted(SamplingParams(max_tokens=given), prompt_len, target)
