"""What a service process logs is read, whether or not it can be written."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specwire.cli.process import Service

NUM_LINES = 40_000
"""More than a pipe holds."""


def test_a_log_that_nobody_reads_does_not_hold_up_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service.__new__(Service)
    service.module, service.address = "coordinator", "127.0.0.1:1"
    written = []

    def write(text: str) -> None:
        written.append(text)
        raise BrokenPipeError

    monkeypatch.setattr(sys.stderr, "write", write)
    command = [sys.executable, "-c", f"import sys; sys.stderr.write('line\\n' * {NUM_LINES})"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            service._forward_errors(process)
            assert process.wait(10) == 0
        finally:
            process.kill()
    assert len(written) == NUM_LINES
