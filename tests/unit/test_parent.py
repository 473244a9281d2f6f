"""Children of our commands run our modules, wherever a user stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specwire import parent
from tests.support.processes import ROOT


@pytest.fixture
def user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose files have names of modules of Python and of ours."""
    for name in ("queue.py", "coordinator.py"):
        (tmp_path / name).write_text("raise SystemExit('a file of the user')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_working_directory_is_not_searched(user_files: Path) -> None:
    done = subprocess.run(parent.python("-c", "import queue"), check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_service_is_ours(user_files: Path) -> None:
    command = [sys.executable, "-P", "-m", "specwire.cli", "coordinator", "--help"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=False, env=environ, capture_output=True, text=True)
    assert "--verify-address" in done.stdout, done.stderr


def test_a_clone_runs_from_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert parent.python("-m", "coordinator") == [sys.executable, "-m", "coordinator"]
