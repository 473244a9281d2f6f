"""What clients say, and credentials, are in no log, in no span and on no command line."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import pytest

from specwire import Client, InvalidRequestError, SamplingParams, UnauthenticatedError
from specwire.config.environment import check_environment
from specwire.config.security.bearer import make_token
from specwire.engine.group import control
from tests.support import texts
from tests.support.harness import local_stack
from tests.support.otlp_receiver import OtlpReceiver

PROMPT = "The quick brown xylophone"
STOP = "zanzibar"


def test_prompts_and_tokens_are_in_no_log_and_no_span(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    token, line = make_token("alice")
    tokens, token_file = tmp_path / "tokens", tmp_path / "token"
    tokens.write_text(line)
    token_file.write_text(token)
    options = {"tokens": str(tokens)}
    with OtlpReceiver() as receiver, caplog.at_level(logging.DEBUG):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with local_stack(
            *texts.save_pair(tmp_path / "pair"),
            verify_options=options,
            draft_options=options,
            coordinator_options=options | {"peer_token_file": str(token_file)},
        ) as stack:
            text = say_everything(stack.address, token)
    spans = receiver.spans
    assert {"generate", "draft", "verify"} <= {span.name for span in spans}
    assert caplog.records
    seen = caplog.text + str(spans) + "".join(capfd.readouterr())
    for secret in (PROMPT, "xylophone", STOP, token, token[3:], text):
        assert secret not in seen


def say_everything(address: str, token: str) -> str:
    """Served and refused requests; what was generated."""
    with Client(address, token=token) as client:
        done = client.generate(PROMPT, SamplingParams(max_tokens=30, seed=1, stop=(STOP,)))
        client.generate(params=SamplingParams(max_tokens=3), messages=[{"role": "user", "content": PROMPT}])
        with pytest.raises(InvalidRequestError):
            client.generate(PROMPT, SamplingParams(max_tokens=10**6, stop=(STOP,)))
    with Client(address, token=token + "x") as client, pytest.raises(UnauthenticatedError):
        client.generate(PROMPT)
    assert len(done.text) > 8
    return done.text


def test_a_token_under_a_misspelt_name_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    token, _ = make_token("alice")
    check_environment({"SPECWIRE_TOKEN": token})
    assert caplog.text == ""
    check_environment({"SPECWIRE_TOKENN": token})
    assert "SPECWIRE_TOKENN is not known" in caplog.text
    assert token not in caplog.text


def test_the_store_of_a_group_listens_where_its_ranks_reach_it_and_nowhere_else() -> None:
    store = control.open_store("127.0.0.1")
    listening = [each.laddr for each in psutil.Process().net_connections() if each.status == "LISTEN"]
    assert [each.ip for each in listening if each.port == store.port] == ["127.0.0.1"]
    other = control.connect_store("127.0.0.1", store.port, 5.0)
    other.set("a", "b")
    assert store.get("a") == b"b"


def test_only_who_knows_the_token_is_a_rank_of_a_group() -> None:
    lines = control.DriverConnections("127.0.0.1")
    listening = [each.laddr for each in psutil.Process().net_connections() if each.status == "LISTEN"]
    assert [each.ip for each in listening if each.port == lines.port] == ["127.0.0.1"]
    stranger = control.RankConnection("127.0.0.1", lines.port, b"?" * len(lines.token), 0, 5.0)
    ranks = [control.RankConnection("127.0.0.1", lines.port, lines.token, rank, 5.0) for rank in (1, 0)]
    lines.accept(2, 5.0, 5.0)
    with pytest.raises(ConnectionError):
        stranger.receive()
    long = bytes(range(256)) * 1000
    lines.send(long)
    assert [rank.receive() for rank in ranks] == [long, long]
    ranks[1].answer(b"")
    assert lines.receive_answer() == b""
    ranks[0].close()
    with pytest.raises(ConnectionError, match="another rank hung up"):
        lines.receive_answer()
    lines.abort()
    with pytest.raises(ConnectionError):
        ranks[1].receive()
    lines.close()
