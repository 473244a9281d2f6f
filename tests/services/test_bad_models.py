"""Services that cannot start, and pairs that do not fit, are refused with the reason.

Models that cannot be loaded: `tensors/test_loading`.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import coordinator.service
import verify_service.service
from coordinator.peers import handshake
from specwire import ConfigError, HandshakeError, ServiceUnavailableError
from specwire.config.services import CoordinatorConfig, VerifyConfig
from specwire.core import PROTOCOL_VERSION
from tests.support import texts
from tests.support.harness import LoopThread, local_stack
from tests.support.pairs import save_target
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return texts.save_pair(tmp_path_factory.mktemp("pair"))


def serve(thread: LoopThread, make: Callable[[], Any]) -> contextlib.AbstractContextManager[str]:
    return thread.entered(make)


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


def test_a_port_in_use(thread: LoopThread) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = VerifyConfig(model="emulated:step_ms=0", address=address)
        with (
            refused(ConfigError, f"--address {address}", "in use"),
            serve(thread, lambda: verify_service.service.serving(config)),
        ):
            pass


class TestPairs:
    """What cannot work together is refused when the coordinator starts."""

    def test_other_versions_of_the_protocol(
        self, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No message is understood by half."""
        monkeypatch.setattr(handshake, "PROTOCOL_VERSION", PROTOCOL_VERSION - 1)
        versions = f"version {PROTOCOL_VERSION}", f"this coordinator {PROTOCOL_VERSION - 1}"
        with refused(HandshakeError, "'target'", *versions), local_stack(*pair):
            pass

    def test_different_tokenizers(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        other = save_target(tmp_path / "stranger", vocab_size=texts.VOCAB_SIZE)
        texts.build_tokenizer(["entirely other words, so other merges\n"]).save_pretrained(other)
        with (
            refused(HandshakeError, "'target'", "'stranger'", "different tokenizers"),
            local_stack(pair[0], other),
        ):
            pass

    def test_vocabularies_without_tokenizers(self, tmp_path: Path) -> None:
        target = save_target(tmp_path / "wide")
        draft_model = save_target(tmp_path / "narrow", vocab_size=90)
        with (
            refused(HandshakeError, "'wide'", "'narrow'", "97 and 90"),
            local_stack(target, draft_model),
        ):
            pass

    def test_no_verify_service(self, thread: LoopThread) -> None:
        config = CoordinatorConfig(verify_address="127.0.0.1:1", connect_timeout_s=0.3)
        with (
            refused(ServiceUnavailableError, "127.0.0.1:1", "waited 0.3 s, --connect-timeout-s"),
            serve(thread, lambda: coordinator.service.serving(config)),
        ):
            pass
