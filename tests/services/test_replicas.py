"""Which replica a new stream goes to, and who counts as a replica: lists, names, health, handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from grpc_health.v1.health import aio as health_aio

import coordinator.peers.replicas
import coordinator.service
import draft_service.service
import verify_service.service
from coordinator.peers import handshake, pool
from coordinator.peers.attempts import MAX_FAILURES, Attempts
from coordinator.peers.handshake import check_same
from coordinator.peers.pool import Pool
from coordinator.peers.replicas import Replica, SentPrefixes, choose
from specwire import AsyncClient, Completion, Rule, SamplingParams, clock
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.stack import UpConfig
from specwire.core import ModelInfo
from specwire.errors import (
    ConfigError,
    HandshakeError,
    ResourceExhaustedError,
    ServiceUnavailableError,
)
from specwire.v1 import generation_pb2
from tests.support import texts
from tests.support.harness import local_stack
from tests.support.pairs import save_good_draft, save_target
from tests.support.refusals import refused

TARGET, DRAFT = "emulated:step_ms=3", "emulated:step_ms=1,alpha=0.8"
PROMPT = [3, 1, 4, 1, 5]
SHORT = SamplingParams(max_tokens=20, seed=7, rule=Rule.GUMBEL, num_draft_tokens=4)
LONG = SamplingParams(max_tokens=150, seed=7, rule=Rule.GUMBEL, num_draft_tokens=0)
PATIENCE_S = 30.0


class Fake(Replica):
    """Takes no streams: only its counts matter."""

    def __init__(self, name: str, *, num_streams: int = 0, num_others: int = 0) -> None:
        super().__init__("verify", name)
        self.mark_ready(ModelInfo(name="m", vocab_size=64, context_len=64, incarnation=name))
        self.num_streams, self.num_other_streams = num_streams, num_others

    def _open_link(self) -> NoReturn:
        raise AssertionError


def test_the_least_loaded_is_chosen_and_of_equals_the_one_taken_longest_ago() -> None:
    """Streams of others count."""
    busy, one, other = (
        Fake("a", num_streams=1, num_others=3),
        Fake("b", num_streams=2),
        Fake("c", num_streams=2),
    )
    one.last_used, other.last_used = 2, 1
    assert choose([busy, one, other]) is other


class TestTrials:
    """One that was lost and comes back has only shaken hands."""

    INFO = ModelInfo(name="m", vocab_size=64, context_len=64)

    def test_lost_again_and_again_it_pauses_longer(self) -> None:
        now_s = 0.0
        with clock.simulated(lambda: int(now_s * 1e9)):
            replica = Fake("a")
            for pause_s in (0.0, 1.0, 2.0, 4.0):
                replica.mark_lost("hangs")
                if pause_s:
                    now_s += pause_s - 0.01
                    replica.mark_ready(self.INFO)
                    assert replica.unavailable == "hangs"
                    now_s += 0.02
                replica.mark_ready(self.INFO)
                assert not replica.unavailable
                assert not replica.is_proven
            replica.mark_proven()
            assert replica.is_proven
            replica.mark_lost("killed")
            replica.mark_ready(self.INFO)
            assert not replica.unavailable, "the first loss after an answer may be a restart"
            assert replica.num_lost == 5

    def test_lost_for_hours(self) -> None:
        now_s = 0.0
        with clock.simulated(lambda: int(now_s * 1e9)):
            replica = Fake("a")
            for _ in range(1100):
                replica.mark_lost("its device fails")
                now_s += 60.1
                replica.mark_ready(self.INFO)
                assert not replica.unavailable

    @pytest.mark.parametrize("is_needed", [True, False])
    def test_one_stream_at_a_time_tries_it(self, is_needed: bool) -> None:
        drafts = Pool("draft", "", lambda _: Fake("none"), is_needed=is_needed)
        replica = Fake("a")
        drafts.add(replica)
        replica.mark_lost("hangs")
        replica.mark_ready(self.INFO)
        assert drafts.choose([1]) is replica
        drafts.opened(replica, [1])
        assert drafts.choose([1]) is (replica if is_needed else None)
        other = Fake("b", num_streams=7)
        drafts.add(other)
        assert drafts.choose([1]) is other
        replica.mark_proven()
        assert drafts.choose([1]) is replica


def test_a_longer_prompt_may_take_so_many_times_longer_or_eight_times_as_long() -> None:
    """Whichever is more: costs have a part that does not grow."""
    replica = Fake("a")
    replica.learn(4, 2, 10_000_000, message_number=1)
    found = [replica.longest_s(*size) for size in ((4, 1), (4, 2), (4, 12), (4, 26), (8, 26))]
    assert found == pytest.approx([0.08, 0.08, 0.08, 0.13, 0.26])


class TestOutages:
    """How long clients are told to wait, which is what a restart took before."""

    def test_as_long_as_the_last_one_or_as_long_again(self) -> None:
        now_s = 0.0
        with clock.simulated(lambda: int(now_s * 1e9)):
            verify = Pool("verify", "", lambda _: Fake("none"), is_needed=True)
            replica = Fake("a")
            verify.add(replica)
            replica.mark_unavailable("drains")
            replica.mark_ready(TestTrials.INFO)
            assert verify.expected_s() == 1.0
            for lasts_s, told in (
                (12.0, {0.0: 1.0, 5.0: 5.0, 12.0: 12.0}),
                (1000.0, {0.0: 12.0, 5.0: 7.0, 11.5: 1.0, 13.0: 13.0, 1000.0: 60.0}),
                (0.0, {0.0: 60.0}),
            ):
                lost_s = now_s
                replica.mark_unavailable("drains")
                for after_s, expected_s in told.items():
                    now_s = lost_s + after_s
                    replica.mark_unavailable("drains")
                    assert verify.expected_s() == expected_s
                now_s = lost_s + lasts_s
                replica.mark_ready(TestTrials.INFO)
                assert verify.expected_s() == 1.0


class TestPrefixes:
    def test_the_longest_beginning_wins(self) -> None:
        sent = SentPrefixes()
        sent.note(range(64), "a")
        sent.note(range(128), "b")
        sent.note([*range(64), *range(1000, 1064)], "c")
        assert sent.holder(range(200), {"a", "b", "c"}) == "b"
        assert sent.holder([*range(64), *range(1000, 1100)], {"a", "b", "c"}) == "c"
        assert sent.holder([*range(64), 5, 5, 5], {"a", "b", "c"}) == "c", "the last that was sent the page"
        assert sent.holder(range(1, 200), {"a", "b", "c"}) is None
        assert sent.holder(range(63), {"a", "b", "c"}) is None, "less than a page is not looked for"
        assert sent.holder(range(200), {"a"}) is None, "one that is gone or restarted is not found"

    def test_another_salt_finds_nothing(self) -> None:
        sent = SentPrefixes()
        sent.note(range(128), "a", "alice")
        sent.note(range(64), "b", "bob")
        assert sent.holder(range(128), {"a", "b"}) is None
        assert sent.holder(range(128), {"a", "b"}, "alice") == "a"
        assert sent.holder(range(128), {"a", "b"}, "bob") == "b"

    def test_it_forgets_what_was_not_met_for_the_longest_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(coordinator.peers.replicas, "MAX_KNOWN_PAGES", 2)
        sent = SentPrefixes()
        for start in (0, 100, 200):
            sent.note(range(start, start + 64), "a")
        assert sent.holder(range(64), {"a"}) is None
        assert sent.holder(range(100, 164), {"a"}) == "a"


class TestAttempts:
    def test_a_request_that_fails_everywhere_is_given_up(self) -> None:
        attempts = Attempts(1e9, lambda: None)
        for _ in range(MAX_FAILURES - 1):
            attempts.add(Fake("a"), ServiceUnavailableError("gone"))
        with pytest.raises(ServiceUnavailableError, match=r"the last of 4 streams.*gone") as caught:
            attempts.add(Fake("b"), ServiceUnavailableError("gone"))
        assert caught.value.retry_after_ms

    def test_room_that_will_never_be_is_not_waited_for(self) -> None:
        with pytest.raises(ResourceExhaustedError):
            Attempts(1e9, lambda: None).add(Fake("a"), ResourceExhaustedError("too long", None))

    def test_waits_end_with_the_deadline_of_the_request(self) -> None:
        assert Attempts(1e9, lambda: 2.0).wait_s() == 2.0
        assert Attempts(0.0, lambda: None).wait_s() <= 0

    def test_what_the_client_is_told(self) -> None:
        attempts = Attempts(1e9, lambda: None)
        told = attempts.give_up("verify service a: gone", 7.5)
        assert isinstance(told, ServiceUnavailableError)
        assert (str(told), told.retry_after_ms) == ("verify service a: gone", 7500)
        full = ResourceExhaustedError("full", 5)
        attempts.add(Fake("a"), full)
        assert attempts.give_up("", 1.0) is full


class TestAddresses:
    @pytest.mark.parametrize(
        "text", ["", "a", "a:1,", "a:1,b", "a:1,a:1", "dns:///a", "dns://a:1", "dns:///:1", "dns:///a..b:1"]
    )
    def test_what_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--verify-address"):
            CoordinatorConfig(verify_address=text)

    async def test_the_system_resolves(self) -> None:
        assert "127.0.0.1:70" in await pool.resolve("localhost", 70)
        with pytest.raises(OSError, match=r"."):
            await pool.resolve("does-not-exist.invalid", 70)


class TestUp:
    def test_what_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="--replicas 0"):
            UpConfig(replicas=0)
        with pytest.raises(ConfigError, match=r"--replicas 2: need --ray-address"):
            UpConfig(replicas=2, tensor_parallel_size=2)
        UpConfig(replicas=2, tensor_parallel_size=2, ray_address="127.0.0.1:6379")

    @pytest.mark.parametrize(
        ("device", "devices"),
        [("cuda", ["cuda:0", "cuda:1"]), ("cuda:1", ["cuda:1"] * 2), ("cpu", ["cpu"] * 2)],
    )
    def test_cards_are_spread_where_none_is_named(self, device: str, devices: list[str]) -> None:
        config = UpConfig(device=device, replicas=2)
        assert [config.verify(index).device for index in range(2)] == devices


# --- with services ----------------------------------------------------------------------------------


class Services:
    """Model services of this process, each of which can be ended on its own."""

    def __init__(self) -> None:
        self._running: dict[str, contextlib.AsyncExitStack] = {}

    async def start(self, role: str, model: str, **options: Any) -> str:
        """Its address."""
        stack = contextlib.AsyncExitStack()
        options.setdefault("grace_s", 0.0)
        if role == "verify":
            serving = verify_service.service.serving(VerifyConfig(model=model, **options))
        else:
            serving = draft_service.service.serving(DraftConfig(model=model, **options))
        address: str = await stack.enter_async_context(serving)
        self._running[address] = stack
        return address

    async def stop(self, address: str) -> None:
        await self._running.pop(address).aclose()

    async def stop_all(self) -> None:
        for address in list(self._running):
            await self.stop(address)


@pytest.fixture
async def services() -> AsyncIterator[Services]:
    running = Services()
    yield running
    await running.stop_all()


class Zone:
    """What a name stands for, for as long as the test leaves it so."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.is_down = False
        self.asked: set[tuple[str, int]] = set()

    async def __call__(self, name: str, port: int) -> list[str]:
        self.asked.add((name, port))
        if self.is_down:
            raise OSError("no answer")
        return list(self.addresses)


