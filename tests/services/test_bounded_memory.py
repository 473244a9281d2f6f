"""Memory for a sequence serves many: the youngest give way and run again, and no text changes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specwire import AsyncClient, Completion, ContextLengthError, ModelLoadError, Rule, SamplingParams
from specwire.config.flags import flag_name
from specwire.config.preflight.memory import _cgroup, _kv_values_per_token
from specwire.config.services import VerifyConfig
from specwire.engine import boot
from specwire.engine.model import memory
from specwire.engine.model.memory import free_and_total_bytes
from specwire.engine.model.runner import ModelRunner
from tests.support.harness import local_stack, started_services
from tests.support.integrity import check_integrity
from tests.support.pairs import save_good_draft, save_target
from tests.support.tiny_models import build
from verify_service.verifier import VerifyDecider

PROMPT = [5, 9, 11, 2, 7]
PAGE_SIZE = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("memory")
    return save_target(directory / "target"), save_good_draft(directory / "draft")


def test_the_cache_takes_a_fraction_of_the_free_memory(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Of the memory that is free with the model loaded, and no page more."""
    free, _ = free_and_total_bytes(torch.device("cpu"))
    config = VerifyConfig(model=str(pair[0]), kv_cache_memory=0.01, page_size=PAGE_SIZE)
    service = boot.start(config, "verify", VerifyDecider())
    try:
        assert isinstance(service.runner, ModelRunner)
        pool, per_token = service.runner.pool, service.runner.kv_bytes_per_token
        assert pool.num_pages * PAGE_SIZE * per_token == pytest.approx(0.01 * free, rel=0.2)
        assert service.info.context_len <= pool.num_pages * PAGE_SIZE
    finally:
        service.engine.close()


def test_the_cache_takes_what_is_left_of_a_share_of_all_memory(pair: tuple[Path, Path]) -> None:
    """What is in use counts, the model's and everybody's: a hundredth more is the cache's."""
    cpu = torch.device("cpu")
    free, total = free_and_total_bytes(cpu)
    share = 1 - free / total + 0.01
    config = VerifyConfig(model=str(pair[0]), gpu_memory_utilization=share, page_size=PAGE_SIZE)
    num_pages = memory.num_pages(config, cpu)
    assert callable(num_pages)
    assert num_pages(1000, 0) * 1000 == pytest.approx(0.01 * total, rel=0.2)
    shared = memory.num_pages(config, cpu, num_sharing=2)
    assert callable(shared)
    assert shared(1000, 0) * 1000 == pytest.approx(0.005 * total, rel=0.2)


@pytest.mark.parametrize("name", ["kv_cache_memory", "gpu_memory_utilization"])
def test_a_fraction_too_small_for_a_page_is_refused(pair: tuple[Path, Path], name: str) -> None:
    given: dict[str, Any] = {name: 1e-12}
    config = VerifyConfig(model=str(pair[0]), **given)
    with pytest.raises(
        ModelLoadError, match=f"{flag_name(name)} 1e-12 leaves 0 bytes on cpu, less than a page"
    ):
        boot.start(config, "verify", VerifyDecider())


def test_a_context_is_limited_and_not_extended(pair: tuple[Path, Path]) -> None:
    service = boot.start(VerifyConfig(model=str(pair[0]), max_model_len=40), "verify", VerifyDecider())
    service.close()
    assert service.info.context_len == 40
    with pytest.raises(ModelLoadError, match=r"--max-model-len 999999: .* has a context of \d+"):
        boot.start(VerifyConfig(model=str(pair[0]), max_model_len=999999), "verify", VerifyDecider())


@pytest.mark.parametrize("family", ["llama", "granitemoehybrid", "qwen3_next", "bamba", "falcon_h1"])
def test_a_token_takes_what_the_preflight_counts(tmp_path: Path, family: str) -> None:
    """Recurrent layers keep nothing of it."""
    runner = ModelRunner(build(family), num_pages=1)
    config = json.loads((save_target(tmp_path, family) / "config.json").read_text())
    assert runner.kv_bytes_per_token == 4 * _kv_values_per_token(config)


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    assert _cgroup(tmp_path)[0] > 1 << 60
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _cgroup(tmp_path)[0] > 1 << 60
    (tmp_path / "memory.max").write_text("1000\n")
    assert _cgroup(tmp_path) == (1000, 300)
    (old := tmp_path / "v1" / "memory").mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("2000\n")
    (old / "memory.usage_in_bytes").write_text("400\n")
    assert _cgroup(tmp_path / "v1") == (2000, 400)


