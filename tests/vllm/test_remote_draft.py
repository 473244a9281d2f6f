"""vLLM with drafts from a service of ours, each in processes of its own (`make test-vllm`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from benchmarks.prompts import PROMPTS
from benchmarks.vllm import MODEL, PYTHON, vllm
from specwire import embedded
from specwire.cli.process import Service
from specwire.config.link import Link
from specwire.text import tokenizer
from specwire.vllm import RemoteDraft
from tests.support.faulty_proxy import FaultyProxy
from tests.support.harness import LOOPBACK, LoopThread, StackProxy, handshake
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE, chi_square_p_value
from tests.support.tiny_models import build, save

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif("VLLM" not in os.environ, reason="needs vLLM: make test-vllm"),
]
NUM_PROMPTS, NUM_TOKENS = 100, 48
EXACT = ("--dtype", "float32", "--enforce-eager")
IDLE_S = 30.0
SPECULATION = {"method": "custom_class", "model": f"specwire.vllm.{RemoteDraft.__name__}"}
Texts = list[list[int]]


def prompts(directory: Path) -> Texts:
    """Of the benchmarks' texts, from different places on."""
    loaded = tokenizer.load(str(directory))
    assert loaded is not None
    encoded = [loaded.encode(text) for text in PROMPTS]
    starts = itertools.product(range(NUM_PROMPTS), encoded)
    return [ids[start % 8 :][:40] for start, ids in itertools.islice(starts, NUM_PROMPTS)]


@contextlib.contextmanager
def draft_service(directory: Path, *flags: str) -> Iterator[Service]:
    service = Service(
        "draft_service",
        [
            "--model",
            str(directory),
            "--dtype",
            "float32",
            "--address",
            LOOPBACK,
            "--num-threads",
            "1",
            *flags,
        ],
    )
    service.ready(240)
    try:
        yield service
    finally:
        service.process.kill()
        service.process.wait()


@contextlib.contextmanager
def drafted(
    target: Path, address: str, tmp: Path, *flags: str, most: int = 4, plugin: str = "", **options: Any
) -> Iterator[str]:
    """vLLM with our drafts; yields its URL.

    Args:
        most: draft tokens of a row.
        plugin: see `vllm`.
        options: of ours.
    """
    given = json.dumps({"specwire": {"draft_address": address, "num_draft_tokens": most} | options})
    speculation = SPECULATION | {"num_speculative_tokens": most}
    flags = (*EXACT, "--additional-config", given, *flags)
    with vllm(target, *flags, speculation=speculation, log=tmp / "drafted.log", plugin=plugin) as url:
        yield url


async def text(client: httpx2.AsyncClient, prompt: Sequence[int], **fields: Any) -> list[int]:
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = await client.post("/v1/completions", json=body | {"return_token_ids": True} | fields)
    response.raise_for_status()
    return response.json()["choices"][0]["token_ids"]


def texts(url: str, asked: Texts, at_a_time: int, **fields: Any) -> Texts:
    """Of all prompts, so many at a time."""

    async def run() -> Texts:
        free = asyncio.Semaphore(at_a_time)
        async with httpx2.AsyncClient(base_url=url, timeout=300) as client:

            async def one(prompt: Sequence[int]) -> list[int]:
                async with free:
                    return await text(client, prompt, **fields)

            return await asyncio.gather(*map(one, asked))

    return asyncio.run(run())


def assert_idle(address: str) -> None:
    """No sequence is left at the draft, though vLLM never says that one has ended."""
    due_s = time.monotonic() + IDLE_S
    while (status := handshake("draft", address).status).num_sequences or status.num_held_pages:
        assert time.monotonic() < due_s, status


