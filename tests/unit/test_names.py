"""A public name stands for one thing, and what comments name is there."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from tests.support.imports import ROOT, SERVICES

SOURCES = {
    path: path.read_text()
    for room in ("specwire", *SERVICES, "tools")
    for path in (ROOT / room).rglob("*.py")
    if ROOT / "specwire/v1" not in path.parents
}
REFERENCE = re.compile(r"`([A-Za-z_]\w*(?:[./]\w+)+)(?:\(\))?`")
Files = dict[str, list[Path]]


def classes() -> Files:
    """Public ones, with the files that define them."""
    found = defaultdict(list)
    for path, source in SOURCES.items():
        for each in ast.parse(source).body:
            if isinstance(each, ast.ClassDef) and not each.name.startswith("_"):
                found[each.name].append(path)
    return found


def is_there(reference: str, known: Files) -> bool:
    """Whether `folder/file.py`, `module.Name` or `Class.attribute` is, where the first is ours."""
    if reference.endswith(".py"):
        return (ROOT / reference).exists() or any(str(path).endswith(f"/{reference}") for path in SOURCES)
    parts = reference.split(".")
    for owner, name in pairwise(parts):
        files = known.get(owner, []) if owner[0].isupper() or name[0].isupper() else []
        if files and not any(re.search(rf"\b{name}\b", SOURCES[path]) for path in files):
            return False
    return True


def test_no_public_class_has_the_name_of_another() -> None:
    assert {name: paths for name, paths in classes().items() if len(paths) > 1} == {}


def test_what_comments_name_is_there() -> None:
    known = classes()
    for path in SOURCES:
        known[path.stem].append(path)
    missing = {
        (str(path.relative_to(ROOT)), each)
        for path, source in SOURCES.items()
        for each in REFERENCE.findall(source)
        if not is_there(each, known)
    }
    assert missing == set()
    assert not is_there("generation.Drafters", known)
    assert not is_there("generation/Drafters.py", known)
