"""Faults put in on purpose. `make test` runs a short form of each, `make chaos` (CHAOS=1) the long one."""

from __future__ import annotations

import os
from typing import TypeVar

CHAOS = os.environ.get("CHAOS") == "1"
Size = TypeVar("Size")


def sized(short: Size, long: Size) -> Size:
    """What this run takes of the two."""
    return long if CHAOS else short
