"""Whether the token ids of draft and target mean the same, by their files."""

from __future__ import annotations

from pathlib import Path

from specwire.config.preflight.models import Files
from specwire.errors import ConfigError, ModelLoadError
from specwire.text import tokenizer

_FILE = "tokenizer.json"
_FLAG = """--speculative-config '{"method": "draft_model", "use_heterogeneous_vocab": true}'"""


def check(target: Files, draft: Files) -> None:
    """Refuse a draft that the coordinator would refuse when both are loaded; ConfigError says what to do."""
    what, beside = f"{draft.model.given}: ", target.model.given
    pair = (target, draft)
    is_encoder = [bool(files.config.get("is_encoder_decoder")) for files in pair]
    if is_encoder[0] != is_encoder[1]:
        one = "it" if is_encoder[1] else beside
        raise ConfigError(f"{what}does not fit {beside}: {one} is an encoder-decoder, and the other is not")
    if _bytes(target.directory) == _bytes(draft.directory) != b"":
        return
    tokenizers = [_fingerprint(files.directory) for files in pair]
    sizes = [int(files.config.get("vocab_size") or 0) for files in pair]
    if all(tokenizers) and tokenizers[0] != tokenizers[1]:
        raise ConfigError(
            f"{what}its tokenizer is not that of {beside}; give a draft of the same family, or {_FLAG}"
        )
    if not all(tokenizers) and all(sizes) and sizes[0] != sizes[1]:
        raise ConfigError(
            f"{what}its vocabulary has {sizes[1]} tokens, and that of {beside} {sizes[0]}; "
            "give a draft of the same family"
        )


def _bytes(directory: Path) -> bytes:
    path = directory / _FILE
    return path.read_bytes() if path.is_file() else b""


def _fingerprint(directory: Path) -> str:
    """Of its tokenizer; empty where it has none, or one that takes torch to be read."""
    if not (directory / _FILE).is_file():
        return ""
    try:
        loaded = tokenizer.load(str(directory))
    except ModelLoadError:
        return ""
    return loaded.fingerprint if loaded else ""