@contextlib.asynccontextmanager
async def serving(verify: str, draft: str = "", *, is_plain: bool = False) -> AsyncIterator[AsyncClient]:
    config = CoordinatorConfig(
        verify_address=verify,
        draft_address=draft,
        grace_s=0.0,
        failover_timeout_s=5.0,
        allow_plaintext=is_plain,
    )
    async with coordinator.service.serving(config) as address, AsyncClient(address) as client:
        yield client


Replicas = dict[str, generation_pb2.ReplicaStatus]


async def replicas(client: AsyncClient, role: str = "verify") -> Replicas:
    status = await client.get_status()
    found = status.verify_replicas if role == "verify" else status.draft_replicas
    return {replica.address: replica for replica in found}


async def until(client: AsyncClient, holds: Callable[[Replicas], bool], role: str = "verify") -> Replicas:
    """As soon as it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds(found := await replicas(client, role)):  # noqa: ASYNC110 - of another process, or as good as
            await asyncio.sleep(0.02)
    return found


async def generate(
    client: AsyncClient, params: SamplingParams = SHORT, prompt: list[int] = PROMPT
) -> Completion:
    return await client.generate(params=params, prompt_token_ids=prompt)


async def test_streams_spread_over_the_replicas_and_follow_their_prefix(services: Services) -> None:
    a, b = [await services.start("verify", TARGET) for _ in range(2)]
    shared = [i % 60 for i in range(130)]
    async with serving(f"{a},{b}") as client, contextlib.AsyncExitStack() as stack:

        async def begin(prompt: list[int]) -> None:
            stream = await stack.enter_async_context(client.stream(params=LONG, prompt_token_ids=prompt))
            await anext(stream)

        async def counts() -> list[int]:
            found = await replicas(client)
            return [found[a].num_streams, found[b].num_streams]

        for i in range(4):
            await begin([i, *PROMPT])
        assert await counts() == [2, 2]
        await begin([*shared, 1])
        [holder] = [i for i, count in enumerate(await counts()) if count == 3]
        await begin([*shared, 2])
        assert (await counts())[holder] == 4, "it holds two pages of the prompt"
        await begin([*shared, 3])
        await begin([*shared, 4])
        assert (await counts())[holder] == 6
        await begin([*shared, 5])
        assert (await counts())[holder] == 6, "it has over two more than one and a half times two"


@pytest.mark.slow
async def test_a_name_is_followed_and_what_vanishes_drains_away(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = [await services.start("verify", TARGET) for _ in range(2)]
    zone = Zone(a)
    monkeypatch.setattr(pool, "resolve", zone)
    monkeypatch.setattr(pool, "RESOLVED_EVERY_S", 0.05)
    async with serving("dns:///verify.local:7072", is_plain=True) as client:
        assert zone.asked == {("verify.local", 7072)}
        alone = await generate(client, LONG)
        async with client.stream(params=LONG, prompt_token_ids=PROMPT) as stream:
            await anext(stream)
            zone.addresses = [b]
            await until(client, lambda found: b in found and not found[b].unavailable)
            await until(client, lambda found: "not listed" in found[a].unavailable)
            async with client.stream(params=LONG, prompt_token_ids=PROMPT) as other:
                await anext(other)
                found = await replicas(client)
                assert (found[a].num_streams, found[b].num_streams) == (1, 1)
            async for _ in stream:
                pass
            assert stream.completion.token_ids == alone.token_ids
            assert found[a].num_lost == 0
        await until(client, lambda found: list(found) == [b])
        zone.is_down = True
        await asyncio.sleep(0.2)  # some look-ups fail meanwhile, even on a busy machine
        assert list(await replicas(client)) == [b]
        assert (await generate(client, LONG)).token_ids == alone.token_ids


async def test_other_weights_under_the_same_name_are_left_out(services: Services, tmp_path: Path) -> None:
    """A directory of the same name, with weights that were changed a little."""
    first = await services.start("verify", str(save_target(tmp_path / "a" / "target")), dtype="float32")
    changed = save_good_draft(tmp_path / "b" / "target")
    second = await services.start("verify", str(changed), dtype="float32")
    async with serving(f"{first},{second}") as client:
        await until(
            client, lambda found: any("weights_fingerprint" in each.unavailable for each in found.values())
        )
        texts = {(await generate(client)).token_ids for _ in range(4)}
        assert len(texts) == 1


def test_what_texts_depend_on_is_compared() -> None:
    info = ModelInfo(name="m", vocab_size=64, context_len=2048, dtype="bfloat16", weights_fingerprint="a")
    check_same(info, dataclasses.replace(info, incarnation="another", prepares_outcomes=True))
    others: dict[str, Any] = {
        "name": "n",
        "vocab_size": 65,
        "context_len": 256,
        "dtype": "float32",
        "weights_fingerprint": "b",
        "tokenizer_fingerprint": "c",
        "tokenizer_hash": "e",
        "eos_token_ids": (7,),
        "batch_invariant": True,
        "trees": True,
        "encoder_len": 8,
        "decoder_token_ids": (7,),
        "adapters": {"mine": "d"},
    }
    for name, value in others.items():
        with pytest.raises(HandshakeError, match=f"{name}="):
            check_same(info, dataclasses.replace(info, **{name: value}))
    over_ranks = dataclasses.replace(info, num_ranks=2)
    check_same(info, over_ranks)
    with pytest.raises(HandshakeError, match="num_ranks="):
        check_same(*(dataclasses.replace(each, batch_invariant=True) for each in (info, over_ranks)))


async def test_a_draft_that_does_not_fit_is_refused_at_start_if_there_is_no_other(services: Services) -> None:
    verify = await services.start("verify", TARGET)
    fits, other = (
        await services.start("draft", DRAFT),
        await services.start("draft", DRAFT + ",vocab_size=128"),
    )
    with pytest.raises(HandshakeError, match="vocabularies of 64 and 128"):
        async with serving(verify, other):
            pass
    async with serving(verify, f"{other},{fits}") as client:
        assert (await generate(client)).speculation.num_draft_tokens > 0


def test_a_pair_with_different_tokenizers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_target(tmp_path / "stranger", vocab_size=texts.VOCAB_SIZE)
    texts.build_tokenizer(["entirely other words, so other merges\n"]).save_pretrained(other)
    with (
        refused(HandshakeError, "'target'", "'stranger'", "different tokenizers"),
        local_stack(pair[0], other),
    ):
        pass


async def test_services_of_another_protocol_version_are_left_out_until_an_upgrade_is_whole(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft first, then verify: texts without drafts, then a pause, and the same text when both fit again."""
    check, upgraded = handshake.check_version, set[str]()

    def checked(info: ModelInfo) -> None:
        version = info.protocol_version + (info.name in upgraded)
        check(dataclasses.replace(info, protocol_version=version))

    monkeypatch.setattr(handshake, "check_version", checked)
    verify, draft = await services.start("verify", TARGET), await services.start("draft", DRAFT)

    def is_left_out(found: Replicas) -> bool:
        return all("speaks protocol version" in each.unavailable for each in found.values())

    async with serving(verify, draft) as client:
        expected = await generate(client)
        upgraded.add(DRAFT)
        await until(client, is_left_out, "draft")
        plain = await generate(client)
        assert (plain.token_ids, plain.speculation.num_draft_tokens) == (expected.token_ids, 0)
        upgraded.add(TARGET)
        await until(client, is_left_out)
        waiting = asyncio.create_task(generate(client))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        upgraded.clear()
        assert (await waiting).token_ids == expected.token_ids


