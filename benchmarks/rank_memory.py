"""`python -m benchmarks.rank_memory`: how much memory a rank takes while it loads its shard.

Plain processes as ranks, gloo, float32, random weights in several safetensors files. A thread of each rank
reads the anonymous memory of its process once a millisecond: pages of the files that are only mapped do not
count, they belong to the page cache. Then, as a control, each rank loads the whole model in the same way.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from benchmarks.bars import Bar, Report, machine
from benchmarks.ranks import run_ranks
from specwire.engine import loading
from specwire.engine.group.sharding import load_shard

BUFFER_BYTES = 16 << 20
"""What a rank may take beside its shard, whatever the size of the model: buffers, and what the pass takes
that compares its logits."""
_SAMPLE_S = 0.001
_MIB = 1 << 20


class Taken(NamedTuple):
    """What loading took of a rank, in bytes over what the process had before.

    Attributes:
        weights: of the model as it is held, each tensor once.
        peak: most anonymous memory at a time.
    """

    weights: int
    peak: int


def save_model(directory: Path, *, num_layers: int, width: int, file_size: str) -> Path:
    """A Llama with random weights: 64 bytes a layer times the square of the width, and as much around."""
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
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size=file_size)
    return directory


class Peak:
    """The most anonymous memory of this process while it is entered, over what it had before."""

    def __enter__(self) -> Self:
        self._before = self._most = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._most = max(self._most, anonymous_bytes())

    @property
    def num_bytes(self) -> int:
        """So far."""
        return self._most - self._before

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self._most = max(self._most, anonymous_bytes())


def anonymous_bytes() -> int:
    """Memory of this process that no file stands for."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status does not say how much memory is anonymous")


def loaded_on_ranks(num_ranks: int, source: str, tiny: str) -> list[tuple[Taken, Taken]]:
    """Runs on each rank; what the shard took and what the whole model takes, for all ranks.

    Args:
        tiny: loaded before, so that what is imported meanwhile does not count.
    """
    load_shard(tiny, dtype="float32", num_ranks=num_ranks)
    shard = _taken(lambda: load_shard(source, dtype="float32", num_ranks=num_ranks)[0])
    whole = _taken(lambda: loading.load_model(source, dtype="float32"))
    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, (shard, whole))  # type: ignore[no-untyped-call]
    return found


def _taken(load: Callable[[], Any]) -> Taken:
    dist.barrier()
    with Peak() as peak:
        model = load()
    weights = {id(weight): weight.numel() * weight.element_size() for weight in model.parameters()}
    return Taken(sum(weights.values()), peak.num_bytes)


def _row(num_ranks: int, rank: int, shard: Taken, whole: Taken) -> str:
    sizes = (shard.weights, shard.peak, shard.peak - shard.weights, whole.weights, whole.peak)
    return f"| {num_ranks} | {rank} | " + " | ".join(f"{size / _MIB:.1f}" for size in sizes) + " |"


def main() -> None:
    """Measure two and four ranks, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_memory", description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    rows, data = [], {}
    with tempfile.TemporaryDirectory() as directory:
        source = save_model(
            Path(directory) / "model", num_layers=args.layers, width=args.width, file_size="100MB"
        )
        num_files = len(list(source.glob("*.safetensors")))
        tiny = save_model(Path(directory) / "tiny", num_layers=1, width=64, file_size="1GB")
        for num_ranks in (2, 4):
            found = run_ranks(num_ranks, loaded_on_ranks, str(source), str(tiny))
            rows += [_row(num_ranks, rank, *taken) for rank, taken in enumerate(found)]
            data[str(num_ranks)] = [
                {"shard": shard._asdict(), "whole": whole._asdict()} for shard, whole in found
            ]
    every = [one for taken in data.values() for one in taken]
    result = Report(
        name="rank_memory",
        title="What a rank takes while it loads",
        machine=machine(),
        about=f"Float32, {every[0]['whole']['weights'] / _MIB:.0f} MiB of weights in {num_files} safetensors "
        "files; anonymous memory in MiB over what the process had before.",
        bars=[
            Bar(
                what="peak of a rank over its shard",
                measured=max(one["shard"]["peak"] - one["shard"]["weights"] for one in every) / _MIB,
                limit=BUFFER_BYTES / _MIB,
                unit="MiB",
            )
        ],
        details="\n".join(
            [
                "| ranks | rank | shard | peak | over the shard | control: whole model | its peak |",
                "|---|---|---|---|---|---|---|",
                *rows,
            ]
        ),
        data=data,
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
