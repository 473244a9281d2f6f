"""Texts that commands are given."""

from __future__ import annotations

from pathlib import Path

from specwire.errors import ConfigError


def read(path: str) -> str:
    """The file of `--text`.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: cannot be read ({error})") from None
