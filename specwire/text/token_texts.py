"""What each token stands for, as bytes. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from specwire.errors import UnsupportedError
from specwire.text.tokenizer import Tokenizer


def token_texts(tokenizer: Tokenizer) -> list[bytes | None]:
    """The bytes of each token, by id; None for special tokens, and for ids without a token.

    Known are the two kinds that language models have: byte-level tokenizers, which write each byte as one
    character of an alphabet, and SentencePiece, which writes `▁` for a space and `<0x41>` for a byte.

    Raises:
        UnsupportedError: the tokenizer is of another kind.
    """
    kinds = set(_kinds(tokenizer.decoder))
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}:
        raise UnsupportedError(
            "tokenizer", ", ".join(sorted(kinds)) or "none", "the text of its tokens is not known"
        )
    texts: list[bytes | None] = [None] * tokenizer.vocab_size
    for name, token_id in tokenizer.table.items():
        if token_id not in tokenizer.special_ids:
            is_added = token_id in tokenizer.added_ids
            texts[token_id] = name.encode() if is_added else _text(name, in_alphabet="ByteLevel" in kinds)
    return texts


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    if decoder:
        yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def _alphabet() -> dict[str, int]:
    """The character that GPT-2's byte-level tokenizers, and all after them, write for each byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _alphabet()
BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")
"""Of a token that stands for one byte of a character that has no token."""


def _text(name: str, *, in_alphabet: bool) -> bytes | None:
    if in_alphabet:
        return bytes(_BYTES[char] for char in name) if all(char in _BYTES for char in name) else None
    byte = BYTE_NAME.fullmatch(name)
    return bytes.fromhex(byte[1]) if byte else name.replace("▁", " ").encode()
