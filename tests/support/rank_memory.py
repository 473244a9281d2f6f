"""What ranks compute, and how much memory one takes while it loads its shard, or, as a control, the model.

A thread of each rank reads once a millisecond how much memory its process has of its own, and how much
together with the pages of files that it has mapped.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist

from specwire.engine.batch import Feed
from specwire.engine.group.sharding import load_shard
from specwire.engine.model import loading
from specwire.engine.model.runner import ModelRunner

BUFFER_BYTES = 16 << 20
"""What a rank may take beside its shard, whatever the size of the model: buffers, and what the pass takes
that compares its logits."""
_SAMPLE_S = 0.001


class Taken(NamedTuple):
    """What loading took of a rank, in bytes over what the process had before.

    Attributes:
        weights: of the model as it is held, each tensor once.
        own: most memory at a time that no file stands for.
        resident: most memory at a time together with mapped pages of files, which the system can take back.
    """

    weights: int
    own: int
    resident: int


def save_model(directory: Path, dtype: str, *, num_layers: int, width: int, file_size: str) -> Path:
    """A Llama with random weights, 16 a layer times the square of the width, and as many around.

    Args:
        dtype: of the files, a torch dtype by name.
        file_size: of the largest file, as transformers reads it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8 * width,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size=file_size)
    return directory


class Peak:
    """The most memory of this process while it is entered, over what it had before."""

    def __enter__(self) -> Self:
        self._before = self._most = memory()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Its own, and resident."""
        own, resident = (most - before for most, before in zip(self._most, self._before, strict=True))
        return own, resident

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self._look()

    def _look(self) -> None:
        own, resident = memory()
        self._most = max(self._most[0], own), max(self._most[1], resident)


def memory() -> tuple[int, int]:
    """Bytes of this process that no file stands for, and together with those of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    own, mapped = (int(sizes[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return own, own + mapped


def loaded_on_ranks(num_ranks: int, source: str) -> list[tuple[Taken, Taken]]:
    """Runs on each rank; what the shard took and what the whole model takes, for all ranks."""
    shard = _taken(lambda: load_shard(source, dtype="float32", num_ranks=num_ranks)[0])
    whole = _taken(lambda: loading.load_model(source, dtype="float32"))
    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, (shard, whole))
    return found


def logits_of(model: Any, prompt: list[int]) -> np.ndarray:
    """[num_tokens, vocab_size], as a runner computes them."""
    runner = ModelRunner(model, num_pages=8)
    with runner.new_sequence() as cache:
        return runner.forward([Feed(cache, prompt, len(prompt))]).numpy()


def logits_on_ranks(
    num_ranks: int, sources: list[str], prompt: list[int]
) -> list[tuple[np.ndarray, dict[str, Any], int]]:
    """Runs on each rank; of each model its logits, its description, and how many numbers this rank holds."""
    found = []
    for source in sources:
        model, description = load_shard(source, dtype="auto", num_ranks=num_ranks)
        assert not [name for name, weight in model.named_parameters() if hasattr(weight, "placements")]
        num_own = sum(weight.numel() for weight in model.parameters())
        found.append((logits_of(model, prompt), description, num_own))
    return found


def _taken(load: Callable[[], Any]) -> Taken:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be used again unseen
    dist.barrier()
    with Peak() as peak:
        model = load()
    weights = {id(weight): weight.numel() * weight.element_size() for weight in model.parameters()}
    return Taken(sum(weights.values()), *peak.num_bytes)
