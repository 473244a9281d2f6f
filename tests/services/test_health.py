"""`specwire health`, against services that run."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from draft_service.service import serving
from specwire.cli import main as cli
from specwire.config.services import DraftConfig
from tests.support.certificates import Authority
from tests.support.harness import LOOPBACK, local_stack, on_own_loop

MODEL = "emulated:step_ms=1,alpha=0.8"


def test_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    with local_stack(MODEL, MODEL) as stack:
        addresses = {
            "Generation": stack.address,
            "Draft": stack.draft_address,
            "Verify": stack.verify_address,
        }
        for name, address in addresses.items():
            ask = ["health", "--server", address]
            assert cli.main(ask) == 0
            assert cli.main([*ask, "--service", f"specwire.v1.{name}Service"]) == 0
            assert capsys.readouterr().out == "SERVING\n" * 2
            assert cli.main([*ask, "--service", "specwire.v1.Nobody"]) == 1
            assert "NOT_FOUND" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:  # and not listened to, so that connections to it are refused
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert cli.main(["health", "--server", address, "--timeout-s", "2"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_behind_mutual_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the probes of k8s/components/tls ask."""
    authority = Authority(tmp_path)
    pair = authority.pair("draft", "specwire-peer")
    config = DraftConfig(
        address=LOOPBACK, model=MODEL, tls_cert=pair.cert, tls_key=pair.key, tls_client_ca=authority.path
    )
    with on_own_loop(lambda: serving(config)) as address:
        ask = ["health", "--server", address, "--service", "specwire.v1.DraftService", "--timeout-s", "5"]
        trusting = [*ask, "--tls-ca", authority.path, "--server-name", "specwire-peer"]
        assert cli.main([*trusting, "--client-cert", pair.cert, "--client-key", pair.key]) == 0
        assert capsys.readouterr().out == "SERVING\n"
        assert cli.main(trusting) == 1, "without a certificate"
        assert cli.main(ask) == 1, "in plaintext"
