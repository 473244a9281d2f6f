"""Nothing tells one client what another has cached: not the count, not the work that is done for it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import coordinator.service
import coordinator.servicer
from coordinator.requests import cache_salt
from specwire import AsyncClient, Client, Completion, Rule, SamplingParams
from specwire.config.security.bearer import make_token
from specwire.config.services import CoordinatorConfig
from tests.support.fronts import fronted
from tests.support.harness import LocalStack, local_stack, on_own_loop

PAGE_SIZE = 16
PROMPT = [i % 29 for i in range(207)]
NUM_CACHED = 192
"""Of the prompt, in whole pages; its last token and the drafts are run in any case."""
ROLES = ("draft", "verify")
OPTIONS = {"page_size": PAGE_SIZE}
TARGET, DRAFT = "emulated:step_ms=0", "emulated:step_ms=0,alpha=0.8"


def sampling(**settings: Any) -> SamplingParams:
    return dataclasses.replace(SamplingParams(max_tokens=8, seed=4, rule=Rule.GUMBEL), **settings)


def seen(stack: LocalStack, client: Client, token: str, params: SamplingParams) -> tuple[int, list[int]]:
    """What a client may notice of a cache: the count in its usage, and the tokens that were found."""
    before = {role: stack.status(role).num_hit_tokens for role in ROLES}
    done = generate(client, token, params)
    hits = [stack.status(role).num_hit_tokens - before[role] for role in ROLES]
    return done.usage.cached_tokens, hits


def generate(client: Client, token: str, params: SamplingParams) -> Completion:
    return client.generate(params=params, prompt_token_ids=PROMPT, token=token)


class TestTenants:
    """Bearer tokens are asked for."""

    @pytest.fixture
    def tokens(self, tmp_path: Path) -> tuple[Path, dict[str, str]]:
        """The file, and two tokens of alice and one of bob."""
        made = [make_token(name) for name in ("alice", "alice", "bob")]
        path = tmp_path / "tokens"
        path.write_text("\n".join(line for _, line in made))
        alice, renewed, bob = (token for token, _ in made)
        return path, {"alice": alice, "renewed": renewed, "bob": bob}

    @pytest.fixture
    def stack(self, tokens: tuple[Path, dict[str, str]]) -> Iterator[LocalStack]:
        options = {"tokens": str(tokens[0])}
        with local_stack(
            TARGET, DRAFT, coordinator_options=options, verify_options=OPTIONS, draft_options=OPTIONS
        ) as running:
            yield running

    def test_one_finds_nothing_of_another(
        self, stack: LocalStack, tokens: tuple[Path, dict[str, str]]
    ) -> None:
        _, by_name = tokens
        assert seen(stack, stack.client, by_name["alice"], sampling()) == (0, [0, 0])
        assert seen(stack, stack.client, by_name["bob"], sampling()) == (0, [0, 0])
        cached, hits = seen(stack, stack.client, by_name["renewed"], sampling())
        assert cached == NUM_CACHED, "two tokens of one name are one tenant"
        assert min(hits) >= NUM_CACHED
        assert seen(stack, stack.client, by_name["bob"], sampling(cache_salt="alice")) == (0, [0, 0])
        assert seen(stack, stack.client, by_name["alice"], sampling(cache_salt="alice")) == (0, [0, 0])
        assert seen(stack, stack.client, by_name["alice"], sampling(cache_salt="alice"))[0] == NUM_CACHED

    def test_a_tenant_finds_its_own_through_every_coordinator(
        self, stack: LocalStack, tokens: tuple[Path, dict[str, str]]
    ) -> None:
        path, by_name = tokens
        config = CoordinatorConfig(
            verify_address=stack.verify_address, draft_address=stack.draft_address, tokens=str(path)
        )
        with on_own_loop(lambda: coordinator.service.serving(config)) as address, Client(address) as other:
            text = generate(stack.client, by_name["alice"], sampling()).text
            assert seen(stack, other, by_name["bob"], sampling()) == (0, [0, 0])
            done = generate(other, by_name["alice"], sampling())
            assert (done.text, done.usage.cached_tokens) == (text, NUM_CACHED)


class TestWithoutTokens:
    @pytest.fixture
    def stack(self) -> Iterator[LocalStack]:
        with local_stack(TARGET, DRAFT, verify_options=OPTIONS, draft_options=OPTIONS) as running:
            yield running

    def test_prompts_are_shared_within_a_salt(self, stack: LocalStack) -> None:
        cached = [
            generate(stack.client, "", sampling(cache_salt=salt)).usage.cached_tokens
            for salt in ("", "", "mine", "mine", "yours", "")
        ]
        assert cached == [0, NUM_CACHED, 0, NUM_CACHED, 0, NUM_CACHED]

    async def test_a_stream_that_is_opened_again_finds_its_own(
        self, stack: LocalStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that pauses leaves draft and verify, and is back with its salt."""
        monkeypatch.setattr(coordinator.servicer, "_PAUSE_AFTER_S", 0.2)
        before = stack.status("verify").num_hit_tokens
        params = sampling(max_tokens=150, cache_salt="mine", num_draft_tokens=0)
        async with (
            AsyncClient(stack.address) as client,
            client.stream(params=params, prompt_token_ids=PROMPT) as stream,
        ):
            await anext(stream)
            async with asyncio.timeout(30):
                while not (await client.get_status()).num_paused:
                    pass
            async for _ in stream:
                pass
            assert stack.status("verify").num_hit_tokens >= before + NUM_CACHED


def test_over_http() -> None:
    with fronted(TARGET, verify_options=OPTIONS) as here:

        def cached(**extras: str) -> int:
            answer = here.openai.completions.create(
                model=here.model, prompt=PROMPT, max_tokens=4, extra_body=extras
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            return answer.usage.prompt_tokens_details.cached_tokens or 0

        salts: tuple[dict[str, str], ...] = ({}, {}, {"cache_salt": "mine"}, {"cache_salt": "mine"})
        assert [cached(**salt) > 0 for salt in salts] == [False, True, False, True]


def test_salts_of_tenants_and_of_requests_never_meet() -> None:
    salts = {cache_salt(tenant, given) for tenant in ("", "a", "ab") for given in ("", "b", "ab", "a\0b")}
    assert len(salts) == 12
    assert cache_salt("", "") == ""
    assert all(len(salt) == 32 for salt in salts - {""})
