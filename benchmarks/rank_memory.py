"""`python -m benchmarks.rank_memory`: how much memory a rank takes while it loads its shard.

Plain processes as ranks, gloo, random weights in several safetensors files, computed in float32. A thread of
each rank reads once a millisecond how much memory its process has of its own, and how much together with the
pages of files that it has mapped. Then, as a control, each rank loads the whole model in the same way.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from benchmarks.bars import Bar, Report, machine
from benchmarks.ranks import run_ranks
from specwire.engine.group.sharding import load_shard
from specwire.engine.model import loading

BUFFER_BYTES = 16 << 20
"""What a rank may take beside its shard, whatever the size of the model: buffers, and what the pass takes
that compares its logits."""
_SAMPLE_S = 0.001
_MIB = 1 << 20


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


def loaded_on_ranks(num_ranks: int, source: str, tiny: str = "") -> list[tuple[Taken, Taken]]:
    """Runs on each rank; what the shard took and what the whole model takes, for all ranks.

    Args:
        tiny: loaded before, so that what is imported meanwhile does not count.
    """
    if tiny:
        load_shard(tiny, dtype="float32", num_ranks=num_ranks)
    shard = _taken(lambda: load_shard(source, dtype="float32", num_ranks=num_ranks)[0])
    whole = _taken(lambda: loading.load_model(source, dtype="float32"))
    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, (shard, whole))
    return found


def _taken(load: Callable[[], Any]) -> Taken:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be used again unseen
    dist.barrier()
    with Peak() as peak:
        model = load()
    weights = {id(weight): weight.numel() * weight.element_size() for weight in model.parameters()}
    return Taken(sum(weights.values()), *peak.num_bytes)


def _row(stored: str, num_ranks: int, rank: int, shard: Taken, whole: Taken) -> str:
    sizes = " | ".join(f"{size / _MIB:.0f}" for size in (*shard, *whole))
    return f"| {stored} | {num_ranks} | {rank} | {sizes} |"


_EXPLANATION = """
*Its own* is memory that no file stands for: what a rank holds and cannot be taken back. Weights that are
stored as they are computed stay in the mapped file, but for those that are cut across; converted ones are all
its own. Mapped pages are the page cache's: all ranks of a machine share them, and the system takes them back
when it needs room. A rank touches more of them than its shard has: what is cut across lies side by side.
"""


def main() -> None:
    """Measure two and four ranks, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_memory", description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    rows, data = [], {}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        tiny = save_model(root / "tiny", "float32", num_layers=1, width=64, file_size="1GB")
        for stored in ("float32", "bfloat16"):
            source = save_model(
                root / stored, stored, num_layers=args.layers, width=args.width, file_size="100MB"
            )
            for num_ranks in (2, 4):
                found = run_ranks(num_ranks, loaded_on_ranks, str(source), str(tiny))
                rows += [_row(stored, num_ranks, rank, *taken) for rank, taken in enumerate(found)]
                data[f"{stored}, {num_ranks} ranks"] = [
                    {"shard": shard._asdict(), "whole": whole._asdict()} for shard, whole in found
                ]
    shards = [one["shard"] for taken in data.values() for one in taken]
    result = Report(
        name="rank_memory",
        title="What a rank takes while it loads",
        machine=machine(),
        about=f"{next(iter(data.values()))[0]['whole']['weights'] / _MIB:.0f} MiB of weights as float32, in "
        "safetensors files of at most 100 MB; MiB over what the process had before.",
        bars=[
            Bar(
                what="memory of its own that a rank takes over its shard, most of all ranks",
                measured=max(one["own"] - one["weights"] for one in shards) / _MIB,
                limit=BUFFER_BYTES / _MIB,
                unit="MiB",
            )
        ],
        details="\n".join(
            [
                "| stored as | ranks | rank | shard | its own | with mapped pages "
                "| control: whole model | its own | with mapped pages |",
                "|---|---|---|---|---|---|---|---|---|",
                *rows,
            ]
        )
        + "\n"
        + _EXPLANATION,
        data=data,
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
