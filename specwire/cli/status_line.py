"""A line at the bottom of the terminal that stays while text scrolls above it."""

from __future__ import annotations

import os
import shutil
from typing import Self, TextIO


class StatusLine:
    """The bottom line while the body runs; nothing where the output is no terminal that can do it."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._rows = 0
        self._is_able = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def __enter__(self) -> Self:
        return self

    def show(self, text: str) -> None:
        """Replace the line; it is cut at the width of the terminal."""
        if not self._is_able:
            return
        columns, rows = shutil.get_terminal_size()
        if rows != self._rows:
            self._reserve(rows)
        self._write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[2m{text[: columns - 1]}\x1b[0m\x1b8")

    def _reserve(self, rows: int) -> None:
        """Let all lines but the last scroll; if the cursor is on the last, it goes one up first."""
        self._write(f"\x1bD\x1bM\x1b7\x1b[1;{rows - 1}r\x1b8")
        self._rows = rows

    def __exit__(self, *_: object) -> None:
        if self._rows:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")
            self._rows = 0

    def _write(self, codes: str) -> None:
        self._out.write(codes)
        self._out.flush()
