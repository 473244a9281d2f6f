"""The lines of README, using.md and security.md for three machines, run in network namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.namespaces import Machines
from tests.support.processes import END_S, ROOT, START_S

VERIFY, DRAFT, COORDINATOR, CLIENT = "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"


def lines(document: str, heading: str) -> list[str]:
    """Of the first block of shell lines after this text, without comments; continued ones are joined."""
    text = (ROOT / document).read_text().split(heading, 1)[1]
    found = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert found is not None
    block = re.sub(r" +#.*", "", found[1]).replace("\\\n", " ")
    return [re.sub(r" +", " ", line) for line in block.splitlines() if line.strip()]


USING = lines("docs/using.md", "### Each on its own machine")
_FILES = lines("docs/security.md", "## Three machines")


def environ() -> dict[str, str]:
    """A shell's, where `specwire` is this one; a thread for each service, as they share a processor here."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SPECWIRE_")}
    path = f"{Path(sys.executable).parent}:{own['PATH']}"
    return own | {"PATH": path, "PYTHONPATH": str(ROOT), "SPECWIRE_NUM_THREADS": "1"}


@contextlib.contextmanager
def started(network: Machines, folder: Path, changed: Callable[[str], str]) -> Iterator[None]:
    """The three services, ready, with their files in `folder`.

    Args:
        changed: of each line, what runs in its place.
    """
    prepare = ["sh", "-e", "-c", "\n".join(map(changed, _FILES))]
    subprocess.run(prepare, cwd=folder, env=environ(), check=True, capture_output=True, timeout=END_S)
    exported, *services, _ = USING
    with contextlib.ExitStack() as stack:
        for line in services:
            found = re.search(r" --address (\S+):", line)
            assert found is not None
            running = stack.enter_context(
                _process(network, found[1], folder, f"{exported}\nexec {changed(line)}")
            )
        assert running.stdout is not None
        assert select.select([running.stdout], [], [], START_S)[0], "the coordinator is not ready in time"
        logs = "\n".join(path.read_text() for path in folder.glob("*/log"))
        assert running.stdout.readline() == f"ready {COORDINATOR}:7070\n".encode(), logs
        yield


@contextlib.contextmanager
def _process(
    network: Machines, machine: str, folder: Path, command: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A shell's command on a machine, which is killed at the end."""
    with (folder / machine / "log").open("wb") as log:
        argv = [*network.prefix(machine), "sh", "-c", command]
        process = subprocess.Popen(
            argv, cwd=folder / machine, env=environ(), stdout=subprocess.PIPE, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
