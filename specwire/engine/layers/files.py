"""Which blocks a target can spare, on disk: what `specwire search-layers` has found, and for which target."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from specwire.config.blocks import Block, parse_skip
from specwire.config.fields import AUTO
from specwire.engine.heads.files import check_target, parse, replace_file
from specwire.errors import ConfigError, ModelLoadError

BESIDE = "layers.json"
"""Name of the file beside a model."""
_KIND = "specwire-layers"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best blocks to leave out, and what they promise under greedy decoding.

    Attributes:
        target: name of the target, for people.
        target_fingerprint: of its config and weights.
        skip: as `parse_skip` reads it.
        num_draft_tokens: of a round.
        tokens_a_pass: that a round commits.
        cost: of a draft pass, in passes of the target.
        speedup: predicted, over plain decoding.
        num_tried: sets of blocks that were tried.
    """

    target: str
    target_fingerprint: str
    skip: str
    num_draft_tokens: int
    tokens_a_pass: float
    cost: float
    speedup: float
    num_tried: int


def save(path: Path, found: Found) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps({"kind": _KIND, **asdict(found)}, indent=2) + "\n").encode())


def read(path: Path) -> Found:
    """A ModelLoadError, which names the file, if there is none or it is another one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror or error}") from None
    otherwise = "names no blocks; `specwire search-layers` writes such files"
    return parse(Found, data, _KIND, f"{path}:", otherwise)


def chosen(layers: str, directory: Path, name: str, fingerprint: str) -> tuple[Block, ...]:
    """The blocks that `--layers` names: a list of blocks, a file, or `auto`, which looks in the target's
    directory.

    Args:
        name, fingerprint: of the target and its weights.

    Raises:
        ModelLoadError: the file is not there, or is another target's.
    """
    is_file = Path(layers).is_file()
    try:
        if layers != AUTO and not is_file:
            return parse_skip("layers", layers)
        path = Path(layers) if is_file else directory / BESIDE
        found = read(path)
        check_target(f"{path}: blocks", found, name, fingerprint)
        return parse_skip("layers", found.skip)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from None
