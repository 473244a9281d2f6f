"""Values read from files, and read again when the files change while the process runs."""

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
_Mark = tuple[int, int, int, int]


class ReloadingFile(Generic[Value]):
    """A value read from files; may be shared between threads.

    Files are best replaced by renaming a new one over the old one. Files that belong together may change one
    after the other: while they do not match, the previous value stays in force.

    Attributes:
        value: as last read.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], Value]) -> None:
        """Read for the first time, by `read`, which returns the value or raises ConfigError."""
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        self._marks = self._stat()
        self.value = read()

    def refresh(self) -> bool:
        """Read again if a file has changed; True if there is a new value.

        Invalid files are logged, once for each change.
        """
        with self._lock:
            marks = self._stat()
            if marks == self._marks:
                return False
            try:
                value = self._read()
            except ConfigError as error:
                log.error("%s; what was read before stays in force", error)
                self._marks = marks
                return False
            if self._stat() != marks:  # changed while it was read: retried at the next call
                return False
            self._marks, self.value = marks, value
            return True

    def _stat(self) -> list[_Mark | None]:
        return [_mark(path) for path in self._paths]


def _mark(path: str) -> _Mark | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    # The third changes with owner and mode too: a file that could not be read may be readable now.
    return state.st_size, state.st_ino, state.st_ctime_ns, state.st_mtime_ns


def read_file(name: str, path: str) -> bytes:
    """The content of a file, or ConfigError, which names the flag or argument, and the path."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path}: cannot be read ({error.strerror})") from None
