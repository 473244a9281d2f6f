"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass, field

NUM_STEP_SIZES = 12
"""Buckets of batch sizes: powers of two up to 1,024, and one for all above."""


@dataclass(slots=True)
class EngineStatus:
    """Counts, as `GetModelInfo` reports them. Those of steps are totals over all so far.

    Attributes:
        num_steps: forward passes, those of single jobs after a failed step included.
        num_tokens: tokens run in them.
        step_ns: time of all steps.
        step_sizes: [NUM_STEP_SIZES] steps by batch size: up to 1, 2, 4, 8, ... and any number of sequences.
        step_sequences: sum of the batch sizes of all steps.
        silent_s: how long a device that hangs has been silent; 0 while it makes progress.
    """

    num_steps: int = 0
    num_tokens: int = 0
    step_ns: int = 0
    step_sizes: list[int] = field(default_factory=lambda: [0] * NUM_STEP_SIZES)
    step_sequences: int = 0
    num_sequences: int = 0
    num_requests: int = 0
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    num_waiting: int = 0
    silent_s: float = 0.0

    def add_pass(self, num_tokens: int) -> None:
        self.num_steps += 1
        self.num_tokens += num_tokens

    def add_step(self, num_sequences: int, step_ns: int) -> None:
        self.step_ns += step_ns
        self.step_sequences += num_sequences
        self.step_sizes[min((num_sequences - 1).bit_length(), NUM_STEP_SIZES - 1)] += 1
