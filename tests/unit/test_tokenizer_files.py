"""A tokenizer's files on their way to another machine: equal to local ones, bounded, verified, data only."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

import pytest

from specwire.core import ModelInfo
from specwire.embedded import TARGET_DIR
from specwire.errors import HandshakeError, ModelLoadError
from specwire.rpc.wire import tokenizer_files
from specwire.rpc.wire.tokenizer_files import MAX_BYTES, TokenizerFiles, fetch
from specwire.text import tokenizer
from specwire.v1 import common_pb2

CONVERSATION = [{"role": "user", "content": "hello"}]
TEXTS = ("def fibonacci(n):\n    return", "żółw 龟 🐢\r\n\t", "<|endoftext|>")


def announced(files: TokenizerFiles) -> ModelInfo:
    return ModelInfo(
        name="target",
        vocab_size=8,
        context_len=8,
        tokenizer_source="target",
        tokenizer_hash=files.hash,
        tokenizer_bytes=len(files.data),
    )


def of(**contents: bytes) -> TokenizerFiles:
    files = [common_pb2.TokenizerFile(name=name, content=content) for name, content in contents.items()]
    return TokenizerFiles(common_pb2.TokenizerFiles(files=files).SerializeToString())


async def received(info: ModelInfo, files: TokenizerFiles) -> TokenizerFiles:
    async def page(offset: int) -> bytes:
        return files.page(offset)

    return await fetch(info, page)


async def test_what_is_received_is_what_local_files_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several pages, with a template for tools, beside code and weights, which are not sent."""
    monkeypatch.setattr(tokenizer_files, "PAGE_BYTES", 10_000)
    directory = tmp_path / "model"
    shutil.copytree(TARGET_DIR, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}{{ messages }}")
    (directory / "tokenization_evil.py").write_text("raise SystemExit")
    files = tokenizer_files.read(directory)
    assert b"SystemExit" not in files.data
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    here, there = tokenizer.load(directory), (await received(announced(files), files)).load("target")
    assert here is not None
    assert there is not None
    assert list((tmp_path / "temporary").iterdir()) == [], "nothing is left"
    for text in TEXTS:
        token_ids = here.encode(text)
        assert there.encode(text) == token_ids
        assert there.decode(token_ids) == here.decode(token_ids)
    assert there.apply_chat_template(CONVERSATION) == here.apply_chat_template(CONVERSATION)
    for name in ("fingerprint", "special_ids", "added_ids", "eos_id", "tool_template", "vocab_size"):
        assert getattr(there, name) == getattr(here, name), name


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokenizer_bytes": MAX_BYTES + 1}, r"has files of 64\.0 MiB, and 64 MiB are taken"),
        (
            {"tokenizer_hash": "0" * 64},
            "was received as [0-9]+ bytes with .*, and [0-9]+ with 0{64} were announced",
        ),
        ({"tokenizer_bytes": 3}, "was received as [0-9]+ bytes with .*, and 3 with"),
        ({"tokenizer_hash": ""}, "is not sent by a service of that version"),
    ],
)
async def test_what_cannot_be_used_is_refused_by_name(change: dict[str, object], problem: str) -> None:
    files = tokenizer_files.read(TARGET_DIR)
    info = dataclasses.replace(announced(files), **change)  # type: ignore[arg-type]
    with pytest.raises(HandshakeError, match=rf"the tokenizer of target {problem}.*--tokenizer"):
        await received(info, files)


async def test_a_sender_without_an_end_is_left() -> None:
    """It announces few bytes, and sends as many as it is asked for."""
    files = of(**{"tokenizer.json": b"{}"})

    async def page(offset: int) -> bytes:
        return b"x" * tokenizer_files.PAGE_BYTES

    with pytest.raises(HandshakeError, match="SHA-256"):
        await fetch(announced(files), page)


@pytest.mark.parametrize(
    "name", ["../tokenizer.json", "/tmp/tokenizer.json", "model.py", "additional_chat_templates/../x"]
)
def test_other_files_are_not_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ModelLoadError, match="which none has"):
        of(**{name: b"x"}).load("target")
    assert list(tmp_path.iterdir()) == []


def test_bad_files_are_named() -> None:
    with pytest.raises(ModelLoadError, match="the tokenizer of target cannot be loaded"):
        of(**{"tokenizer.json": b"{"}).load("target")
    with pytest.raises(ModelLoadError, match="no message of that type"):
        TokenizerFiles(b"\xff").load("target")


def test_no_place_for_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(ModelLoadError, match=r"cannot be written to /nonexistent .*TMPDIR"):
        of(**{"tokenizer.json": b"{}"}).load("target")


async def test_a_model_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    files = tokenizer_files.read(tmp_path)
    assert files.hash == ""
    assert (await received(ModelInfo(name="t", vocab_size=8, context_len=8), files)).load("t") is None
