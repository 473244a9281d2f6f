"""What a client of the HTTP front cannot do to the others: by bodies, connections, hosts, not reading."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette

from specwire.config.client import HttpConfig
from specwire.config.security.bearer import make_token
from specwire.errors import UnauthenticatedError
from specwire.http import connections, entry, model, server
from specwire.http.errors import ApiError
from specwire.http.model import AnswerCache
from specwire.http.origins import Origins
from tests.support.certificates import Authority
from tests.support.fixtures import entered
from tests.support.fronts import Fronted, front, fronted
from tests.support.harness import LocalStack, local_stack
from tests.support.processes import wait_until

MB = 1 << 20
COMPLETIONS = "/v1/completions"
LAST_CHUNK = b"0\r\n\r\n"
here = entered(lambda: fronted("emulated:step_ms=1"))
quick = entered(lambda: local_stack("emulated:step_ms=0,token_us=0"))
"""Makes tokens faster than they are read."""


@pytest.fixture(scope="module")
def token_line() -> tuple[str, str]:
    return make_token("alice")


@pytest.fixture(scope="module")
def locked(token_line: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A front whose coordinator asks for tokens."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(token_line[1] + "\n")
    with (
        local_stack("emulated:step_ms=1", coordinator_options={"tokens": str(tokens)}) as stack,
        front(stack.address, model_name="m") as address,
    ):
        yield address


@contextlib.contextmanager
def connected(address: str, **options: int) -> Iterator[socket.socket]:
    """A plain connection, on which 20 s are long."""
    host, _, port = address.partition(":")
    with socket.socket() as connection:
        for name, value in options.items():
            connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        connection.settimeout(20)
        connection.connect((host, int(port)))
        yield connection


def head(length: int, *lines: str) -> bytes:
    fixed = [f"POST {COMPLETIONS} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*fixed, f"Content-Length: {length}", *lines, "", ""]).encode()


def request(**fields: Any) -> bytes:
    data = json.dumps({"model": "m", "prompt": [1, 2], "max_tokens": 4} | fields).encode()
    return head(len(data)) + data


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side ends."""
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            data += part
    return bytes(data)


