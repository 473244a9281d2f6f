"""`python -m benchmarks.mtp`: what a layer that predicts further tokens brings, beside a draft model.

The embedded target gets a layer that is trained here (`benchmarks.mtp_training`); prompts are from files that
were held out. First tokens a pass by length; then tokens/s with lengths that the coordinator chooses, once
with the target's own passes and once with those of a larger target (`--least-pass-ms`), where plain decoding,
the layer and the embedded draft take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from benchmarks import mtp_training
from benchmarks.bars import Report, machine
from benchmarks.heads import PACED_MS, rates, tokens
from benchmarks.trees import Shape
from specwire.config.services import UpConfig

LENGTHS = (Shape(1), Shape(2), Shape(3), Shape(4), Shape(6), Shape(8))


def config(target: Path) -> UpConfig:
    """Of a stack with the layer."""
    return UpConfig(target=str(target), draft="mtp", dtype="float32", address="127.0.0.1:0", num_threads=1)


def main() -> None:
    """Train, measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mtp", description=__doc__)
    parser.add_argument("--target", type=Path, help="directory of a target with a layer; made if not given")
    parser.add_argument("--seconds", type=float, default=600.0, help="of training")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=128, help="of each generation")
    parser.add_argument("--num-runs", type=int, default=8, help="of tokens/s")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        target, trained = args.target or Path(folder) / "target", ""
        if not target.exists():
            mtp_training.make(target, args.seconds)
            trained = f" Trained in {args.seconds:.0f} s."
        parts = {
            "tokens": tokens(config(target), LENGTHS, args.num_prompts, args.num_tokens),
            "rates": rates("mtp", config(target), args.num_tokens, args.num_runs, 0.0),
            "paced": rates("mtp", config(target), args.num_tokens, args.num_runs, PACED_MS),
        }
    result = Report.of(
        parts,
        name="mtp",
        title="Multi-token prediction",
        machine=facts,
        about=f"The embedded target with one layer, in float32.{trained}",
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
