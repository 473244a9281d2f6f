"""`python -m benchmarks.dflash`: what a block drafter brings, beside a draft model.

It is trained here for the embedded target (`benchmarks.dflash_training`); see `benchmarks.own_drafts`.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import dflash_training, own_drafts
from benchmarks.trees import Shape
from specwire.config.stack import UpConfig


def config(drafter: Path) -> UpConfig:
    """Of a stack with the drafter."""
    return UpConfig(draft=f"dflash:{drafter}", dtype="float32", address="127.0.0.1:0", num_threads=1)


KIND = own_drafts.Kind(
    source="dflash",
    title="Block drafters",
    about="The embedded target and a drafter of two layers that was trained here, in float32.",
    make=dflash_training.make,
    config=config,
    shapes=[Shape(2), Shape(4), Shape(7), Shape(8, 3), Shape(16, 4), Shape(32, 7)],
)

if __name__ == "__main__":
    own_drafts.run(KIND, __doc__)
