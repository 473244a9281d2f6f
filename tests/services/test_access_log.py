"""The HTTP front's access log: one record a request, without texts, query or address."""

from __future__ import annotations

import logging
import socket

import httpx2
import pytest

from specwire.http.access import address_kind
from tests.support.fixtures import entered
from tests.support.fronts import Fronted, fronted
from tests.support.processes import wait_until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
running = entered(lambda: fronted("emulated:step_ms=20"))


def the_entry(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    """The record, as soon as there is one: a client has its response a moment before.

    What the front was asked while it started may be among them, late.
    """

    def found() -> list[dict[str, object]]:
        records = [vars(record) for record in caplog.records if record.name == "specwire.http.access"]
        return [record for record in records if record["path"] != "/v1/models"]

    wait_until(lambda: bool(found()), 30)
    [entry] = found()
    return entry


@pytest.mark.parametrize(("flags", "trace_id"), [("01", TRACE), ("00", None)])
def test_a_response(
    running: Fronted, caplog: pytest.LogCaptureFixture, flags: str, trace_id: str | None
) -> None:
    caplog.set_level(logging.INFO, "specwire.http.access")
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}", "x-request-id": "mine"}
    body = {"model": running.model, "prompt": [7, 8], "max_tokens": 4}
    assert (
        httpx2.post(f"{running.url}/v1/completions?secret=1", json=body, headers=headers).status_code == 200
    )
    entry = the_entry(caplog)
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/v1/completions", 200)
    assert (entry["request_id"], entry.get("trace_id")) == ("mine", trace_id), (
        "an unsampled one leads nowhere"
    )
    assert entry["client"] == "loopback"
    assert "secret" not in str(entry)


def test_a_path_stays_on_its_line_and_short(running: Fronted, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specwire.http.access")
    assert httpx2.get(f"{running.url}/v1/models/a%0Ab" + "x" * 1000).status_code == 404
    path = str(the_entry(caplog)["path"])
    assert path.startswith("/v1/models/a%0Abxxx")
    assert len(path) == 256


def test_who_leaves_before_the_response_has_499(running: Fronted, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specwire.http.access")
    host, port = running.address.split(":")
    body = b'{"model": "emulated:step_ms=20", "prompt": [7, 8], "max_tokens": 4000, "n": 4}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: running.stack.status("verify").num_sequences == 4, 30)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    entry = the_entry(caplog)
    assert (entry["status"], entry["bytes"]) == (499, 0)
    running.stack.assert_idle_within(10)


def test_kinds_of_addresses() -> None:
    kinds = {"127.0.0.1": "loopback", "::1": "loopback", "10.1.2.3": "private", "fe80::1": "private"}
    kinds |= {"8.8.8.8": "public", "testclient": "unknown", "": "unknown"}
    assert {host: address_kind(host) for host in kinds} == kinds
