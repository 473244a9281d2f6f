"""Links of the documents: files that are there, and headings that they have."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.support.imports import ROOT

FOLDERS = ("docs", "benchmarks", "specwire")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for each in FOLDERS for path in (ROOT / each).rglob("*.md"))])


@functools.cache
def anchors(document: Path) -> frozenset[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(\s*([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link
