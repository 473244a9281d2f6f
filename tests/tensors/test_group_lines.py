"""How the ranks of a group reach their driver while strangers call as well."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from specwire.engine.group import control
from specwire.engine.measuring import measure
from specwire.engine.model.runner import ModelRunner
from tests.support.fixtures import entered
from tests.support.tiny_models import model_of

HOST = "127.0.0.1"


lines = entered(lambda: closing(control.DriverConnections(HOST)), scope="function")


def call(lines: control.DriverConnections) -> socket.socket:
    return socket.create_connection((HOST, lines.port), 5.0)


def has_hung_up(line: socket.socket) -> bool:
    """Within ten seconds."""
    line.settimeout(10.0)
    try:
        return line.recv(1) == b""
    except ConnectionError:
        return True


def test_silent_strangers_delay_no_rank(lines: control.DriverConnections) -> None:
    """Five seconds each, one after the other, without this."""
    strangers = [call(lines) for _ in range(3)]
    strangers[0].sendall(lines.token[:-1])  # and not a byte more
    ranks = [control.RankConnection(HOST, lines.port, lines.token, rank, 5.0) for rank in (1, 0)]
    started_s = time.monotonic()
    lines.accept(2, 30.0, 5.0)
    assert time.monotonic() - started_s < 2.0
    lines.send(b"go")
    assert [rank.receive() for rank in ranks] == [b"go", b"go"]
    assert all(has_hung_up(stranger) for stranger in strangers)


def test_a_flood_of_strangers_leaves_room_for_ranks_that_are_not_waited_for_yet(
    lines: control.DriverConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks call before they load; more strangers than a backlog holds come before and after them."""
    monkeypatch.setattr(control, "_MAX_UNAUTHENTICATED", 16)
    strangers = [call(lines) for _ in range(200)]
    ranks = [control.RankConnection(HOST, lines.port, lines.token, rank, 5.0) for rank in (0, 1)]
    strangers += [call(lines) for _ in range(200)]
    assert all(has_hung_up(stranger) for stranger in strangers[:100]), (
        "no more than a few are heard at a time"
    )
    lines.accept(2, 30.0, 5.0)
    lines.send(b"go")
    assert [rank.receive() for rank in ranks] == [b"go", b"go"]


def test_a_stranger_has_so_long_and_no_longer(
    lines: control.DriverConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HANDSHAKE_S", 0.05)
    assert has_hung_up(call(lines))


def test_waiting_ends_with_its_time_and_with_the_group(lines: control.DriverConnections) -> None:
    with pytest.raises(TimeoutError, match="0 of 2 ranks have called"):
        lines.accept(2, 0.05, 5.0)
    control.RankConnection(HOST, lines.port, lines.token, 0, 5.0)
    ending = threading.Timer(0.1, lines.abort)
    ending.start()
    with pytest.raises(ConnectionError):
        lines.accept(2, 30.0, 5.0)
    ending.join()


def test_what_a_measurement_has_ranks_do_can_be_sent_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which goes to them pickled, and a function inside of another one cannot."""
    runner, sent = ModelRunner(model_of("llama"), num_pages=512, page_size=4), []

    def run(feeds: Any, *question_and_function: Any) -> None:
        sent.append(pickle.dumps(question_and_function))

    monkeypatch.setattr(runner, "run", run)
    measure(runner)
    assert sent
