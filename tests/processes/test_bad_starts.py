"""What cannot be started is refused in one line, before what models need is imported: that takes seconds."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from specwire import embedded
from tests.support.processes import ROOT


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, with weights and a tokenizer of which one token is another."""
    directory = tmp_path_factory.mktemp("models") / "stranger"
    shutil.copytree(embedded.DRAFT_DIR, directory)
    text = (directory / "tokenizer.json").read_text()
    found = json.loads(text)
    found["added_tokens"].append(found["added_tokens"][0] | {"id": 2048, "content": "<strange>"})
    (directory / "tokenizer.json").write_text(json.dumps(found))
    return directory


def refused(*argv: str, **environ: str) -> str:
    """The one line that a command says before it ends with status 2.

    Python says besides what it and its children import.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SPECWIRE_", "HF_"))}
    command = subprocess.run(
        [sys.executable, "-m", "specwire.cli", *argv],
        cwd=ROOT,
        env=clean | environ | {"PYTHONPROFILEIMPORTTIME": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = command.stderr.splitlines(keepends=True)
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    said = "".join(line for line in lines if not line.startswith("import time:"))
    assert command.returncode == 2, said
    assert re.fullmatch(r"error: .+\n", said), said
    assert "specwire.cli" in imported
    assert "transformers.modeling_utils" not in imported
    assert "torch" not in imported or any("emulated:" in word for word in argv)
    return said


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["up", "--address", "127.0.0.1:7999", "--http-address", "127.0.0.1:7999"],
            "--http-address 127.0.0.1:7999: is taken by --address",
        ),
        (["up", "--target", "embeded"], "--target embeded: no such model directory; did you mean embedded?"),
        (["up", "--draft", "ngrm"], "--draft ngrm: no such model directory; did you mean ngram?"),
        (["up", "--dtype", "bfloat61"], "did you mean bfloat16?"),
        (["up", "--device", "gpu"], "--device gpu: is neither cpu nor cuda nor cuda:N"),
        (["demo", "--num-kv-tokens", "9" * 12], f"--num-kv-tokens {'9' * 12}: the KV cache takes"),
        (
            ["serve", "emulated:ms=1", "--draft", "none", "--address", "127.0.0.1:0", "--port", "0"],
            "error: MODEL emulated:ms=1: 'ms=1' is not one of",  # by the verify service
        ),
        (["verify", "--num-kv-tokens", "9" * 12], f"--num-kv-tokens {'9' * 12}: the KV cache takes"),
    ],
)
def test_what_is_misspelt_or_too_much(argv: list[str], said: str) -> None:
    assert said in refused(*argv)


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    for argv in (["up", "--draft", "none", "--target"], ["verify", "--model"]):
        said = refused(*argv, str(tmp_path))
        assert f"{argv[-1]} {tmp_path}: no config.json in this directory; give the one" in said


def test_quantised_weights_without_their_package(tmp_path: Path) -> None:
    """Neither weights nor tokenizer are read before: there are none."""
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = refused("up", "--address", "127.0.0.1:0", "--draft", "none", "--target", str(tmp_path))
    assert (
        f"--target {tmp_path}: its weights are quantised by gptq, which transformers cannot read here" in said
    )
    assert re.search(r"pip install gptqmodel optimum, or give one that is not quantised$", said)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a CUDA device")
def test_cuda_without_a_device() -> None:
    for argv in (["up", "--draft-device"], ["draft", "--device"]):
        said = refused(*argv, "cuda")
        assert re.search(rf"{argv[-1]} cuda: (torch is built for the CPU only|there is no CUDA device)", said)


def test_a_draft_with_another_tokenizer(stranger: Path) -> None:
    target = str(embedded.TARGET_DIR)
    said = refused("up", "--address", "127.0.0.1:0", "--target", target, "--draft", str(stranger))
    assert f"--draft {stranger}: its tokenizer is not that of --target {target}; give a draft" in said


def test_weights_that_are_cut_short(stranger: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(stranger, tmp_path / "short")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    said = refused("draft", "--address", "127.0.0.1:0", "--model", str(directory))
    assert f"--model {directory}: model.safetensors is cut short: " in said


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that has no models, and says so as the real one does."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        status = 401 if "private" in self.path else 404
        self.send_response(status)
        self.send_header("x-error-code", "RepoNotFound")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class TestHub:
    """A model of the hub: it is asked once, with a short timeout."""

    @staticmethod
    def up(source: str, cache: Path, **environ: str) -> str:
        return refused("up", "--draft", "none", "--target", source, HF_HOME=str(cache), **environ)

    def test_without_a_network(self, tmp_path: Path) -> None:
        said = self.up("some/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:1")
        assert "--target some/model: is no directory, and cannot be taken from the hub: http" in said
        assert "cannot be reached" in said

    @pytest.mark.slow
    def test_that_has_no_such_model(self, tmp_path: Path, hub: str) -> None:
        Hub.asked.clear()
        assert "there is no such model" in self.up("some/model", tmp_path, HF_ENDPOINT=hub)
        assert "set HF_TOKEN" in self.up("some/private", tmp_path, HF_ENDPOINT=hub)
        assert len(Hub.asked) == 2

    @pytest.mark.slow
    def test_offline(self, tmp_path: Path) -> None:
        assert "HF_HUB_OFFLINE is set" in self.up("some/model", tmp_path, HF_HUB_OFFLINE="1")

    @pytest.mark.slow
    def test_that_never_answers(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
            assert "cannot be reached" in self.up("some/model", tmp_path, HF_ENDPOINT=endpoint)
