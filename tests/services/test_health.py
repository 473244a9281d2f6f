"""`specwire health`, against services that run."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from draft_service.service import serving
from specwire.cli import main as cli
from specwire.config.services import DraftConfig
from tests.support.certificates import Authority
from tests.support.harness import LOOPBACK, LoopThread

MODEL = "emulated:step_ms=1,alpha=0.8"
SERVICE = "specwire.v1.DraftService"


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


def test_healthy(loop: LoopThread, capsys: pytest.CaptureFixture[str]) -> None:
    with loop.entered(lambda: serving(DraftConfig(address=LOOPBACK, model=MODEL))) as address:
        assert cli.main(["health", "--server", address, "--service", SERVICE]) == 0
        assert capsys.readouterr().out == "SERVING\n"
        assert cli.main(["health", "--server", address]) == 0
        assert cli.main(["health", "--server", address, "--service", "specwire.v1.Nobody"]) == 1
        assert "NOT_FOUND" in capsys.readouterr().err


def test_no_server(free_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["health", "--server", free_address, "--timeout-s", "2"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.fixture
def free_address() -> Iterator[str]:
    """Bound and not listened to, so that connections to it are refused and no other process gets it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_behind_mutual_tls(loop: LoopThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the probes of k8s/components/tls ask."""
    authority = Authority(tmp_path)
    pair = authority.pair("draft", "specwire-peer")
    config = DraftConfig(
        address=LOOPBACK, model=MODEL, tls_cert=pair.cert, tls_key=pair.key, tls_client_ca=authority.path
    )
    with loop.entered(lambda: serving(config)) as address:
        ask = ["health", "--server", address, "--service", SERVICE, "--timeout-s", "5"]
        trusting = [*ask, "--tls-ca", authority.path, "--server-name", "specwire-peer"]
        assert cli.main([*trusting, "--client-cert", pair.cert, "--client-key", pair.key]) == 0
        assert capsys.readouterr().out == "SERVING\n"
        assert cli.main(trusting) == 1, "without a certificate"
        assert cli.main(ask) == 1, "in plaintext"
