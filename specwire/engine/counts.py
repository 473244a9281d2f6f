"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass

NUM_STEP_SIZES = 12
"""Buckets of batch sizes: powers of two up to 1,024, and one for all above."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counts, as `GetModelInfo` reports them."""

    num_sequences: int
    num_requests: int
    num_steps: int
    num_tokens: int
    num_preemptions: int
    num_hit_tokens: int
    num_waiting: int
    step_ns: int
    step_sizes: tuple[int, ...]
    """[NUM_STEP_SIZES] number of steps by batch size: up to 1, 2, 4, 8, ... and any number of sequences."""
    step_sequences: int
    """Sum of the batch sizes of all steps."""
    silent_s: float
    """How long a device that hangs has been silent, in seconds; 0 while it makes progress."""


class StepCounts:
    """Totals over all steps so far.

    Attributes:
        num_steps: forward passes, those of single jobs after a failed step included.
        num_tokens: tokens run in them.
        step_ns: time of all steps.
        step_sizes, step_sequences: see `EngineStatus`.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0
        self.step_ns = 0
        self.step_sizes = [0] * NUM_STEP_SIZES
        self.step_sequences = 0

    def add_pass(self, num_tokens: int) -> None:
        """A forward pass ended."""
        self.num_steps += 1
        self.num_tokens += num_tokens

    def add_step(self, num_sequences: int, step_ns: int) -> None:
        """A step ended."""
        self.step_ns += step_ns
        self.step_sequences += num_sequences
        self.step_sizes[min((num_sequences - 1).bit_length(), NUM_STEP_SIZES - 1)] += 1
