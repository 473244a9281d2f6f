"""Names of a model's blocks that may be left out: `a3` is the attention of layer 3, `m3` its MLP."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from specwire.config.fields import AUTO, check

ATTENTION, MLP = "a", "m"
_NAME = re.compile(rf"([{ATTENTION}{MLP}])(0|[1-9]\d{{0,3}})")


class Block(NamedTuple):
    """A part of a layer, from 0, that adds to the hidden states: its ATTENTION or its MLP."""

    layer: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}{self.layer}"


def parse_skip(name: str, text: str) -> tuple[Block, ...]:
    """The blocks that a list such as `a3,m3,m4` names, in order; ConfigError names what is none, or twice
    there."""
    blocks = []
    for each in text.split(","):
        found = _NAME.fullmatch(each.strip())
        problem = f"{each!r} is no block: a3 is the attention of layer 3, m3 its MLP"
        check(found is not None, name, text, problem)
        assert found is not None
        blocks.append(Block(int(found[2]), found[1]))
    check(len(set(blocks)) == len(blocks), name, text, "names a block twice")
    return tuple(sorted(blocks))


def skip_text(blocks: Iterable[Block]) -> str:
    """As `parse_skip` reads it."""
    return ",".join(map(str, sorted(blocks)))


def check_layers(name: str, layers: str) -> None:
    """Refuse what is neither `auto`, nor a file of `specwire search-layers`, nor a list of blocks."""
    if layers not in ("", AUTO) and not Path(layers).is_file():
        parse_skip(name, layers)
