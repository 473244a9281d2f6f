"""`specwire chat`: a conversation in the terminal, with the fate of every token and the speed."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from dataclasses import replace
from typing import Any, Self

from specwire.cli.terminal import dim, legend, painted_chunk, printable
from specwire.client.client import Client
from specwire.completion import Chunk, Speculation
from specwire.core import SamplingParams
from specwire.errors import InvalidRequestError, UnsupportedError

_HELP = "/reset begins again, /quit or Ctrl-D ends, Ctrl-C stops an answer"


class Chat:
    """A conversation: its messages so far, and one answer after another."""

    def __init__(self, client: Client, params: SamplingParams, system: str, *, colour: bool) -> None:
        self._client = client
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._colour = colour

    def reset(self) -> None:
        """Forget all but the system's message."""
        self._messages = list(self._opening)

    def answer(self, text: str) -> None:
        """Write the answer to a message; what is written of it before Ctrl-C belongs to the conversation. A
        message that fails with a SpecwireError is forgotten."""
        asked = [*self._messages, {"role": "user", "content": text}]
        said: list[str] = []
        figures = _Figures()
        with (
            _StatusLine() as status,
            contextlib.suppress(KeyboardInterrupt),
            self._client.stream(None, self._params, messages=asked, report_progress=True) as stream,
        ):
            for chunk in stream:
                said.append(chunk.text)
                self._write(chunk)
                figures.add(chunk)
                status.show(figures.line())
        print()
        if sys.stdout.isatty():
            print(dim(figures.line(), self._colour))
        self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _write(self, chunk: Chunk) -> None:
        """Without the tokens that were rejected: this is to be read."""
        shown = printable(chunk.text) if sys.stdout.isatty() else chunk.text
        sys.stdout.write(painted_chunk(replace(chunk, rejected=())) if self._colour else shown)
        sys.stdout.flush()


class _StatusLine:
    """The bottom line while the body runs; nothing where the output is no terminal that can do it."""

    def __init__(self) -> None:
        self._rows = 0
        self._is_able = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"

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
        sys.stdout.write(codes)
        sys.stdout.flush()


class _Figures:
    """Speed and acceptance of an answer so far."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._num_tokens = 0
        self._counts = Speculation()

    def add(self, chunk: Chunk) -> None:
        self._num_tokens += len(chunk.tokens)
        self._counts = chunk.speculation or self._counts

    def line(self) -> str:
        speed = self._num_tokens / max(1e-9, time.monotonic() - self._began_s)
        words = f"{self._num_tokens} tokens, {speed:.0f} tokens/s, {self._counts.tokens_per_round:.2f} a pass"
        if self._counts.num_drafts:
            words += f", {self._counts.mean_acceptance_length:.2f} with a draft"
        return words


def run(settings: Any, args: argparse.Namespace, params: SamplingParams) -> int:
    """Read messages from standard input, one a line, until it ends. Raises SpecwireError if the server or the
    model cannot answer at all or, without a terminal, not this message."""
    is_terminal = sys.stdin.isatty()
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - lines can be edited, and earlier ones are at hand
    with Client(settings.server, timeout_s=settings.timeout_s, **settings.credentials) as client:
        target, _ = client.get_model_info()
        chat = Chat(client, params, args.system, colour=colour)
        if is_terminal:
            print(dim(f"{target.name} at {settings.server}; {_HELP}", colour))
            print(*(legend() if colour else []))
        while (text := _read(is_terminal)) is not None:
            if text == "/quit":
                break
            _turn(chat, text, is_terminal)
    return 0


def _read(is_terminal: bool) -> str | None:
    """The next message; None at the end."""
    while True:
        try:
            text = input("> " if is_terminal else "").strip().encode(errors="replace").decode()
        except EOFError:
            if is_terminal:
                print()
            return None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(f"\n{_HELP}")
            continue
        if text:
            return text


def _turn(chat: Chat, text: str, is_terminal: bool) -> None:
    if text == "/reset":
        chat.reset()
    elif text.startswith("/"):
        print(f"{text.split(maxsplit=1)[0]} is not known: {_HELP}", file=sys.stderr)
    else:
        try:
            chat.answer(text)
        except UnsupportedError:
            raise
        except InvalidRequestError as error:  # such as a conversation that has outgrown the context
            if not is_terminal:
                raise
            print(f"error: {error}", file=sys.stderr)