def counted(url: str, name: str) -> float:
    """By vLLM's own metrics so far."""
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}_total{{"))


def accepted(url: str) -> float:
    """Draft tokens that vLLM has accepted."""
    return counted(url, "spec_decode_num_accepted_tokens")


class TestTexts:
    """Greedy, in float32: token by token what vLLM writes alone."""

    @pytest.fixture(
        scope="class", params=[embedded.TARGET_DIR, embedded.DRAFT_DIR], ids=["pair", "twice the draft"]
    )
    @classmethod
    def target(cls, request: pytest.FixtureRequest) -> Path:
        return Path(request.param)

    def test_they_are_vllms_own(self, target: Path, tmp_path: Path) -> None:
        asked = prompts(target)
        with vllm(target, *EXACT, log=tmp_path / "plain.log") as url:
            wanted = texts(url, asked, 16)
            assert texts(url, asked, 1) == wanted
        with draft_service(embedded.DRAFT_DIR) as draft, drafted(target, draft.address, tmp_path) as url:
            assert texts(url, asked, 1) == wanted
            assert texts(url, asked, 16) == wanted
            assert accepted(url) > NUM_PROMPTS * NUM_TOKENS / 4
            assert_idle(draft.address)

    def test_where_vllm_puts_requests_off(self, target: Path, tmp_path: Path) -> None:
        """A KV cache for a few of them, so that they are preempted and computed again."""
        asked = prompts(target)[:32]
        few = ("--num-gpu-blocks-override", "16", "--block-size", "32", "--max-model-len", "256")
        with vllm(target, *EXACT, log=tmp_path / "plain.log") as url:
            wanted = texts(url, asked, 16)
        with (
            draft_service(embedded.DRAFT_DIR) as draft,
            drafted(target, draft.address, tmp_path, *few) as url,
        ):
            assert texts(url, asked, 16) == wanted
            assert counted(url, "num_preemptions") > 0
            assert_idle(draft.address)

    def test_over_two_ranks(self, target: Path, tmp_path: Path) -> None:
        """The first asks, and the second is told."""
        asked, ranks = prompts(target)[:32], ("--tensor-parallel-size", "2")
        with vllm(target, *EXACT, *ranks, log=tmp_path / "plain.log") as url:
            wanted = texts(url, asked, 16)
        with (
            draft_service(embedded.DRAFT_DIR) as draft,
            drafted(target, draft.address, tmp_path, *ranks) as url,
        ):
            assert texts(url, asked, 16) == wanted
            assert accepted(url) > len(asked) * NUM_TOKENS / 4


REPAIR = """
def expand(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    found = input_val.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)))
    found[found == replace_from] = replace_to
    output.copy_(found)

def install():
    from vllm.utils import cpu_triton_utils
    cpu_triton_utils._expand_kernel_impl.__code__ = expand.__code__
"""
"""vLLM 0.32 on a CPU writes the temperatures of draft tokens to a copy and drops it, so that judged tokens
have another distribution, with its own drafts too. This writes them, as a plug-in of vLLM's."""


def test_the_distribution_is_the_targets(tmp_path: Path) -> None:
    """Two tokens at T = 1 over a vocabulary of 16, from a draft that may be wrong; control: another T."""
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 16,
    }
    models = [build("llama", **sizes) for _ in range(2)]
    with torch.no_grad():
        models[1].lm_head.weight.mul_(torch.rand(16, 1, generator=torch.Generator().manual_seed(1)) + 0.5)
    target, draft = (
        save(model, tmp_path / name) for model, name in zip(models, ("target", "draft"), strict=True)
    )
    prompt, num = [3, 4, 5], 6000
    with torch.inference_mode():
        first = models[0](torch.tensor([prompt])).logits[0, -1]
        after = models[0](torch.tensor([[*prompt, token] for token in range(16)])).logits[:, -1]
    flags = ("--skip-tokenizer-init", "--max-model-len", "256")
    with (
        draft_service(draft) as service,
        drafted(target, service.address, tmp_path, *flags, most=2, plugin=REPAIR) as url,
    ):
        fields = {"max_tokens": 3, "temperature": 1, "n": 50}
        drawn = np.zeros((16, 16))
        body = {"model": MODEL, "prompt": prompt, "ignore_eos": True, "return_token_ids": True} | fields
        for seed in range(num // 50):  # each of the 50 has the next one
            response = httpx2.post(f"{url}/v1/completions", json=body | {"seed": 1000 * seed}, timeout=120)
            for choice in response.raise_for_status().json()["choices"]:
                drawn[tuple(choice["token_ids"][:2])] += 1
        assert accepted(url) > num / 20
    for temperature, holds in ((1.0, True), (0.8, False)):
        expected = torch.softmax(first / temperature, -1)[:, None] * torch.softmax(after / temperature, -1)
        p_value = chi_square_p_value(drawn, expected.double().numpy())
        assert p_value > FALSE_ALARM_RATE if holds else p_value < CLEARLY_WRONG


class TestFaults:
    """16 requests at a time meanwhile: none is lost, none has another text."""

    @pytest.fixture(scope="module")
    def wanted(self, tmp_path_factory: pytest.TempPathFactory) -> Texts:
        log = tmp_path_factory.mktemp("plain") / "log"
        with vllm(embedded.TARGET_DIR, *EXACT, log=log) as url:
            return texts(url, prompts(embedded.TARGET_DIR), 16)

    def test_a_thousand_requests(self, wanted: Texts, tmp_path: Path) -> None:
        """Of prompts that come again, so that most of each is in vLLM's prefix cache."""
        asked = prompts(embedded.TARGET_DIR) * 10
        with (
            draft_service(embedded.DRAFT_DIR) as draft,
            drafted(embedded.TARGET_DIR, draft.address, tmp_path, "--block-size", "32") as url,
        ):
            assert texts(url, asked, 16) == wanted * 10
            assert counted(url, "prefix_cache_hits") > 0
            assert_idle(draft.address)

    @pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_draft_that_dies_or_hangs(self, wanted: Texts, tmp_path: Path, fault: signal.Signals) -> None:
        asked = prompts(embedded.TARGET_DIR)
        with contextlib.ExitStack() as stack:
            first, second = (stack.enter_context(draft_service(embedded.DRAFT_DIR)) for _ in range(2))
            both = f"{first.address},{second.address}"
            url = stack.enter_context(drafted(embedded.TARGET_DIR, both, tmp_path, draft_timeout_ms=200))
            assert texts(url, asked[:16], 16) == wanted[:16]
            first.process.send_signal(fault)
            began_s = time.monotonic()
            assert texts(url, asked[:1], 1) == wanted[:1]
            assert time.monotonic() - began_s < 10
            assert texts(url, asked, 16) == wanted
            second.process.send_signal(fault)
            assert texts(url, asked, 16) == wanted

    @pytest.mark.parametrize(
        "link", [Link(rtt_ms=20), Link(bandwidth_mbps=2)], ids=["20 ms away", "behind 2 Mbit/s"]
    )
    def test_a_draft_far_away(self, wanted: Texts, tmp_path: Path, link: Link) -> None:
        asked, thread = prompts(embedded.TARGET_DIR), LoopThread()
        with draft_service(embedded.DRAFT_DIR) as draft:
            proxy = FaultyProxy(draft.address, link)
            with thread.entered(lambda: proxy) as address:
                between = StackProxy(proxy, thread, address)
                with drafted(embedded.TARGET_DIR, address, tmp_path) as url:
                    assert texts(url, asked, 16) == wanted
                    assert accepted(url) > 0
                    between.cut()
                    assert texts(url, asked[:32], 16) == wanted[:32]
            assert_idle(draft.address)
        thread.close()

    def test_requests_that_are_given_up(self, wanted: Texts, tmp_path: Path) -> None:
        asked = prompts(embedded.TARGET_DIR)
        with (
            draft_service(embedded.DRAFT_DIR) as draft,
            drafted(embedded.TARGET_DIR, draft.address, tmp_path) as url,
        ):

            async def begin(client: httpx2.AsyncClient, prompt: Sequence[int]) -> None:
                body = {"model": MODEL, "prompt": list(prompt), "max_tokens": 900, "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    await anext(response.aiter_lines())

            async def give_up() -> None:
                async with httpx2.AsyncClient(base_url=url, timeout=300) as client:
                    await asyncio.gather(*(begin(client, prompt) for prompt in asked[:16]))

            asyncio.run(give_up())
            assert texts(url, asked, 16) == wanted
            assert_idle(draft.address)


def test_nothing_at_the_address_is_refused_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="did not start"),
        drafted(embedded.DRAFT_DIR, "127.0.0.1:1", tmp_path),
    ):
        pass
    assert "127.0.0.1:1: nothing serves at this address" in (tmp_path / "drafted.log").read_text()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    from tests.support import vocabularies

    other = save(build("llama", vocab_size=430), tmp_path / "other")
    vocabularies.save_tokenizer(vocabularies.byte_level(), other)
    with (
        draft_service(other) as draft,
        pytest.raises(RuntimeError, match="did not start"),
        drafted(embedded.DRAFT_DIR, draft.address, tmp_path),
    ):
        pass
    assert "have different tokenizers" in (tmp_path / "drafted.log").read_text()


def test_vllm_is_there() -> None:
    assert PYTHON.exists()
