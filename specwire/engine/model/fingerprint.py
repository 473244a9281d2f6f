"""A fingerprint of a model's weights: directories of the same name may hold different ones.

Small files are read whole, large ones in blocks at a fixed stride, so that sixteen gigabytes take less than a
second. Weights that were trained, quantised or merged differently differ everywhere. A deliberate change of a
few numbers between the blocks is not detected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specwire.config.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BLOCK_BYTES = 4096
_STRIDE_BYTES = 1 << 20
_WHOLE_BYTES = 64 << 20
"""Files up to this size are read whole."""
_VOLATILE = frozenset(
    {"_name_or_path", "transformers_version", "base_model_name_or_path", "peft_version", "revision"}
)
"""Fields of a config that depend on where it was loaded from."""


def weights_fingerprint(directory: Path) -> str:
    """32 hex digits from the config and the weights in a model directory; its name is not included."""
    weights = [path for path in sorted(directory.iterdir()) if path.suffix in _WEIGHTS]
    return _fingerprint(directory / "config.json", weights)


def adapter_fingerprint(directory: Path) -> str:
    """The same of a LoRA adapter, from its config and its weights."""
    return _fingerprint(directory / ADAPTER_CONFIG, [directory / ADAPTER_WEIGHTS])


def _fingerprint(config: Path, weights: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if config.is_file():
        named: dict[str, Any] = json.loads(config.read_text())
        kept = {name: value for name, value in named.items() if name not in _VOLATILE}
        digest.update(json.dumps(kept, sort_keys=True).encode())
    for path in weights:
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        for block in _blocks(path):
            digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    """The beginning of a file, which names its tensors, a block in every stride, and the end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            yield file.read()
            return
        yield file.read(_STRIDE_BYTES)
        for start in (*range(_STRIDE_BYTES, size - _BLOCK_BYTES, _STRIDE_BYTES), size - _BLOCK_BYTES):
            file.seek(start)
            yield file.read(_BLOCK_BYTES)
