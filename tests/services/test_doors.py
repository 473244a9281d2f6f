"""TLS and tokens of the three services: exact statuses, and files that are replaced while they serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

import coordinator.service
import draft_service.service
import verify_service.service
from coordinator.__main__ import main as coordinator_main
from coordinator.peers.handshake import VerifyPool
from draft_service.__main__ import main as draft_main
from specwire import (
    TLS,
    AsyncClient,
    Client,
    ConfigError,
    InvalidRequestError,
    ResourceExhaustedError,
    Rule,
    SamplingParams,
    ServiceUnavailableError,
    UnauthenticatedError,
)
from specwire.cli import main as cli
from specwire.cli.supervisor import generate_line
from specwire.config.security.bearer import make_token
from specwire.config.security.tls import PLAINTEXT, Credentials, is_loopback
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.stack import UpConfig
from specwire.rpc.channel import open_channel
from specwire.rpc.connecting import CLIENT, PEER
from tests.support.certificates import Authority, Pair
from tests.support.harness import LocalStack, local_stack, on_own_loop
from verify_service.__main__ import main as verify_main

TARGET = "emulated:step_ms=0.5"
DRAFT = "emulated:step_ms=0.1,alpha=0.8"

OK = grpc.StatusCode.OK
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
TYPES = {UNAVAILABLE: ServiceUnavailableError, UNAUTHENTICATED: UnauthenticatedError}

SERVICES = {
    "coordinator": ("/specwire.v1.GenerationService", "Generate"),
    "draft": ("/specwire.v1.DraftService", "Draft"),
    "verify": ("/specwire.v1.VerifyService", "Verify"),
}
"""With their streams."""


class Keys:
    """Credentials, valid and invalid."""

    def __init__(self, directory: Path) -> None:
        self.ours, self.foreign = Authority(directory / "ours"), Authority(directory / "foreign")
        self.server = self.ours.pair("server")
        self.expired_server = self.ours.pair("expired-server", expired=True)
        self.client = self.ours.pair("client", "client.example")
        self.expired_client = self.ours.pair("expired-client", "client.example", expired=True)
        self.foreign_client = self.foreign.pair("client", "client.example")
        self.token, self.line = make_token("alice")
        self.expired_token, expired_line = make_token("bob", expires="2020-01-01")
        self.unknown_token, _ = make_token("mallory")
        self.tokens = str(directory / "tokens")
        Path(self.tokens).write_text(f"# tokens\n\n{self.line}\n{expired_line}\n")
        self.token_file = str(directory / "token")
        Path(self.token_file).write_text(self.token + "\n")

    def tls(self, pair: Pair | None = None, *, ca: str = "", server_name: str = "") -> TLS:
        cert, key = pair or ("", "")
        return TLS(ca=ca or self.ours.path, cert=cert, key=key, server_name=server_name)

    @property
    def listen_options(self) -> dict[str, Any]:
        """Options of a service with TLS, client certificates and tokens."""
        return {
            "tls_cert": self.server.cert,
            "tls_key": self.server.key,
            "tls_client_ca": self.ours.path,
            "tokens": self.tokens,
        }

    @property
    def peer(self) -> dict[str, Any]:
        """Options of a coordinator for such services."""
        return {
            "peer_ca": self.ours.path,
            "peer_cert": self.client.cert,
            "peer_key": self.client.key,
            "peer_token_file": self.token_file,
        }


@dataclass(frozen=True)
class Case:
    """Credentials of a call and the expected status.

    Attributes:
        world: locked, expired (the server's own certificate) or plain.
        status: of every request.
        says: a part of the error, with the names that settings have at the end that made the call.
    """

    world: str
    status: grpc.StatusCode
    cert: str = "client"
    ca: str = "ours"
    server_name: str = ""
    token: str = "token"
    tls: bool = True
    says: str = ""

    def credentials(self, keys: Keys) -> Credentials:
        pair = getattr(keys, self.cert) if self.cert else None
        ca = getattr(keys, self.ca).path
        tls = keys.tls(pair, ca=ca, server_name=self.server_name) if self.tls else None
        return Credentials(tls=tls, token=getattr(keys, self.token) if self.token else "")


CLOSED = "{server} closes the connection; it may expect TLS ({ca}), or a certificate of this end ({cert})"
NOT_ACCEPTED = "the certificate of {{server}} is not accepted ({}); {{ca}} names the authorities"
OTHER_HOST = "the certificate of {server} is for other hosts; {server_name} names one of them"
CASES = {
    "valid": Case("locked", OK),
    "no certificate": Case("locked", UNAVAILABLE, cert="", says=CLOSED),
    "certificate of a foreign authority": Case("locked", UNAVAILABLE, cert="foreign_client", says=CLOSED),
    "expired certificate": Case("locked", UNAVAILABLE, cert="expired_client", says=CLOSED),
    "server of a foreign authority": Case(
        "locked",
        UNAVAILABLE,
        ca="foreign",
        says=NOT_ACCEPTED.format("unable to get local issuer certificate"),
    ),
    "expired server": Case("expired", UNAVAILABLE, says=NOT_ACCEPTED.format("certificate has expired")),
    "server of another name": Case("locked", UNAVAILABLE, server_name="other.example", says=OTHER_HOST),
    "plaintext to TLS": Case("locked", UNAVAILABLE, tls=False, says=CLOSED),
    "TLS to plaintext": Case("plain", UNAVAILABLE, says="{server} speaks plaintext, and this end TLS ({ca})"),
    "no token": Case("locked", UNAUTHENTICATED, token="", says="a bearer token is required"),
    "unknown token": Case(
        "locked", UNAUTHENTICATED, token="unknown_token", says="the bearer token is not known"
    ),
    "expired token": Case("locked", UNAUTHENTICATED, token="expired_token", says="the bearer token expired"),
    "plaintext to plaintext": Case("plain", OK, tls=False),
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


def addresses_of(stack: LocalStack) -> dict[str, str]:
    return {"coordinator": stack.address, "draft": stack.draft_address, "verify": stack.verify_address}


def locked_stack(keys: Keys, options: dict[str, Any]) -> contextlib.AbstractContextManager[LocalStack]:
    every: dict[str, Any] = {"verify_options": options, "draft_options": options}
    return local_stack(TARGET, DRAFT, coordinator_options=options | keys.peer, **every)


@pytest.fixture(scope="module")
def worlds(keys: Keys) -> Iterator[dict[str, dict[str, str]]]:
    """Addresses of the services, by world."""
    options = keys.listen_options
    with contextlib.ExitStack() as stack:
        locked = stack.enter_context(locked_stack(keys, options))
        plain = stack.enter_context(local_stack(TARGET, DRAFT))
        expired = expired_services(stack, keys, plain)
        yield {"locked": addresses_of(locked), "plain": addresses_of(plain), "expired": expired}


def expired_services(stack: contextlib.ExitStack, keys: Keys, plain: LocalStack) -> dict[str, str]:
    pair: dict[str, Any] = {
        "tls_cert": keys.expired_server.cert,
        "tls_key": keys.expired_server.key,
        "grace_s": 0.0,
    }
    contexts = {
        "coordinator": lambda: coordinator.service.serving(
            CoordinatorConfig(verify_address=plain.verify_address, **pair)
        ),
        "draft": lambda: draft_service.service.serving(DraftConfig(model=DRAFT, **pair)),
        "verify": lambda: verify_service.service.serving(VerifyConfig(model=TARGET, **pair)),
    }
    return {name: stack.enter_context(on_own_loop(make)) for name, make in contexts.items()}


async def status_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.RpcError as error:
        return error.code()
    return OK


async def statuses(service: str, address: str, credentials: Credentials) -> dict[str, grpc.StatusCode]:
    """What a service says to its handshake and to its stream, which has no request."""
    name, stream = SERVICES[service]
    async with open_channel(address, credentials=credentials) as channel:
        unary = await status_of(channel.unary_unary(f"{name}/GetModelInfo")(b"", timeout=10))
        call = channel.stream_stream(f"{name}/{stream}")(timeout=10)
        if unary is OK:
            await call.done_writing()  # else it ends by itself
        return {"GetModelInfo": unary, stream: await call.code()}


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_status_by_credentials(
    worlds: dict[str, dict[str, str]], keys: Keys, case: Case, service: str
) -> None:
    found = asyncio.run(statuses(service, worlds[case.world][service], case.credentials(keys)))
    empty = grpc.StatusCode.INVALID_ARGUMENT  # from the method: a generation needs a prompt
    stream = empty if service == "coordinator" and case.status is OK else case.status
    assert found == {"GetModelInfo": case.status, SERVICES[service][1]: stream}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_client_raises_the_type(worlds: dict[str, dict[str, str]], keys: Keys, case: Case) -> None:
    shown = case.credentials(keys)
    with Client(worlds[case.world]["coordinator"], tls=shown.tls, token=shown.token) as client:
        if case.status is OK:
            assert client.generate(params=SamplingParams(max_tokens=5), prompt_token_ids=[1, 2]).token_ids
        else:
            with pytest.raises(TYPES[case.status]) as refused:
                client.generate(params=SamplingParams(max_tokens=5), prompt_token_ids=[1, 2])
            assert type(refused.value) is TYPES[case.status]
            assert not shown.token or shown.token not in str(refused.value)
            server = worlds[case.world]["coordinator"]
            assert case.says.format(server=server, **CLIENT._asdict()) in str(refused.value)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_a_coordinator_says_what_is_wrong_with_a_peer(
    worlds: dict[str, dict[str, str]], keys: Keys, case: Case
) -> None:
    pool = VerifyPool(worlds[case.world]["verify"], case.credentials(keys))
    try:
        pool.start()
        await pool.all_contacted()
        assert case.says.format(server="this address", **PEER._asdict()) in pool.unavailable
        assert bool(pool.unavailable) == (case.status is not OK)
        assert ("--peer-token-file" in pool.unavailable) == (case.status is UNAUTHENTICATED)
    finally:
        await pool.close()


@pytest.mark.parametrize("service", SERVICES)
async def test_health_needs_no_token_and_reflection_does(
    worlds: dict[str, dict[str, str]], keys: Keys, service: str
) -> None:
    without = Credentials(tls=keys.tls(keys.client))
    async with open_channel(worlds["locked"][service], credentials=without) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        assert await stub.ServerReflectionInfo(timeout=10).code() is UNAUTHENTICATED
        assert await status_of(channel.unary_unary("/no.such/Method")(b"", timeout=10)) is UNAUTHENTICATED


def replace(path: str, data: bytes) -> None:
    new = Path(path + ".new")
    new.write_bytes(data)
    new.rename(path)


def copy(source: str, target: str) -> None:
    replace(target, Path(source).read_bytes())


class TestRotation:
    """A chain of certificates and tokens is replaced under running services."""

    PROMPT = (1, 2, 3)
    PARAMS = SamplingParams(max_tokens=120, seed=3, rule=Rule.GUMBEL)

    @pytest.fixture
    def rotated(self, tmp_path: Path) -> Iterator[tuple[Keys, LocalStack]]:
        keys = Keys(tmp_path)
        options = keys.listen_options | {"tls_client_ca": ""}
        with locked_stack(keys, options) as stack:
            yield keys, stack

    async def test_new_connections_see_new_files_and_running_streams_go_on(
        self, rotated: tuple[Keys, LocalStack], tmp_path: Path
    ) -> None:
        keys, stack = rotated
        old_ca = str(tmp_path / "old-ca.pem")
        copy(keys.ours.path, old_ca)
        new = Authority(tmp_path / "new")
        pair = new.pair("server")
        tls = keys.tls()
        async with (
            AsyncClient(stack.address, tls=tls, token=keys.token) as client,
            client.stream(params=self.PARAMS, prompt_token_ids=self.PROMPT) as stream,
        ):
            await anext(stream)
            for old, path in (
                (keys.server.cert, pair.cert),
                (keys.server.key, pair.key),
                (keys.ours.path, new.path),
            ):
                copy(path, old)
            async with AsyncClient(stack.address, tls=TLS(ca=old_ca), token=keys.token) as late:
                with pytest.raises(ServiceUnavailableError):
                    await late.get_model_info()
            async with AsyncClient(stack.address, tls=TLS(ca=new.path), token=keys.token) as fresh:
                await fresh.get_model_info()
            other = await client.generate(params=self.PARAMS, prompt_token_ids=self.PROMPT)
            async for _ in stream:
                pass
            assert stream.completion.token_ids == other.token_ids
            assert len(other.token_ids) == 120
            assert not other.speculation.draft_unavailable

    async def test_a_token_is_replaced(self, rotated: tuple[Keys, LocalStack]) -> None:
        keys, stack = rotated
        token, line = make_token("carol")
        async with (
            AsyncClient(stack.address, tls=keys.tls(), token=keys.token) as client,
            client.stream(params=self.PARAMS, prompt_token_ids=self.PROMPT) as stream,
        ):
            await anext(stream)
            replace(keys.tokens, f"{line}\n{keys.line}".encode())
            replace(keys.token_file, token.encode())  # the coordinator's own, for its peers
            await client.get_model_info()
            replace(keys.tokens, line.encode())
            with pytest.raises(UnauthenticatedError):
                await client.generate(params=self.PARAMS, prompt_token_ids=self.PROMPT)
            async for _ in stream:
                pass
        async with AsyncClient(stack.address, tls=keys.tls(), token=token) as client:
            done = await client.generate(params=self.PARAMS, prompt_token_ids=self.PROMPT)
        assert done.token_ids == stream.completion.token_ids
        assert not done.speculation.draft_unavailable

    async def test_files_that_cannot_be_used_leave_what_was_there(
        self, rotated: tuple[Keys, LocalStack], caplog: pytest.LogCaptureFixture
    ) -> None:
        keys, stack = rotated
        copy(keys.ours.pair("other").cert, keys.server.cert)  # its key has not come yet
        replace(keys.tokens, b'{"name": "alice", "sha256": "' + keys.token.encode() + b'"}')
        with caplog.at_level(logging.ERROR):
            for _ in range(2):
                async with AsyncClient(stack.address, tls=keys.tls(), token=keys.token) as client:
                    await client.get_model_info()
        messages = [
            record.getMessage()
            for record in caplog.records
            if record.name == "specwire.config.security.reloading"
        ]
        assert len(messages) == 2  # once for each, not at every connection
        assert keys.token not in str(messages)


class TestCommandLine:
    WORDS = ("generate", "--token-ids", "1,2,3", "--max-tokens", "4", "--seed", "1")

    def test_the_line_that_up_suggests_is_admitted(
        self, worlds: dict[str, dict[str, str]], keys: Keys
    ) -> None:
        config = UpConfig(target=TARGET, draft=DRAFT, **keys.listen_options)
        line = generate_line(config, worlds["locked"]["coordinator"])
        files = {"CA": keys.ours.path, "CERT": keys.client.cert, "KEY": keys.client.key}
        own = {"def f(x):": "--token-ids=1,2", "TOKEN": keys.token_file} | files
        program, *words = (own.get(word, word) for word in shlex.split(line))
        assert program == "specwire"
        assert cli.main([*words, "--max-tokens", "4"]) == 0

    def test_token_from_a_file_or_a_variable(
        self,
        worlds: dict[str, dict[str, str]],
        keys: Keys,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        cert, key = keys.client
        words = [*self.WORDS, "--server", worlds["locked"]["coordinator"]]
        words += ["--tls-ca", keys.ours.path, "--client-cert", cert, "--client-key", key]
        assert cli.main([*words, "--token-file", keys.token_file]) == 0
        monkeypatch.setenv("SPECWIRE_TOKEN", keys.token)
        assert cli.main(words) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first == second
        assert cli.main([*words, "--token-file", keys.token_file]) == 2, "one of them only"
        monkeypatch.setenv("SPECWIRE_TOKEN", keys.expired_token)
        assert cli.main(words) == 1
        assert "the bearer token expired" in capsys.readouterr().err
        monkeypatch.delenv("SPECWIRE_TOKEN")
        assert cli.main(words) == 1
        assert "required; SPECWIRE_TOKEN or --token-file gives one" in capsys.readouterr().err

    def test_no_flag_takes_a_token(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cli.main([*self.WORDS, "--token=x"])
        assert "unrecognized arguments: --token=x" in capsys.readouterr().err


class TestHolders:
    """What the coordinator does with the limits of a token."""

    @pytest.fixture
    def few(self, tmp_path: Path) -> Iterator[tuple[str, str, str]]:
        """An address, and two tokens for it, the first one with limits."""
        token, line = make_token("few", max_running=1, max_waiting=1, max_tokens=120)
        other, other_line = make_token("other")
        (tmp_path / "tokens").write_text(f"{line}\n{other_line}\n")
        with local_stack(TARGET, coordinator_options={"tokens": str(tmp_path / "tokens")}) as stack:
            yield stack.address, token, other

    async def test_limits_of_a_token(self, few: tuple[str, str, str]) -> None:
        address, token, other = few
        params, prompt = SamplingParams(max_tokens=120, ignore_eos=True), [1]
        async with (
            AsyncClient(address, token=token) as client,
            AsyncClient(address, token=other) as free,
            client.stream(params=params, prompt_token_ids=prompt) as running,
        ):
            await anext(running)  # and no further: it pauses, and keeps its place for a second
            both = [
                asyncio.create_task(client.generate(params=params, prompt_token_ids=prompt)) for _ in range(2)
            ]
            done, waiting = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(ResourceExhaustedError, match="1 generations of few run, 1 wait"):
                await done.pop()
            with pytest.raises(InvalidRequestError, match="max_tokens=121: is over the 120"):
                await client.generate(params=SamplingParams(max_tokens=121), prompt_token_ids=prompt)
            assert len((await free.generate(params=params, prompt_token_ids=prompt)).token_ids) == 120
            async for _ in running:
                pass
            assert len((await waiting.pop()).token_ids) == 120
            unlimited = SamplingParams(max_tokens=None, ignore_eos=True)
            assert len((await client.generate(params=unlimited, prompt_token_ids=prompt)).token_ids) == 120


class TestPlaintext:
    def test_loopback(self) -> None:
        inside = ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"]
        outside = ["0.0.0.0", "::", "10.0.0.1", "localhost.example", "verify", "127.0.0.1.example", ""]
        assert [is_loopback(host) for host in inside + outside] == [True] * 5 + [False] * 7

    @pytest.mark.parametrize("kind", [CoordinatorConfig, DraftConfig, VerifyConfig])
    def test_a_service_refuses_to_listen_beyond_this_machine(self, kind: Any) -> None:
        with pytest.raises(ConfigError, match=r"--address 0\.0\.0\.0:7070: would be plaintext .*--tls-cert"):
            kind(address="0.0.0.0:7070")
        assert kind(address="0.0.0.0:7070", allow_plaintext=True)
        assert kind(address="0.0.0.0:7070", tls_cert=__file__, tls_key=__file__)

    @pytest.mark.parametrize("name", ["verify_address", "draft_address"])
    def test_a_coordinator_refuses_peers_beyond_this_machine(self, name: str) -> None:
        flag = "--" + name.replace("_", "-")
        peer: dict[str, Any] = {name: "10.0.0.2:7072"}
        with pytest.raises(ConfigError, match=f"{flag} 10.0.0.2:7072: would be plaintext .*--peer-ca"):
            CoordinatorConfig(**peer)
        assert CoordinatorConfig(**peer, allow_plaintext=True)
        assert CoordinatorConfig(**peer, peer_ca=__file__)

    def test_a_client_keeps_its_token_from_the_network(self) -> None:
        """Whether it is the client's or that of one call."""
        with Client("127.0.0.1:1,10.0.0.1:7070") as client:
            for call in (
                lambda: Client("10.0.0.1:7070", token="sw_secret"),
                lambda: client.get_model_info(token="sw_secret"),
                lambda: client.generate("x", token="sw_secret"),
                client.stream("x", token="sw_secret").__enter__,
            ):
                with pytest.raises(InvalidRequestError, match=r"is not sent to 10\.0\.0\.1:7070") as refused:
                    call()
                assert "sw_secret" not in str(refused.value)
        with pytest.raises(InvalidRequestError, match=r"token=.*: is not printable ASCII text"):
            Client("127.0.0.1:7070", token="a\nb")
        for options in ({"allow_plaintext": True}, {"tls": TLS()}):
            Client("10.0.0.1:7070", token="sw_secret", **options).close()

    def test_files_are_looked_at_when_a_client_is_made(self, tmp_path: Path, keys: Keys) -> None:
        empty = tmp_path / "empty.pem"
        empty.write_text("")
        for tls, problem in [
            ({"ca": str(tmp_path / "none.pem")}, "cannot be read"),
            ({"ca": str(empty)}, "holds no PEM certificates"),
            ({"cert": keys.client.cert, "key": keys.server.key}, "are not a PEM certificate and its"),
        ]:
            with pytest.raises(ConfigError, match=problem):
                Client("localhost:7070", tls=TLS(**tls))
        with pytest.raises(ConfigError, match="together"):
            TLS(cert=keys.client.cert)

    @pytest.mark.parametrize("main", [coordinator_main, draft_main, verify_main])
    def test_a_service_refuses_files_before_it_loads_a_model(
        self, main: Any, tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bad = tmp_path / "bad"
        bad.write_text("bad")
        cert, key = keys.server
        for words, problem in [
            (["--tokens", str(bad)], f"tokens file {bad}, line 1: is not JSON"),
            (["--tls-cert", cert, "--tls-key", str(bad)], "are not a PEM certificate and its private key"),
            (["--tls-cert", cert, "--tls-key", key, "--tls-client-ca", str(bad)], "holds no PEM"),
        ]:
            assert main(words) == 2
            assert problem in capsys.readouterr().err

    def test_nothing_to_show_is_a_plain_channel(self) -> None:
        assert PLAINTEXT.none
        assert "secret" not in repr(Credentials(token="secret"))
