"""`python -m benchmarks.tensor_parallel`: what a step on two ranks costs beside the same step on one.

Interleaved, step by step, on the same two ranks: the model on one of them while the other waits, its shards
as transformers runs them (DTensor parameters), its shards as plain tensors, and bare all-reduces. Then the
same step by a driver and two Ray workers, and how long a killed worker goes unnoticed and the group is away.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.bars import Bar, Report, machine
from benchmarks.ranks import NUM_RANKS, on_ranks, step_on
from specwire import embedded
from specwire.config.services import VerifyConfig
from specwire.engine.device import DeviceLostError
from specwire.engine.group.runner import GroupRunner

_BUDGET_MS = 1.0


def _save_tiny(directory: Path) -> Path:
    """Two layers of nothing much: all overhead."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def by_driver(source: str, num_steps: int) -> tuple[list[float], dict[str, float]]:
    """Milliseconds of a step through driver and Ray workers; then seconds of a loss."""
    config = VerifyConfig(
        model=source,
        dtype="float32",
        num_threads=1,
        tensor_parallel_size=NUM_RANKS,
        num_kv_tokens=1024,
    )
    started_s = time.perf_counter()
    runner = GroupRunner(config, source, "float32")
    losses = {"start_s": time.perf_counter() - started_s}
    try:
        step = step_on(runner)
        times = [step() for _ in range(num_steps)]
        losses |= _kill(runner, step)
    finally:
        runner.close()
    return times, losses


def _kill(runner: GroupRunner, step: Callable[[], float]) -> dict[str, float]:
    """End a rank while steps run."""
    os.kill(runner.locations[1].pid, signal.SIGKILL)
    killed_s = time.perf_counter()
    try:
        while True:
            step()
    except DeviceLostError:
        seen_s = time.perf_counter() - killed_s
    runner.pool.forget_all()
    runner.recover(lambda: True)
    return {"seen_s": seen_s, "back_s": time.perf_counter() - killed_s}


def _row(name: str, num_layers: int, found: dict[str, list[float]]) -> str:
    cells = [f"{mean(found[key]):.2f}" for key in ("one rank", "DTensor", "shards", "driver")]
    reduces = found["all-reduce"]
    return (
        f"| {name} | {' | '.join(cells)} | {mean(reduces):.2f} ({median(reduces):.2f}) "
        f"| {overhead_ms(found):.2f} | {allowed_ms(num_layers, found):.2f} |"
    )


def overhead_ms(found: dict[str, list[float]]) -> float:
    """What a step by the driver takes longer than one rank alone."""
    return mean(found["driver"]) - mean(found["one rank"])


def allowed_ms(num_layers: int, found: dict[str, list[float]]) -> float:
    """Two all-reduces a layer and one millisecond."""
    return 2 * num_layers * mean(found["all-reduce"]) + _BUDGET_MS


_EXPLANATION = """
The step is five tokens after a hundred. *DTensor* are the shards as transformers runs them, *shards* the same
on plain tensors with the plan's own collectives (`specwire/engine/group/sharding.py`), *driver* the latter by
a driver and Ray workers, with one message to each rank and one answer back. A step of the tiny target waits
for {num} collectives one after another: two all-reduces a layer, one for the embedding, and an all-gather of
the logits. Means, since it waits for each: on a machine with fewer free cores than ranks and threads of gloo,
a few all-reduces take many times the median (in brackets).
"""


def main() -> None:
    """Measure both models, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_parallel", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = [
        "| target | one rank (ms) | DTensor | shards | driver | all-reduce (median) | overhead | allowed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        tiny = str(_save_tiny(Path(directory) / "tiny"))
        for name, layers, source in (("tiny", 2, tiny), ("5 M", 6, str(embedded.TARGET_DIR))):
            found = on_ranks(source, args.steps)
            found["driver"], losses = by_driver(source, args.steps)
            head.append(_row(name, layers, found))
            data[name] = {
                "ms": {key: [round(ms, 4) for ms in times] for key, times in found.items()}
            } | losses
            data[name] |= {"overhead_ms": overhead_ms(found), "allowed_ms": allowed_ms(layers, found)}
    seen = ", ".join(f"{one['seen_s'] * 1e3:.0f} ms" for one in data.values())
    back = ", ".join(f"{one['back_s']:.1f} s" for one in data.values())
    result = Report(
        name="tensor_parallel",
        title="A target on two ranks",
        machine=machine(),
        about=f"Two gloo ranks with one thread each, float32; means of {args.steps} steps.",
        bars=[
            Bar(
                what="overhead of the group over 2 all-reduces a layer + 1 ms, tiny target",
                measured=data["tiny"]["overhead_ms"] / data["tiny"]["allowed_ms"],
                limit=1.0,
            ),
            Bar(
                what="seconds until a killed rank is seen",
                measured=max(one["seen_s"] for one in data.values()),
                limit=2.0,
            ),
        ],
        details="\n".join(head)
        + "\n"
        + _EXPLANATION.format(num=2 * 2 + 2)
        + f"\nA killed rank was seen after {seen}; the group was back after {back}.",
        data=data,
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
