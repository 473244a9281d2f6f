"""What is read from files, and read again when they change while the process runs."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from specwire.errors import ConfigError

log = logging.getLogger(__name__)

Value = TypeVar("Value")
_Mark = tuple[int, int, int]


class ReloadingFile(Generic[Value]):
    """A value made of files; may be shared between threads.

    Files are best replaced by renaming a new one over the old one. Several that belong together may change
    one after the other: what does not fit together is not taken up, and what was there stays in force.

    Attributes:
        value: as last read.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], Value]) -> None:
        """Read for the first time.

        Args:
            read: makes the value, or raises ConfigError.

        Raises:
            ConfigError: what `read` raises.
        """
        self._paths = paths
        self._read = read
        self._turn = threading.Lock()
        self._marks = self._look()
        self.value = read()

    def refresh(self) -> bool:
        """Read again if a file changed; True when there is a new value.

        Files that cannot be used are reported in the log, once for each change.
        """
        with self._turn:
            marks = self._look()
            if marks == self._marks:
                return False
            try:
                value = self._read()
            except ConfigError as error:
                log.error("%s; what was read before stays in force", error)
                self._marks = marks
                return False
            if self._look() != marks:  # changed while it was read: at the next call
                return False
            self._marks, self.value = marks, value
            return True

    def _look(self) -> list[_Mark | None]:
        return [_mark(path) for path in self._paths]


def _mark(path: str) -> _Mark | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino


def read_file(name: str, path: str) -> bytes:
    """The content of a file.

    Args:
        name: the flag or argument that names it.

    Raises:
        ConfigError: naming both.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path}: cannot be read ({error.strerror})") from None
