"""Mappings that files and texts give. A leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specwire.errors import ConfigError


def without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping; ConfigError of a key twice, of which the last one would count."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name}: is given twice")
    return dict(pairs)
