"""The wheel in an environment that has what its base asks for and nothing else: the client, and no torch.

Nothing is downloaded: packages are copied from this environment, by what their metadata asks for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from specwire.embedded import TARGET_DIR
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, local_stack
from tests.support.imports import ROOT

MAX_INSTALLED_BYTES = 150_000_000
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PACKAGES = [pattern.rstrip("*") for pattern in SETUP["packages"]["find"]["include"]]
ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""Which would let this repository's packages in."""
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


@dataclass(frozen=True)
class Installed:
    root: Path

    @property
    def specwire(self) -> str:
        return str(self.root / "bin/specwire")

    @property
    def site_packages(self) -> Path:
        (found,) = self.root.glob("lib/python*/site-packages")
        return found

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """In a folder, and with a path, without this repository's packages."""
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, cwd="/", env=ENVIRON
    )


def build(into: Path) -> Path:
    source = into / "source"
    source.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    flags = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(into))
    subprocess.run([*PIP, "wheel", *flags, str(source)], check=True, timeout=120)
    (wheel,) = into.glob("*.whl")
    return wheel


def needed_by(package: metadata.Distribution) -> set[str]:
    """Everything that a package pulls in, without its extras."""
    wanted = map(Requirement, package.requires or [])
    direct = {canonicalize_name(one.name) for one in wanted if not one.marker or one.marker.evaluate()}
    return direct.union(*(needed_by(metadata.distribution(name)) for name in direct))


def copy_package(name: str, site_packages: Path) -> None:
    for file in metadata.files(name) or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            (site_packages / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), site_packages / file)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    root = tmp_path_factory.mktemp("wheel")
    found = Installed(root / "environment")
    venv.create(found.root, symlinks=True)
    wheel = build(root)
    subprocess.run(
        [
            *PIP,
            "--python",
            str(found.root / "bin/python"),
            "install",
            "--no-deps",
            "--no-index",
            "--no-compile",
            str(wheel),
        ],
        check=True,
        timeout=120,
        env=ENVIRON,
    )
    (own,) = found.site_packages.glob("specwire-*.dist-info")
    for name in needed_by(metadata.PathDistribution(own)):
        copy_package(name, found.site_packages)
    return found


stack = entered(lambda: local_stack(TARGET_DIR))


def files_in(folder: Path) -> set[Path]:
    """Of our packages, relative to the folder that they are in."""
    found = (path for name in PACKAGES for path in (folder / name).rglob("*") if path.is_file())
    return {path.relative_to(folder) for path in found if "__pycache__" not in path.parts}


def test_it_has_every_file_of_the_packages(installed: Installed) -> None:
    """By what pyproject.toml names: setuptools would take directories of models for forgotten packages."""
    assert files_in(installed.site_packages) == files_in(ROOT)
    assert SETUP["include-package-data"] is False


def test_the_client_generates(installed: Installed, stack: LocalStack) -> None:
    prompt, flags = "def fibonacci(", ("--temperature", "0", "--max-tokens", "8")
    ended = run(installed.specwire, "generate", prompt, "--server", stack.address, *flags)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip()


@pytest.mark.parametrize(("command", "extra"), [("up", "serve"), ("http", "http")])
def test_a_command_beyond_the_client_names_its_extra(installed: Installed, command: str, extra: str) -> None:
    ended = run(installed.specwire, command)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert f"specwire {command} needs pip install 'specwire[{extra}]' (" in ended.stderr


def test_the_client_is_small(installed: Installed) -> None:
    assert installed.num_bytes < MAX_INSTALLED_BYTES
