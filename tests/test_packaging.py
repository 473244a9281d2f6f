"""What `pip install` takes along: every file of the packages, by what pyproject.toml names."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_file_of_the_packages_is_named() -> None:
    tops = {package.partition(".")[0] for package in SETUP["packages"]}
    there = {path for top in tops for path in (ROOT / top).rglob("*") if path.is_file()}
    folders = {package: ROOT / package.replace(".", "/") for package in SETUP["packages"]}
    code = {
        path for folder in folders.values() for ending in ("py", "pyi") for path in folder.glob(f"*.{ending}")
    }
    data = {
        path
        for package, globs in SETUP["package-data"].items()
        for glob in globs
        for path in folders[package].glob(glob)
    }
    assert {path for path in there if "__pycache__" not in path.parts} == code | data


def test_data_is_what_is_named_and_no_more() -> None:
    """Otherwise setuptools takes directories of models for packages that were forgotten, and warns."""
    assert SETUP["include-package-data"] is False