def test_what_can_never_fit_is_refused_at_once(pair: tuple[Path, Path]) -> None:
    with local_stack(*pair, verify_options={"num_kv_tokens": 64, "page_size": PAGE_SIZE}) as stack:
        with pytest.raises(ContextLengthError, match=r"max_tokens=60: .* over the context of 64"):
            stack.client.generate(params=SamplingParams(max_tokens=60), prompt_token_ids=PROMPT)
        done = stack.client.generate(
            params=SamplingParams(max_tokens=59, ignore_eos=True), prompt_token_ids=PROMPT
        )
        assert done.usage.completion_tokens == 59


# --- random mixes ---------------------------------------------------------------------------------

MIX_SEEDS = range(2)
NUM_MIXED = 20
TIMEOUT_S = 60.0
"""Of a whole mix: a deadlock is a failure, not a test that hangs."""


@dataclass(frozen=True)
class Request:
    """One of a mix; `after_s` is when it is sent."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    after_s: float


def mix(seed: int) -> list[Request]:
    """Short prompts, long ones and ones that begin alike, with short and long answers, one after another."""
    draws = random.Random(seed)
    common = [draws.randrange(3, 97) for _ in range(100)]
    requests = []
    for number in range(NUM_MIXED):
        length = draws.choice([draws.randint(1, 9), draws.randint(30, 60), draws.randint(80, 120)])
        shared = min(length - 1, draws.choice([0, 0, 20, 90]))
        prompt = common[:shared] + [draws.randrange(3, 97) for _ in range(length - shared)]
        max_tokens = draws.choice([1, draws.randint(2, 12), draws.randint(20, 40)])
        requests.append(Request(tuple(prompt), max_tokens, 100 * seed + number, draws.random() * 0.1))
    return requests


def smallest_cache(requests: Sequence[Request]) -> dict[str, int]:
    """Just enough for the longest request alone; prompts come in small chunks."""
    longest = max(len(request.prompt) + request.max_tokens for request in requests)
    num_pages = -(-longest // PAGE_SIZE)
    return {
        "num_kv_tokens": num_pages * PAGE_SIZE,
        "page_size": PAGE_SIZE,
        "max_num_tokens": 65,
        "max_prefill_tokens": 16,
    }


async def generate_mix(address: str, requests: Sequence[Request]) -> list[Completion]:
    async def one(client: AsyncClient, request: Request) -> Completion:
        await asyncio.sleep(request.after_s)
        sampling = SamplingParams(
            rule=Rule.GUMBEL, seed=request.seed, max_tokens=request.max_tokens, ignore_eos=True
        )
        return await client.generate(params=sampling, prompt_token_ids=request.prompt)

    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        return await asyncio.gather(*(one(client, request) for request in requests))


@pytest.fixture(scope="module")
def undisturbed_mixes(pair: tuple[Path, Path]) -> dict[int, list[tuple[int, ...]]]:
    """Texts of every mix with room for all, prompts in one piece, no draft and no known prefixes."""
    options = {"num_kv_tokens": NUM_MIXED * 256, "prefix_sharing": False}
    with local_stack(pair[0], verify_options=options) as stack:
        results = {seed: asyncio.run(generate_mix(stack.address, mix(seed))) for seed in MIX_SEEDS}
        assert stack.status("verify").num_preemptions == 0
    return {seed: [done.token_ids for done in mixed] for seed, mixed in results.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("seed", "sharing", "short"),
    [
        (0, True, ("verify", "draft")),
        (1, False, ("verify", "draft")),
        (0, False, ("verify",)),
        (1, True, ("draft",)),
    ],
)
def test_any_mix_gets_on_with_the_memory_of_its_longest(
    pair: tuple[Path, Path],
    undisturbed_mixes: dict[int, list[tuple[int, ...]]],
    seed: int,
    sharing: bool,
    short: Sequence[str],
) -> None:
    """In both services, or in one of them; with prefixes that are shared, and without."""
    requests = mix(seed)
    small = smallest_cache(requests)
    options: dict[str, Any] = {
        f"{role}_options": (small if role in short else {}) | {"prefix_sharing": sharing}
        for role in ("verify", "draft")
    }
    with started_services() as services, local_stack(*pair, **options) as stack:
        results = asyncio.run(generate_mix(stack.address, requests))
        stack.assert_idle_within(1.0)
        for service in services.values():
            check_integrity(service.runner.pool)
        assert all(stack.status(role).num_preemptions > 0 for role in short)
    assert [done.token_ids for done in results] == undisturbed_mixes[seed]
    assert {done.speculation.draft_unavailable for done in results} == {""}
