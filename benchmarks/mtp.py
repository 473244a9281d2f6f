"""`python -m benchmarks.mtp`: what a layer that predicts further tokens brings, beside a draft model.

The embedded target gets a layer that is trained here (`benchmarks.mtp_training`); see
`benchmarks.own_drafts`.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import mtp_training, own_drafts
from benchmarks.trees import Shape
from specwire.config.stack import UpConfig


def config(target: Path) -> UpConfig:
    """Of a stack with the layer."""
    return UpConfig(target=str(target), draft="mtp", dtype="float32", address="127.0.0.1:0", num_threads=1)


KIND = own_drafts.Kind(
    source="mtp",
    title="Multi-token prediction",
    about="The embedded target with one layer that was trained here, in float32.",
    make=mtp_training.make,
    config=config,
    shapes=[Shape(num) for num in (1, 2, 3, 4, 6, 8)],
)

if __name__ == "__main__":
    own_drafts.run(KIND, __doc__)
