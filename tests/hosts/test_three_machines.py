"""The recipe for three machines, as README, using.md and security.md have it, in network namespaces.

Of the lines, only the models are replaced, by the embedded pair.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import recipe
from tests.support.namespaces import machines
from tests.support.processes import START_S


def test_the_readme_has_the_same_lines() -> None:
    readme = recipe.lines("README.md", "OpenAI's client takes")
    others = ("specwire serve", "specwire tune")
    assert [line for line in readme if not line.startswith(others)] == recipe.USING[:-1]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_it_generates_text(tmp_path: Path) -> None:
    def with_embedded(line: str) -> str:
        return re.sub(r"--model \S+", "--model embedded", line)

    addresses = [recipe.VERIFY, recipe.DRAFT, recipe.COORDINATOR, recipe.CLIENT]
    with machines(addresses) as network, recipe.started(network, tmp_path, with_embedded):
        done = subprocess.run(
            [
                *network.prefix(recipe.CLIENT),
                "sh",
                "-c",
                f"{recipe.USING[-1]} --num-draft-tokens 4 --max-tokens 8 --json",
            ],
            cwd=tmp_path,
            env=recipe.environ(),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        completion = json.loads(done.stdout)
        assert completion["text"]
        assert completion["speculation"]["num_draft_tokens"] > 0
