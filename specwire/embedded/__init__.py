"""The embedded pair: a small Python-writing target and the draft distilled from it (see README.md here)."""

from pathlib import Path

__all__ = ["DRAFT_DIR", "TARGET_DIR"]

_HERE = Path(__file__).resolve().parent

TARGET_DIR = _HERE / "target"
"""Directory of the target checkpoint: pass it wherever a transformers model path is wanted."""

DRAFT_DIR = _HERE / "draft"
"""Directory of the draft checkpoint; its tokenizer is the target's."""
