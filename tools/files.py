"""Files that commands read and write; what cannot be used is refused by its flag."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from specwire.errors import ConfigError

Result = TypeVar("Result")


def read_text(flag: str, path: str | Path) -> str:
    """The content of a UTF-8 file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({error})".lstrip()) from None


def check_place(flag: str, path: Path | None) -> None:
    """Refuse a file that cannot be written: before the work, rather than after it.

    Raises:
        ConfigError: it is a directory, or its directory does not exist.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{flag} {path}: cannot be written")


def make_directory(flag: str, path: Path) -> None:
    """Have a directory for what is made, with those above it: before the work.

    Raises:
        ConfigError: it cannot be.
    """
    write(flag, path, lambda path: path.mkdir(parents=True, exist_ok=True))


def write(flag: str, path: Path, writing: Callable[[Path], Result]) -> Result:
    """Have a file written; returns what that returns.

    Raises:
        ConfigError: it cannot be.
    """
    try:
        return writing(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written ({error.strerror})") from None
