"""requirements/ holds what pyproject.toml asks for: all of it, nothing else, each file by its hash.

`make lock` writes the files, from the network; what can be said of them without one is tested here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, GROUPS = PYPROJECT["project"], PYPROJECT["dependency-groups"]
LOCKS = {path.stem: path.read_text() for path in (ROOT / "requirements").glob("*.txt")}
MAKEFILE = (ROOT / "Makefile").read_text().replace("\\\n", "")
CUDA = re.compile(r"torch|triton|cuda-.*|nvidia-.*")
LOCKED_EXTRAS = {
    lock: re.findall(r"--extra (\w+)", command)
    for command, lock in re.findall(r"pyproject.toml( --extra .*?) -o requirements/(\w+).txt", MAKEFILE)
}


@dataclass(frozen=True)
class Pin:
    requirement: Requirement
    hashes: list[str]
    direct: bool
    """Our pyproject.toml asks for it, says uv."""

    @property
    def version(self) -> Version:
        (specifier,) = self.requirement.specifier
        assert specifier.operator == "=="
        return Version(specifier.version)


def pins(lock: str) -> list[Pin]:
    blocks = re.split(r"^(?=\w)", LOCKS[lock], flags=re.MULTILINE)[1:]
    return [
        Pin(
            requirement=Requirement(block.partition("\\\n")[0]),
            hashes=re.findall(r"--hash=sha256:([0-9a-f]{64})\b", block),
            direct="specwire (pyproject.toml" in block,
        )
        for block in blocks
    ]


def versions(lock: str) -> dict[str, set[Version]]:
    """Several versions where Pythons differ."""
    found: dict[str, set[Version]] = {}
    for pin in pins(lock):
        found.setdefault(pin.requirement.name, set()).add(pin.version)
    return found


def requirements(extras: Iterable[str]) -> list[Requirement]:
    """What the project needs with these extras; those that are made of others are written out."""
    optional = PROJECT["optional-dependencies"]
    lines = PROJECT["dependencies"] + [line for extra in extras for line in optional[extra]]
    return [found for found in map(Requirement, lines) if found.name != PROJECT["name"]]


WANTED = {
    "dev": requirements(PROJECT["optional-dependencies"]),
    **{lock: requirements(extras) for lock, extras in LOCKED_EXTRAS.items()},
    "tools": [Requirement(line) for line in GROUPS["tools"]],
    "suites": [Requirement(line) for line in GROUPS["suites"]],
    "torch-cuda": [Requirement(line) for line in GROUPS["torch"]],
}


@pytest.mark.parametrize("lock", WANTED)
def test_a_lock_has_what_pyproject_asks_for_and_no_more(lock: str) -> None:
    """`make lock` was forgotten otherwise."""
    torch = set() if lock == "torch-cuda" else {"torch"}
    direct = {pin.requirement.name for pin in pins(lock) if pin.direct}
    assert direct == {canonicalize_name(wanted.name) for wanted in WANTED[lock]} - torch
    locked = versions(lock) | {"torch": versions("torch-cuda")["torch"]}
    for wanted in WANTED[lock]:
        for version in locked[canonicalize_name(wanted.name)]:
            assert version in wanted.specifier, f"{lock}.txt: {wanted} is locked as {version}"


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_has_one_version_and_its_hashes(lock: str) -> None:
    for pin in pins(lock):
        assert pin.version, pin.requirement
        assert pin.hashes, pin.requirement
        assert len(set(pin.hashes)) == len(pin.hashes), pin.requirement
    assert "://" not in LOCKS[lock]  # where packages come from is pip's configuration
    assert "file:" not in LOCKS[lock]


@pytest.mark.parametrize("lock", ["demo", "dev", "image"])
def test_what_builds_the_project_is_locked_too(lock: str) -> None:
    """pip builds without isolation, which would fetch the newest."""
    for wanted in map(Requirement, PYPROJECT["build-system"]["requires"]):
        assert all(version in wanted.specifier for version in versions(lock)[wanted.name])


@pytest.mark.parametrize("lock", ["demo", "image", "torch-cuda"])
def test_the_locks_have_the_same_versions(lock: str) -> None:
    dev = versions("dev")
    found = {name: own for name, own in versions(lock).items() if not CUDA.fullmatch(name)}
    assert found == {name: dev.get(name) for name in found}


def test_torch_has_two_builds_and_what_cuda_needs_is_with_its_own() -> None:
    (cpu,), (cuda,) = versions("torch-cpu")["torch"], versions("torch-cuda")["torch"]
    assert (cpu.public, cpu.local) == (str(cuda), "cpu")
    assert not [name for lock in ("demo", "dev", "image") for name in versions(lock) if CUDA.fullmatch(name)]
