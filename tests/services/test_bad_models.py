"""Services that cannot start, and pairs that do not fit, are refused with the reason.

Models that cannot be loaded: `tensors/test_loading`.
"""

from __future__ import annotations

import socket
from pathlib import Path

import verify_service.service
from specwire import ConfigError, HandshakeError
from specwire.config.services import VerifyConfig
from tests.support import texts
from tests.support.harness import local_stack, on_own_loop
from tests.support.pairs import save_target
from tests.support.refusals import refused


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = VerifyConfig(model="emulated:step_ms=0", address=address)
        with (
            refused(ConfigError, f"--address {address}", "in use"),
            on_own_loop(lambda: verify_service.service.serving(config)),
        ):
            pass


def test_a_pair_with_different_tokenizers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_target(tmp_path / "stranger", vocab_size=texts.VOCAB_SIZE)
    texts.build_tokenizer(["entirely other words, so other merges\n"]).save_pretrained(other)
    with (
        refused(HandshakeError, "'target'", "'stranger'", "different tokenizers"),
        local_stack(pair[0], other),
    ):
        pass
