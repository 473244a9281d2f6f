"""The recipe for three machines, as README, using.md and security.md have it, in network namespaces.

Of the lines, only the models are replaced, by the embedded pair.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.namespaces import machines
from tests.support.processes import END_S, ROOT, START_S

Process = subprocess.Popen[bytes]
VERIFY, DRAFT, COORDINATOR, CLIENT = "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"


def lines(document: str, heading: str) -> list[str]:
    """Of the first block of shell lines after this text, without comments; continued ones are joined."""
    text = (ROOT / document).read_text().split(heading, 1)[1]
    found = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert found is not None
    block = re.sub(r" +#.*", "", found[1]).replace("\\\n", " ")
    return [re.sub(r" +", " ", line) for line in block.splitlines() if line.strip()]


USING = lines("docs/using.md", "### Each on its own machine")
FILES = lines("docs/security.md", "## Three machines")


@pytest.fixture
def environ() -> dict[str, str]:
    """A shell's, where `specwire` is this one; a thread for each service, as they share a processor here."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SPECWIRE_")}
    path = f"{Path(sys.executable).parent}:{own['PATH']}"
    return own | {"PATH": path, "PYTHONPATH": str(ROOT), "SPECWIRE_NUM_THREADS": "1"}


def test_the_readme_has_the_same_lines() -> None:
    readme = lines("README.md", "OpenAI's client takes")
    others = ("specwire serve", "specwire tune")
    assert [line for line in readme if not line.startswith(others)] == USING[:-1]


@contextlib.contextmanager
def started(machine: list[str], command: str, cwd: Path, environ: dict[str, str]) -> Iterator[Process]:
    """A shell's command on a machine, which is killed at the end."""
    with (cwd / "log").open("wb") as log:
        argv = [*machine, "sh", "-c", command]
        process = subprocess.Popen(argv, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_it_generates_text(tmp_path: Path, environ: dict[str, str]) -> None:
    with machines([VERIFY, DRAFT, COORDINATOR, CLIENT]) as network, contextlib.ExitStack() as stack:
        prepare = ["sh", "-e", "-c", "\n".join(FILES)]
        subprocess.run(prepare, cwd=tmp_path, env=environ, check=True, timeout=END_S)
        exported, *services, generate = USING
        for line in services:
            found = re.search(r" --address (\S+):", line)
            assert found is not None
            address = found[1]
            command = re.sub(r"--model \S+", "--model embedded", f"{exported}\nexec {line}")
            cwd = tmp_path / address
            running = stack.enter_context(started(network.prefix(address), command, cwd, environ))
        assert running.stdout is not None
        assert select.select([running.stdout], [], [], START_S)[0], "the coordinator is not ready in time"
        assert running.stdout.readline() == b"ready 10.0.0.4:7070\n", (cwd / "log").read_text()
        done = subprocess.run(
            [*network.prefix(CLIENT), "sh", "-c", f"{generate} --max-tokens 8 --json"],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        completion = json.loads(done.stdout)
        assert completion["text"]
        assert completion["speculation"]["num_draft_tokens"] > 0
