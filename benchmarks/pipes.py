"""Child processes that take orders and answer over pipes, a line of JSON each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def start_module(module: str, *args: str) -> subprocess.Popen[str]:
    """`python -m module args` with pipes to its standard input and output."""
    return start_python("-m", module, *args)


def start_python(*args: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`python args` with such pipes; `environ` is added to this process's environment."""
    command, env = [sys.executable, *args], {**os.environ, **(environ or {})}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def ask(process: subprocess.Popen[str], order: object) -> Any:
    """Send a line of JSON, and wait for the one that answers it.

    Raises:
        RuntimeError: the process has ended.
    """
    assert process.stdin is not None
    print(json.dumps(order), file=process.stdin, flush=True)
    line = read_line(process)
    if not line:
        raise RuntimeError(f"{process.args!r} ended with status {process.wait()}")
    return json.loads(line)


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line that the process prints; empty when it has ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    """End it and wait."""
    process.terminate()
    process.wait()
