"""`specwire chat` and `specwire generate -`, through pipes and on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import subprocess
import sys
import time
from typing import Any

import pytest

from specwire import SamplingParams
from tests.support.command_line import one_line_error
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, local_stack

COMMAND = [sys.executable, "-m", "specwire.cli"]
GREEDY = ["--temperature", "0", "--max-tokens", "12"]
stack = entered(lambda: local_stack("embedded", "embedded"))


def run(stack: LocalStack, said: bytes, name: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [*COMMAND, name, *words, "--server", stack.address]
    return subprocess.run(command, input=said, capture_output=True, timeout=60, check=False)


class TestChat:
    def test_through_a_pipe(self, stack: LocalStack) -> None:
        """Each answer follows from the conversation before it; `/reset` begins again."""
        ended = run(stack, b"One.\nTwo.\n/reset\n/what\nOne.\n", "chat", "--system", "Count.", *GREEDY)
        assert ended.returncode == 0
        assert ended.stderr.startswith(b"/what is not known: /reset begins again")
        messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "One."}]
        first = self.answer(stack, messages)
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Two."}]
        assert ended.stdout.decode() == "\n".join([first, self.answer(stack, messages), first, ""])

    def answer(self, stack: LocalStack, messages: list[dict[str, str]]) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        return stack.client.generate(messages=messages, params=params).text

    def test_without_a_terminal_an_error_ends_it(self, stack: LocalStack) -> None:
        ended = run(stack, b"word " * 3000, "chat", *GREEDY)
        assert ended.returncode == 2
        assert b"is over the context" in ended.stderr

    def test_on_a_terminal(self, stack: LocalStack) -> None:
        """Ctrl-C ends the answer, an answer too long for the context is refused, and the chat goes on."""
        with Terminal(["chat", "--server", stack.address, "--max-tokens", "1500", "--seed", "3"]) as shown:
            shown.until(b"Ctrl-C stops an answer", b"> ")
            shown.type(b"Count words.\n")
            shown.until(b"\x1b[1;23r", b" tokens/s, ", b" a pass")
            shown.type(b"\x03")
            shown.until(b"\x1b[r", b" a pass", b"\r\n> ")
            shown.type(b"word " * 700 + b"\n")
            shown.until(b"error: ", b"\r\n> ")
            shown.interrupt(b"/reset begins again")
            shown.until(b"> ")
            shown.type(b"\x04")
            assert shown.status() == 0
        stack.assert_idle_within(5.0)


class Terminal:
    """A command on a terminal of 24 lines."""

    def __init__(self, words: list[str]) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            environ = os.environ | {"TERM": "xterm", "LINES": "24", "COLUMNS": "80"}
            os.execve(sys.executable, [*COMMAND, *words], environ)
        self._shown = b""

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def interrupt(self, wanted: bytes) -> None:
        """Press Ctrl-C at a prompt until this is shown: Python does not see a signal between the prompt and
        its wait for keys before the next key."""
        for _ in range(60):
            self.type(b"\x03")
            with contextlib.suppress(AssertionError):
                return self.until(wanted, timeout_s=1.0)
        raise AssertionError(wanted)

    def until(self, *wanted: bytes, timeout_s: float = 60.0) -> None:
        """Wait for these, one after the other."""
        deadline_s = time.monotonic() + timeout_s
        for text in wanted:
            while text not in self._shown:
                ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline_s - time.monotonic()))
                assert ready, (text, self._shown[-500:])
                self._shown += os.read(self._fd, 1 << 16)
            self._shown = self._shown[self._shown.index(text) + len(text) :]

    def status(self) -> int:
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._pid:
            os.kill(self._pid, 9)
            os.waitpid(self._pid, 0)
        os.close(self._fd)


class TestGenerate:
    def test_the_prompt_from_standard_input(self, stack: LocalStack) -> None:
        prompt = "def f(x):\n    "
        ended = run(stack, prompt.encode(), "generate", "-", "--timing", *GREEDY)
        expected = stack.client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12)).text
        assert ended.stdout.decode() == expected + "\n"
        rows = [line.rsplit("  ", 1) for line in ended.stderr.decode().splitlines()]
        spent = {name.strip(): float(value.split()[0]) for name, value in rows if value.endswith("ms")}
        stages = sum(spent[name] for name in spent.keys() - {"sum", "first token after"})
        assert stages == pytest.approx(spent["sum"], abs=0.6)
        assert spent["verify"] > 0
        assert rows[-1][0].strip().startswith("tokens/s")

    @pytest.mark.parametrize(
        ("given", "prompt", "problem"),
        [
            (b"", "-", "error: the prompt on standard input is empty; give a text to continue\n"),
            (b"", "", "error: the prompt is empty; give a text to continue\n"),
            (b"\xff\xfe", "-", "error: the prompt on standard input is not UTF-8: invalid start byte\n"),
        ],
    )
    def test_a_prompt_that_is_none(
        self,
        given: bytes,
        prompt: str,
        problem: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        assert one_line_error(2, ["generate", prompt], capsys) == problem
