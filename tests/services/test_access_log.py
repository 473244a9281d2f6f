"""The HTTP front's access log: one record a request, without texts, query or address."""

from __future__ import annotations

import logging
import socket
import time
import urllib.error
import urllib.request

import pytest

from specwire.http.access import address_kind
from tests.support.fixtures import entered
from tests.support.fronts import Fronted, fronted
from tests.support.processes import wait_until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
running = entered(lambda: fronted("emulated:step_ms=20"))


def entries(caplog: pytest.LogCaptureFixture, count: int) -> list[dict[str, object]]:
    """The records, as soon as there are so many: a client has its response a moment before.

    What the front was asked while it started may be among them, late.
    """

    def found() -> list[dict[str, object]]:
        records = [vars(record) for record in caplog.records if record.name == "specwire.http.access"]
        return [record for record in records if record["path"] != "/v1/models"]

    deadline = time.monotonic() + 30
    while len(found()) < count:
        assert time.monotonic() < deadline, found()
        time.sleep(0.01)
    return found()


def ask(front: Fronted, path: str, body: bytes | None = None, **headers: str) -> int:
    request = urllib.request.Request(f"http://{front.address}{path}", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(("flags", "trace_id"), [("01", TRACE), ("00", None)])
def test_a_response(
    running: Fronted, caplog: pytest.LogCaptureFixture, flags: str, trace_id: str | None
) -> None:
    caplog.set_level(logging.INFO, "specwire.http.access")
    body = b'{"model": "m", "prompt": [7, 8], "max_tokens": 4}'
    traceparent = f"00-{TRACE}-{SPAN}-{flags}"
    status = ask(
        running,
        "/v1/completions?secret=1",
        body,
        **{"content-type": "application/json", "traceparent": traceparent, "x-request-id": "mine"},
    )
    [entry] = entries(caplog, 1)
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/v1/completions", status)
    assert (entry["request_id"], entry.get("trace_id")) == ("mine", trace_id), (
        "an unsampled one leads nowhere"
    )
    assert entry["client"] == "loopback"
    assert "secret" not in str(entry)


def test_a_path_stays_on_its_line_and_short(running: Fronted, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specwire.http.access")
    assert ask(running, "/v1/models/a%0Ab" + "x" * 1000) == 404
    [entry] = entries(caplog, 1)
    assert str(entry["path"]).startswith("/v1/models/a%0Abxxx")
    assert len(str(entry["path"])) == 256


def test_who_leaves_before_the_response_has_499(running: Fronted, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specwire.http.access")
    host, port = running.address.split(":")
    body = b'{"model": "emulated:step_ms=20", "prompt": [7, 8], "max_tokens": 4000}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: running.stack.status("verify").num_sequences == 1, 30)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    [entry] = entries(caplog, 1)
    assert (entry["status"], entry["bytes"]) == (499, 0)


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("10.1.2.3", "private"),
        ("fe80::1", "private"),
        ("8.8.8.8", "public"),
        ("testclient", "unknown"),
        ("", "unknown"),
    ],
)
def test_kinds_of_addresses(host: str, kind: str) -> None:
    assert address_kind(host) == kind
