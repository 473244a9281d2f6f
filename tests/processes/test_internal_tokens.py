"""`specwire up --tokens`: the model services on loopback are no way around the coordinator's tokens."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from specwire import Client, Rule, SamplingParams, UnauthenticatedError
from specwire.cli import main as cli
from specwire.cli.process import Service
from specwire.cli.supervisor import Stack
from specwire.config.security.bearer import make_token
from specwire.config.stack import UpConfig
from tests.support.harness import handshake
from tests.support.refusals import our_errors

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(max_tokens=30, seed=1, rule=Rule.GUMBEL)


@pytest.fixture(scope="module")
def token() -> tuple[str, str]:
    """And its line."""
    return make_token("alice")


@pytest.fixture(scope="module")
def stack(token: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """With all that `up` can put beside or between the services."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(token[1])
    config = UpConfig(
        target="emulated:step_ms=1",
        draft="emulated:step_ms=0.2,alpha=0.8",
        address="127.0.0.1:0",
        tokens=str(tokens),
        replicas=2,
        draft_rtt_ms=2.0,
        metrics_address="127.0.0.1:0",
        num_draft_tokens="4",
        grace_s=0.0,
    )
    with Stack(config) as running:
        yield running


def model_services(stack: Stack) -> list[tuple[str, Service]]:
    """With their roles."""
    assert stack.draft is not None
    return [("draft", stack.draft), *(("verify", each) for each in stack.verifies)]


def test_who_has_a_clients_token_is_served_with_all_that_is_there(
    stack: Stack, token: tuple[str, str]
) -> None:
    with Client(stack.address, token=token[0]) as client:
        done = client.generate(params=PARAMS, prompt_token_ids=[1, 2, 3])
        assert len(done.token_ids) == 30
        assert done.speculation.num_draft_tokens > 0
        assert not done.speculation.draft_unavailable
        assert [replica.unavailable for replica in client.get_status().verify_replicas] == ["", ""]


def test_model_services_serve_the_coordinator_only(stack: Stack, token: tuple[str, str]) -> None:
    for shown in ((), (("authorization", f"Bearer {token[0]}"),)):
        for role, service in model_services(stack):
            with pytest.raises(UnauthenticatedError), our_errors():
                handshake(role, service.address, shown)
            assert cli.main(["health", "--server", service.address]) == 0, "probes have none"


def unnamed_files(service: Service) -> dict[str, str]:
    """Contents of those that a process holds, by path; they must be its user's alone."""
    found = {}
    for path in Path(f"/proc/{service.process.pid}/fd").iterdir():
        state = path.stat()
        if stat.S_ISREG(state.st_mode) and not state.st_nlink:
            assert (stat.S_IMODE(state.st_mode), state.st_uid) == (0o600, os.getuid())
            found[f"/dev/fd/{path.name}"] = path.read_text()
    return found


def test_the_token_is_in_files_without_a_name_and_nowhere_else(stack: Stack) -> None:
    """So that nothing of it is left however the processes end."""
    [internal] = unnamed_files(stack.coordinator).values()
    assert internal.startswith("sw_")
    for _, service in model_services(stack):
        [line] = unnamed_files(service).values()
        assert "sha256" in line
        assert internal not in line
    for service in stack.services:
        process = Path(f"/proc/{service.process.pid}")
        told = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        assert internal.encode() not in told
