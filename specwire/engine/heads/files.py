"""Heads on disk: `heads.safetensors`, and a `config.json` that names their target."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from specwire.errors import ModelLoadError

WEIGHTS, CONFIG = "heads.safetensors", "config.json"
_KIND = "specwire-heads"
Described = TypeVar("Described")


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """What heads are for, and how large they are.

    Attributes:
        target: its name, for people.
        target_fingerprint: of its config and weights.
        num_heads: the k-th proposes the token k + 1 positions after the state.
        state_size: of the states that the target's output layer reads.
        embedding_size: of the target's embeddings.
        num_features: of each head.
        weights_digest: of the file of weights.
    """

    target: str
    target_fingerprint: str
    num_heads: int
    state_size: int
    embedding_size: int
    num_features: int
    weights_digest: str = ""


def save(directory: Path, config: HeadsConfig, weights: Mapping[str, Tensor]) -> None:
    """Write heads so that a reader finds all of them or, between the two files, an error that says so."""
    directory.mkdir(parents=True, exist_ok=True)
    data = save_tensors({name: weight.contiguous() for name, weight in weights.items()})
    named = {"kind": _KIND, **asdict(config), "weights_digest": _digest(data)}
    replace_file(directory / WEIGHTS, data)
    replace_file(directory / CONFIG, (json.dumps(named, indent=2) + "\n").encode())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file as a whole: a crash leaves the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_config(directory: Path) -> HeadsConfig:
    """A ModelLoadError, which names the directory, if there are no heads."""
    try:
        data = (directory / CONFIG).read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{directory}: no heads there: {error.strerror or error}") from None
    otherwise = "describes no heads; `specwire train-heads` makes them"
    return parse(HeadsConfig, data, _KIND, f"{directory}: {CONFIG}", otherwise)


def parse(described: type[Described], data: bytes, kind: str, name: str, otherwise: str) -> Described:
    """What a file of this kind says of a target's own draft, a dataclass; a ModelLoadError begins with its
    name, and says otherwise that it is another kind of file."""
    try:
        found = json.loads(data)
    except ValueError:
        raise ModelLoadError(f"{name} is not JSON") from None
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise ModelLoadError(f"{name} {otherwise}")
    names = [field.name for field in fields(described)]  # type: ignore[arg-type]
    if missing := [each for each in names if each not in found]:
        raise ModelLoadError(f"{name} lacks {', '.join(missing)}")
    return described(**{each: found[each] for each in names})


def check_target(what: str, described: Any, name: str, fingerprint: str) -> None:
    """A ModelLoadError if it is not of this target, by its name and its weights' fingerprint."""
    if described.target_fingerprint != fingerprint:
        raise ModelLoadError(
            f"{what} of {described.target!r} ({described.target_fingerprint or 'no weights'}), not of "
            f"{name!r} ({fingerprint or 'no weights'})"
        )


def read_weights(directory: Path, config: HeadsConfig) -> dict[str, Tensor]:
    """A ModelLoadError if they cannot be read, or are others than the config describes."""
    try:
        data = (directory / WEIGHTS).read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{directory}: {WEIGHTS}: {error.strerror or error}") from None
    if _digest(data) != config.weights_digest:
        raise ModelLoadError(f"{directory}: {WEIGHTS} is not the file that {CONFIG} was written with")
    try:
        found: dict[str, Tensor] = load_tensors(data)
    except SafetensorError as error:
        raise ModelLoadError(f"{directory}: {WEIGHTS}: {error}") from None
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
