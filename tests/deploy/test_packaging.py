"""What `pip install` takes along: every file of the packages, by what pyproject.toml names."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_file_of_the_packages_is_named() -> None:
    tops = [ROOT / pattern.rstrip("*") for pattern in SETUP["packages"]["find"]["include"]]
    there = {path for top in tops for path in top.rglob("*") if path.is_file()}
    folders = {path.parent for path in there if path.name == "__init__.py"}
    code = {path for folder in folders for ending in ("py", "pyi") for path in folder.glob(f"*.{ending}")}
    data = {
        path
        for package, globs in SETUP["package-data"].items()
        for glob in globs
        for path in (ROOT / package.replace(".", "/")).glob(glob)
    }
    assert {path for path in there if "__pycache__" not in path.parts} == code | data


def test_data_is_what_is_named_and_no_more() -> None:
    """Otherwise setuptools takes directories of models for packages that were forgotten, and warns."""
    assert SETUP["include-package-data"] is False
