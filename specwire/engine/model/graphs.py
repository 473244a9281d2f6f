"""Padded steps captured once and replayed: on CUDA, a step is then one launch instead of a thousand.

A bucket (`padded.py`) is captured when it is used for the second time, up to a limit; before that it runs
eagerly. If a capture fails (a model that waits for the device inside a pass), all steps run eagerly.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from specwire.config.services import ModelServiceConfig
from specwire.engine.batch import Batch
from specwire.engine.model.padded import Bucket, Buckets, StepInputs
from specwire.rule.captured import CudaReplay, EagerReplay, Replay

log = logging.getLogger(__name__)

MAX_GRAPHS = 96
_RECORD_AT = 2


def make_replay(config: ModelServiceConfig, device: torch.device) -> Replay | None:
    """How passes of a few fixed sizes are repeated; None to run each pass as it is."""
    if device.type != "cuda":
        return None
    if config.cuda_graphs:
        return CudaReplay()
    return EagerReplay() if config.batch_invariant else None


class PaddedSteps:
    """Runs packed rows in buckets.

    Args:
        run_model: on the inputs of a bucket; returns logits [num_tokens, vocab_size], the wanted rows first.
        replay: how buckets are captured.
        scratch_slot: slot that padding tokens write to.

    Attributes:
        recorded: captured steps.
    """

    def __init__(
        self,
        run_model: Callable[[StepInputs], Tensor],
        buckets: Buckets,
        replay: Replay,
        device: torch.device,
        scratch_slot: int,
    ) -> None:
        self.buckets, self.run_model = buckets, run_model
        self._replay: Replay | None = replay
        self._device = device
        self._scratch_slot = scratch_slot
        self._inputs = functools.cache(self.new_inputs)  # the same memory for all steps of a size
        self.recorded: dict[Bucket, Callable[[], Tensor]] = {}
        self._num_used: Counter[Bucket] = Counter()

    def run(self, row: Batch) -> Tensor | None:
        """Logits float32 [len(row.rows), vocab_size], in new memory; None if the row fits no bucket."""
        bucket = self.buckets.fit(row)
        if bucket is None:
            return None
        self._inputs(bucket).fill(row)
        self._num_used[bucket] += 1
        if self._num_used[bucket] == _RECORD_AT:
            self._record(bucket)
        replay = self.recorded.get(bucket)
        logits = replay() if replay else self.run_model(self._inputs(bucket))
        return logits[: len(row.rows)].to(torch.float32, copy=True)

    def warm(self) -> None:
        """Capture the buckets of a single stream, so that its first rounds need not wait for that."""
        for bucket in self.buckets.single_stream():
            self._inputs(bucket).fill(None)
            self._num_used[bucket] = _RECORD_AT
            self._record(bucket)

    def stop_replaying(self) -> None:
        """Run padded steps eagerly from now on."""
        self._replay = None
        self.recorded.clear()

    def new_inputs(self, bucket: Bucket) -> StepInputs:
        return StepInputs(bucket, self._device, self._scratch_slot)

    def _record(self, bucket: Bucket) -> None:
        """Running a step more than once is harmless: it writes the same keys to the same slots."""
        if self._replay is None or bucket in self.recorded or len(self.recorded) >= MAX_GRAPHS:
            return
        inputs = self._inputs(bucket)
        try:
            self.recorded[bucket] = self._replay.capture(lambda: self.run_model(inputs))
        except Exception as error:
            log.warning("steps run without CUDA graphs: %s", str(error).partition("\n")[0])
            self._replay = None
