"""What something that was trained for the embedded target brings, where it drafts inside verify.

Prompts are from files that were held out. First tokens a pass by shape; then tokens/s with shapes that the
coordinator chooses, once with the target's own passes and once with those of a larger target
(`--least-pass-ms`), where plain decoding, the trained draft and the embedded draft take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.bars import Report, machine
from benchmarks.heads import PACED_MS, rates, tokens
from benchmarks.trees import Shape
from specwire.config.stack import UpConfig


@dataclass(frozen=True)
class Kind:
    """A way in which a target drafts for itself.

    Attributes:
        source: of its proposals.
        about: what was trained.
        make: trains it for so many seconds, and writes it into a directory.
        config: of a stack with what is in such a directory.
    """

    source: str
    title: str
    about: str
    make: Callable[[Path, float], None]
    config: Callable[[Path], UpConfig]
    shapes: Sequence[Shape]


def run(kind: Kind, description: str | None) -> None:
    """Train, measure, and write the report."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{kind.source}", description=description)
    parser.add_argument("--made", type=Path, help="where what is trained is kept; trained if it is not there")
    parser.add_argument("--seconds", type=float, default=600.0, help="of training")
    parser.add_argument("--num-threads", type=int, default=2, help="of training")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=128, help="of each generation")
    parser.add_argument("--num-runs", type=int, default=8, help="of tokens/s; 0 for counts alone")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        made = args.made or Path(folder) / "made"
        if not made.exists():
            torch.set_num_threads(args.num_threads)
            kind.make(made, args.seconds)
        config = kind.config(made)
        parts = {"tokens": tokens(config, kind.shapes, args.num_prompts, args.num_tokens)}
        if args.num_runs:
            parts["rates"] = rates(kind.source, config, args.num_tokens, args.num_runs, 0.0)
            parts["paced"] = rates(kind.source, config, args.num_tokens, args.num_runs, PACED_MS)
    result = Report.of(parts, name=kind.source, title=kind.title, machine=facts, about=kind.about)
    print(result.write(args.out))