async def test_replicas_that_are_not_there_are_taken_up_when_they_come(services: Services) -> None:
    a = await services.start("verify", TARGET)
    b = await services.start("verify", TARGET)
    await services.stop(b)
    async with serving(f"{b},{a}") as client:
        found = await replicas(client)
        assert found[b].unavailable
        assert found[a].unavailable == ""
        await generate(client)
        await services.start("verify", TARGET, address=b)
        await until(client, lambda found: found[b].unavailable == "")


async def test_a_draining_replica_finishes_its_streams_and_gets_no_new_ones(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, say = asyncio.Event(), health_aio.HealthServicer.enter_graceful_shutdown

    async def say_late(self: health_aio.HealthServicer) -> None:
        await told.wait()
        await say(self)

    monkeypatch.setattr(health_aio.HealthServicer, "enter_graceful_shutdown", say_late)
    a = await services.start("verify", TARGET, grace_s=PATIENCE_S)
    b = await services.start("verify", TARGET, grace_s=PATIENCE_S)
    async with serving(f"{a},{b}") as client:
        alone = await generate(client, LONG)
        async with client.stream(params=LONG, prompt_token_ids=PROMPT) as stream:
            await anext(stream)
            [busy] = [address for address, one in (await replicas(client)).items() if one.num_streams]
            ending = asyncio.create_task(services.stop(busy))
            met = await asyncio.gather(*[generate(client) for _ in range(4)])
            told.set()
            await until(client, lambda found: found[busy].unavailable != "")
            done = await asyncio.gather(*[generate(client) for _ in range(4)])
            assert len({one.token_ids for one in (*met, *done)}) == 1
            async for _ in stream:
                pass
        assert stream.completion.token_ids == alone.token_ids
        async with asyncio.timeout(PATIENCE_S - 5):
            await ending  # with its last stream, which is not the watch over its health
        found = await replicas(client)
        assert found[busy].num_lost == 0, "nothing that it had was lost"


async def test_a_full_replica_sends_a_stream_to_another(services: Services) -> None:
    verifies = [await services.start("verify", TARGET, max_sequences=1) for _ in range(2)]
    drafts = [await services.start("draft", DRAFT, max_sequences=1) for _ in range(2)]
    async with serving(",".join(verifies), ",".join(drafts)) as client:
        done = await asyncio.gather(*[generate(client, LONG) for _ in range(3)], return_exceptions=True)
        refused = [one for one in done if isinstance(one, ResourceExhaustedError)]
        assert len(refused) == 1
        assert refused[0].retry_after_ms