class TestTokenFirst:
    @pytest.mark.parametrize(
        "lines", [[], ["Authorization: Bearer wrong"], [f"Authorization: Bearer {'x' * 5000}"]]
    )
    def test_a_body_without_a_known_token_is_not_waited_for(self, locked: str, lines: list[str]) -> None:
        with connected(locked) as connection:
            connection.sendall(head(8 * MB - 1, *lines))
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401 ")

    def test_one_that_is_sent_all_the_same_is_refused_and_the_connection_goes_on(
        self, locked: str, token_line: tuple[str, str]
    ) -> None:
        data = b'{"prompt":[' + b"{}," * (MB // 3) + b"{}]}"
        with httpx2.Client(base_url=f"http://{locked}", timeout=20) as http:
            refused = http.post(COMPLETIONS, content=data, headers={"content-type": "application/json"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            headers = {"authorization": f"Bearer {token_line[0]}"}
            assert http.get("/v1/models", headers=headers).json()["data"][0]["id"] == "m"

    async def test_requests_with_one_token_ask_once(self) -> None:
        asked = []
        may_answer = asyncio.Event()

        async def ask(token: str) -> str:
            asked.append(token)
            await may_answer.wait()
            if token == "wrong":
                raise UnauthenticatedError("no")
            return token.upper()

        answers = AnswerCache(ask)
        waiting = [asyncio.create_task(answers.get(token)) for token in ("a", "a", "wrong", "wrong", "a")]
        await asyncio.sleep(0)
        waiting[0].cancel()  # the others still get their answer
        may_answer.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results[:1]] == [asyncio.CancelledError]
        assert (results[1], results[4], str(results[2]), str(results[3])) == ("A", "A", "no", "no")
        assert asked == ["a", "wrong"]

    async def test_a_flood_of_tokens_is_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model, "_MAX_ANSWERS", 10)

        async def ask(token: str) -> str:
            return token

        answers = AnswerCache(ask)
        for token in map(str, range(100)):
            assert await answers.get(token) == token
        assert len(answers._asked) == 10


class TestBodies:
    def test_bombs_are_refused_before_they_are_complete(self, here: Fronted) -> None:
        with connected(here.address) as connection:
            connection.sendall(head(8 * MB) + b'{"model":"m","prompt":[' + b"{}," * MB)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")

    @pytest.mark.parametrize(
        ("fields", "param", "code"),
        [
            ('"prompt":"' + "a" * (MB + 1) + '"', "prompt", "invalid_value"),
            ('"prompt":["' + "a" * MB + '"],"n":9', "n", "invalid_value"),
            ('"prompt":[' + "9" * MB + "]", None, "invalid_json"),
            ('"prompt":[1],"seed":' + "9" * 4000, "seed", "invalid_value"),
            ('"prompt":[1],"temperature":' + "9" * 400, "temperature", "invalid_value"),
            (
                '"prompt":[1],"logit_bias":{"' + "9" * 5000 + '":1}',
                "logit_bias['" + "9" * 20 + "']",
                "invalid_value",
            ),
            ('"prompt":[1],"logit_bias":{"1":' + "9" * 400 + "}", "logit_bias[1]", "invalid_value"),
            ('"prompt":"\\ud800"', None, "invalid_json"),
        ],
        ids=range(8),
    )
    def test_what_is_too_long_is_named(
        self, here: Fronted, fields: str, param: str | None, code: str
    ) -> None:
        response = httpx2.post(
            here.url + COMPLETIONS,
            content=f'{{"model":{json.dumps(here.model)},{fields}}}',
            headers={"content-type": "application/json"},
            timeout=20,
        )
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, code)
        assert len(response.content) < 1000

    @pytest.mark.parametrize(
        ("length", "options"), [(8 * MB + 1, {}), (10**18, {}), (1001, {"max_body_bytes": 1000})]
    )
    def test_the_announced_length_is_enough(
        self, here: Fronted, length: int, options: dict[str, int]
    ) -> None:
        with front(here.stack.address, **options) as address, connected(address) as connection:
            connection.sendall(head(length))
            answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 413 ")

    def test_prompts_count_once_a_choice(self, here: Fronted) -> None:
        cases = (
            ({"prompt": "x" * 40_000, "n": 128}, 400, "prompt"),  # so many fit, but this model has no text
            ({"prompt": [1] * 20_000, "n": 128}, 400, "n"),
        )
        for fields, status, param in cases:
            response = httpx2.post(
                here.url + COMPLETIONS, json={"model": here.model, "max_tokens": 1} | fields, timeout=20
            )
            assert (response.status_code, response.json()["error"]["param"]) == (status, param)

    def test_a_body_that_does_not_come_in_time(self, here: Fronted, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(entry, "_READ_S", 0.2)
        with connected(here.address) as connection:
            connection.sendall(head(100) + b"{")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")

    def test_large_ones_wait_for_each_other_and_small_ones_do_not(
        self, here: Fronted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with contextlib.ExitStack() as stack, front(here.stack.address, model_name="m") as address:
            for _ in range(entry._NUM_LARGE):
                connection = stack.enter_context(connected(address))
                connection.sendall(head(MB) + b"{")
            before = stack.enter_context(connected(address))
            before.sendall(request())
            # The heads sent before it are read by now.
            assert before.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            large = stack.enter_context(connected(address))
            large.sendall(request(user="x" * 100_000))
            small = stack.enter_context(connected(address))
            small.sendall(request())
            assert small.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            large.settimeout(0.3)
            with pytest.raises(TimeoutError):
                large.recv(1 << 16)
            connection.close()
            large.settimeout(20)
            assert large.recv(1 << 16).startswith(b"HTTP/1.1 200 ")

    def test_a_length_beside_chunks_says_nothing(self, here: Fronted) -> None:
        """Else any number of large bodies would pass for small ones."""
        chunk = b"%x\r\n%b\r\n"
        with contextlib.ExitStack() as stack, front(here.stack.address, model_name="m") as address:
            for _ in range(entry._NUM_LARGE):
                stack.enter_context(connected(address)).sendall(head(MB) + b"{")
            before = stack.enter_context(connected(address))
            before.sendall(request())
            assert before.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            large = stack.enter_context(connected(address))
            data = json.dumps({"model": "m", "prompt": [1], "max_tokens": 1}).encode()
            large.sendall(
                head(4, "Transfer-Encoding: chunked") + chunk % (len(data), data) + chunk % (0, b"")
            )
            large.settimeout(0.3)
            with pytest.raises(TimeoutError):
                large.recv(1 << 16)

    def test_slow_ones_of_a_tenant_do_not_hold_up_those_of_others(self, tmp_path: Path) -> None:
        (alice, line), (bob, other) = make_token("alice"), make_token("bob")
        (tmp_path / "tokens").write_text(f"{line}\n{other}\n")
        options = {"tokens": str(tmp_path / "tokens")}
        with (
            local_stack("emulated:step_ms=1", coordinator_options=options) as services,
            front(services.address, model_name="m") as address,
            contextlib.ExitStack() as stack,
        ):
            for _ in range(2 * entry._NUM_LARGE):
                slow = stack.enter_context(connected(address))
                slow.sendall(head(MB, f"Authorization: Bearer {alice}") + b"{")
            data = json.dumps({"model": "m", "prompt": [1], "max_tokens": 1, "user": "x" * 100_000}).encode()
            large = stack.enter_context(connected(address))
            large.settimeout(5)
            large.sendall(head(len(data), f"Authorization: Bearer {bob}") + data)
            assert large.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def answer_to_health(connection: socket.socket) -> bytes:
    """Head and body, after which the connection is open."""
    answer = b""
    while not answer.endswith(b"}"):
        answer += connection.recv(1 << 16)
    return answer


class TestConnections:
    def test_a_request_that_is_slow_ends(self, here: Fronted, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first, whether it has begun or not, and any other. Between requests a connection is kept."""
        with connected(here.address) as kept, connected(here.address) as further:
            for connection in (kept, further):
                connection.sendall(HEALTH)
                assert answer_to_health(connection).startswith(b"HTTP/1.1 200")
            monkeypatch.setattr(connections, "_REQUEST_S", 0.2)
            with connected(here.address) as silent, connected(here.address) as first:
                for slow in (further, first):
                    slow.sendall(b"GET /health HTTP/1.1\r\n")
                assert received(silent) == received(first) == received(further) == b""
            kept.sendall(HEALTH)
            assert answer_to_health(kept).startswith(b"HTTP/1.1 200")

    def test_before_the_end_clients_are_asked_to_close(self, quick: LocalStack) -> None:
        """None is closed while its client may be sending a request."""
        with (
            ThreadPoolExecutor(1) as pool,
            contextlib.ExitStack() as running,
            contextlib.ExitStack() as clients,
        ):
            address = running.enter_context(front(quick.address, model_name="m", grace_s=30.0))
            one, two = (clients.enter_context(connected(address)) for _ in range(2))
            for connection in (one, two):
                connection.sendall(HEALTH)
                assert b"connection: close" not in answer_to_health(connection)
            ending = pool.submit(running.close)

            def is_ending() -> bool:
                with connected(address) as connection:
                    connection.sendall(HEALTH)
                    return b"\r\nconnection: close\r\n" in answer_to_health(connection)

            wait_until(is_ending, 10.0)
            for connection in (one, two):
                connection.sendall(HEALTH)
                assert b"\r\nconnection: close\r\n" in received(connection)
            ending.result(2.0)

    @pytest.mark.parametrize("fields", [{}, {"stream": True}, {"max_tokens": 100}])
    def test_a_client_that_half_closes_gets_its_answer(self, here: Fronted, fields: dict[str, Any]) -> None:
        with connected(here.address) as connection:
            connection.sendall(request(model=here.model, **fields))
            connection.shutdown(socket.SHUT_WR)
            answer = received(connection)
        assert b"HTTP/1.1 200 OK" in answer
        assert answer.endswith(b"\r\n\r\n" if fields.get("stream") else b"}")
        if fields.get("stream"):
            assert b"data: [DONE]" in answer

    def test_two_requests_before_the_end_are_both_answered(self, here: Fronted) -> None:
        with connected(here.address) as connection:
            connection.sendall(2 * request(model=here.model))
            connection.shutdown(socket.SHUT_WR)
            assert received(connection).count(b"HTTP/1.1 200 OK") == 2

    def test_line_ends_before_a_request_are_ignored(self, here: Fronted) -> None:
        with connected(here.address) as connection:
            for sent in (b"\r\n" + HEALTH, b"\r\n", HEALTH + b"\r\n", HEALTH):
                connection.sendall(sent)
                if sent.strip():
                    assert b"HTTP/1.1 200 OK" in answer_to_health(connection)

    def test_http_2_is_refused_once(self, here: Fronted) -> None:
        with connected(here.address) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1

    def test_an_offer_of_another_protocol_is_ignored(
        self, here: Fronted, caplog: pytest.LogCaptureFixture
    ) -> None:
        with connected(here.address) as connection:
            connection.sendall(HEALTH[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
            assert answer_to_health(connection).startswith(b"HTTP/1.1 200 ")
        assert "upgrade" not in caplog.text

    def test_a_target_with_a_host(self, here: Fronted) -> None:
        """As a proxy is asked; its host is the one that counts."""
        for host, status in ((b"127.0.0.1:80", b"200"), (b"evil.example", b"403")):
            with connected(here.address) as connection:
                connection.sendall(HEALTH.replace(b" /health", b" HTTP://" + host + b"/health"))
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 " + status)

    def test_a_body_that_is_not_complete_at_the_end(
        self, quick: LocalStack, caplog: pytest.LogCaptureFixture
    ) -> None:
        with contextlib.ExitStack() as running:
            address = running.enter_context(front(quick.address, model_name="m", grace_s=0.1))
            with connected(address) as connection:
                connection.sendall(request()[:-1])
                time.sleep(0.2)
                running.close()
                assert received(connection) == b""
        assert not [each for each in caplog.records if each.levelname == "ERROR"]

    def test_one_that_ends_amid_its_body_does_not(self, here: Fronted) -> None:
        with connected(here.address) as connection:
            connection.sendall(request(model=here.model)[:-1])
            connection.shutdown(socket.SHUT_WR)
            assert received(connection) == b""

    def test_the_rest_of_a_body_is_no_request(self, here: Fronted, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its connection is kept like any other."""
        monkeypatch.setattr(connections, "_REQUEST_S", 0.2)
        with connected(here.address) as connection:
            data = request(model="none")
            at = len(data) - 5
            connection.sendall(data[:at].replace(b"application/json", b"application/none"))
            assert answer_to_health(connection).startswith(b"HTTP/1.1 415 ")
            connection.sendall(data[at:])
            time.sleep(0.4)
            connection.sendall(HEALTH)
            assert answer_to_health(connection).startswith(b"HTTP/1.1 200")

    @pytest.mark.parametrize("fields", [{}, {"stream": True}])
    def test_a_line_end_behind_the_last_request_is_no_error(
        self, here: Fronted, fields: dict[str, Any]
    ) -> None:
        data = request(model=here.model, max_tokens=300, **fields)
        with connected(here.address) as connection:
            connection.sendall(data.replace(b"Host:", b"Connection: close\r\nHost:"))
            time.sleep(0.1)
            connection.sendall(b"\r\n")
            answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert answer.endswith(b"\r\n\r\n" if fields else b"}")

    def test_a_client_that_leaves_is_noticed_behind_further_data(self, here: Fronted) -> None:
        with connected(here.address) as connection:
            connection.sendall(request(model=here.model, max_tokens=20_000))
            time.sleep(0.2)
            connection.sendall(HEALTH)
            time.sleep(0.1)
        here.stack.assert_idle_within(2)

    def test_what_cannot_be_read_behind_a_refusal_ends_the_connection(
        self, here: Fronted, caplog: pytest.LogCaptureFixture
    ) -> None:
        with connected(here.address) as connection:
            data = head(4, "Transfer-Encoding: chunked").replace(b"application/json", b"none")
            connection.sendall(data)
            assert answer_to_health(connection).startswith(b"HTTP/1.1 415 ")
            connection.sendall(b"no length\r\n")
            assert received(connection) == b""
        assert not [record for record in caplog.records if record.levelname == "ERROR"]

    def test_a_client_that_does_not_begin_with_tls_ends(
        self, here: Fronted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connections, "_REQUEST_S", 0.2)
        cert, key = Authority(tmp_path).pair("server")
        with (
            front(here.stack.address, tls_cert=cert, tls_key=key) as address,
            connected(address) as silent,
        ):
            silent.settimeout(2)
            assert received(silent) == b""


class TestUnreadResponses:
    def ask(self, connection: socket.socket, num_tokens: int) -> None:
        fields = {"stream": True, "return_fates": True, "num_draft_tokens": 0, "max_tokens": num_tokens}
        connection.sendall(request(**fields))

    def test_its_connection_is_cut_and_the_generation_ends(self, quick: LocalStack) -> None:
        with (
            front(quick.address, model_name="m", idle_timeout_s=0.3) as address,
            connected(address, SO_RCVBUF=32 << 10) as connection,
        ):
            self.ask(connection, 4000)
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
            quick.assert_idle_within(20)
            answer = received(connection)
        assert b"[DONE]" not in answer
        assert b'"error"' not in answer, "an error event could not be told from the end of a text"

    def test_a_response_that_is_complete_is_still_read(
        self, quick: LocalStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is larger than what the kernels hold of it, and its client takes longer than for a request."""
        monkeypatch.setattr(server, "KEEP_ALIVE_S", 0)
        with (
            front(quick.address, model_name="m") as address,
            connected(address, SO_RCVBUF=32 << 10) as connection,
        ):
            connection.sendall(request(max_tokens=500, return_fates=True, num_draft_tokens=0, logprobs=20))
            answer = bytearray(connection.recv(1000))
            time.sleep(0.3)
            answer += received(connection)
        assert len(answer) > 250_000
        assert answer.endswith(b"}")
        assert answer.count(b'"fate":') == 500

    @pytest.mark.slow
    def test_a_slow_reader_is_left_alone(self, quick: LocalStack) -> None:
        with (
            front(quick.address, model_name="m", idle_timeout_s=1) as address,
            connected(address, SO_RCVBUF=32 << 10) as connection,
        ):
            self.ask(connection, 2000)
            answer = bytearray()
            ends_s = time.monotonic() + 2  # less than half of the answer, of some 400 bytes a token
            while time.monotonic() < ends_s:
                answer += connection.recv(8 << 10)
                time.sleep(0.03)  # 270 kB/s: the kernel has room again after some 40 kB
            assert not answer.endswith(LAST_CHUNK), "it was read too fast to be slow"
            while not answer.endswith(LAST_CHUNK):
                part = connection.recv(1 << 20)
                assert part, "it was cut off"
                answer += part
        assert answer.count(b'"fate":') == 2000


class TestOrigins:
    @pytest.mark.parametrize(
        ("address", "allowed", "host", "origin", "ok"),
        [
            ("127.0.0.1:80", "", "127.0.0.1:8080", None, True),
            ("127.0.0.1:80", "", "localhost:8080", "http://localhost:8080", True),
            ("127.0.0.1:80", "", "LOCALHOST", None, True),
            ("127.0.0.1:80", "", "[::1]:8080", "http://[::1]:8080", True),
            ("127.0.0.1:80", "", "10.1.2.3:8080", None, True),  # a probe, a forwarded port
            ("127.0.0.1:80", "", "", None, True),  # HTTP/1.0
            ("127.0.0.1:80", "", "evil.example", None, False),
            ("127.0.0.1:80", "", "evil.example:8080", "http://evil.example:8080", False),
            ("127.0.0.1:80", "", "127.0.0.1.evil.example", None, False),
            ("127.0.0.1:80", "", "127.0.0.1:8080", "http://evil.example", False),
            ("127.0.0.1:80", "", "127.0.0.1:8080", "http://127.0.0.1:9090", False),
            ("127.0.0.1:80", "", "127.0.0.1:8080", "null", False),
            ("127.0.0.1:80", "", "127.0.0.1:8080", "", False),
            ("127.0.0.1:80", "llm.example, Chat.example", "llm.example", "https://llm.example", True),
            ("127.0.0.1:80", "llm.example,Chat.example", "127.0.0.1:8080", "https://chat.example:444", True),
            ("127.0.0.1:80", "llm.example", "evil.example", None, False),
            ("127.0.0.1:80", "*", "evil.example", None, True),
            ("127.0.0.1:80", "*", "127.0.0.1", "http://evil.example", False),
            ("0.0.0.0:80", "", "llm.example", "https://llm.example", True),
            ("0.0.0.0:80", "", "llm.example", "https://evil.example", False),
            ("0.0.0.0:80", "llm.example", "evil.example", None, False),
        ],
    )
    def test_who_may(self, address: str, allowed: str, host: str, origin: str | None, ok: bool) -> None:
        config = HttpConfig(address=address, allowed_hosts=allowed, allow_plaintext=True)
        origins = Origins(Starlette(), config)
        headers = {"host": host} | ({} if origin is None else {"origin": origin})
        with contextlib.nullcontext() if ok else pytest.raises(ApiError) as refused:
            origins.check(headers)
        if refused is not None:
            assert refused.value.status == 403

    def test_every_route_is_guarded(self, here: Fronted) -> None:
        for path in ("/", "/health", "/v1/models", "/nowhere"):
            response = httpx2.get(here.url + path, headers={"host": "evil.example"})
            assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")
            assert "x-request-id" in response.headers
        response = httpx2.post(
            here.url + COMPLETIONS,
            json={"model": here.model, "prompt": [1]},
            headers={"origin": "http://evil.example"},
        )
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")


def test_a_certificate_that_is_replaced_is_served_to_new_connections(here: Fronted, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.pair("server")
    trusted = ssl.create_default_context(cafile=authority.path)

    def shown(address: str) -> tuple[int, bytes]:
        host, _, port = address.partition(":")
        with (
            socket.create_connection((host, int(port)), timeout=20) as plain,
            trusted.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            return int(connection.recv(12)[9:]), connection.getpeercert(binary_form=True) or b""

    with front(here.stack.address, tls_cert=cert, tls_key=key) as address:
        first = shown(address)
        assert first == shown(address)
        authority.pair("server")
        second = shown(address)
        assert (second[0], second[1] != first[1]) == (200, True)
        Path(cert).write_text("no certificate")
        assert shown(address) == second, "what cannot be used is not taken up"
