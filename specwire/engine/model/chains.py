"""Tokens one after another without the host: each is chosen on the device, and the next pass reads it.

    logits ─▶ choose ─▶ token ─▶ pass ─▶ logits ─▶ choose ...        two captured steps, repeated in turns

A small model's pass is shorter than the host needs to prepare it, choose a token and read it back. Here the
host prepares all passes at once, and reads all tokens at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from specwire.engine.batch import Batch, Segments
from specwire.engine.model.graphs import PaddedSteps, StepInputs
from specwire.rule.captured import Replay
from specwire.rule.transfer import to_device
from specwire.support import IntArray

log = logging.getLogger(__name__)

_MOST_LOOPS = 64
_LEAST_STEPS = 16
"""Sizes are powers of two from here on, so that there are few; capturing runs some steps."""


class Choice(NamedTuple):
    """How the next token of each sequence is chosen.

    Attributes:
        function: of logits [num_sequences, vocab_size] and a step of each column; its first result is the
            tokens, int64 [num_sequences]. It reads no value back to the host.
        columns: what it reads at each step, [num_steps, num_sequences, ...].
    """

    function: Callable[..., tuple[Tensor, ...]]
    columns: Sequence[Tensor]


class ChainSteps:
    """Decodes with the padded passes of a model.

    Attributes:
        can_run: until a capture fails.
    """

    def __init__(self, steps: PaddedSteps, replay: Replay) -> None:
        self.can_run = True
        self._steps = steps
        self._replay = replay
        self._loops: dict[Any, _Loop] = {}

    def run(self, batch: Batch, logits: Tensor, choice: Choice) -> tuple[Tensor, ...] | None:
        """What was chosen at each step.

        Args:
            batch: the tokens that passes are to read, one less than there are steps, of each sequence; the
                values of their ids do not matter.
            logits: after the last token that each sequence has, [num_sequences, vocab_size]; the model's own
                may be wider.

        Returns:
            The results of `choice` at all steps, [num_steps, num_sequences, ...] each, which the next call
            overwrites; None if there is no bucket for so many sequences.
        """
        num_steps, num_sequences = choice.columns[0].shape[:2]
        first = _first_of(batch, num_sequences)
        bucket = self._steps.buckets.fit(first)
        if bucket is None or not self.can_run:
            return None
        size = max(_LEAST_STEPS, 1 << (num_steps - 1).bit_length())
        widths = [each.shape[2:] for each in choice.columns]
        key = bucket, size, choice.function, logits.shape[1], *widths
        if key not in self._loops:
            if len(self._loops) >= _MOST_LOOPS:
                return None
            try:
                inputs = self._steps.new_inputs(bucket)
                self._loops[key] = _Loop(self._steps.run_model, inputs, size, logits, choice, self._replay)
            except Exception as error:
                log.warning("tokens are not chosen on the device: %s", str(error).partition("\n")[0])
                self.can_run = False
                return None
        return self._loops[key].run(first, batch.slots.reshape(num_sequences, -1).T, logits, choice.columns)


def _first_of(batch: Batch, num_sequences: int) -> Batch:
    """The first token of each sequence."""
    num_each = len(batch.token_ids) // num_sequences
    segments = batch.segments
    lens = [length - num_each + 1 for length in segments.cache_lens]
    first = Segments([*range(num_sequences + 1)], lens, segments.tables, segments.page_size, {})
    every = slice(None, None, num_each)
    rows = np.arange(num_sequences)
    return Batch(batch.token_ids[every], batch.positions[every], batch.slots[every], first, rows)


class _Loop:
    """The memory of all steps of one size, and the two that are captured."""

    def __init__(
        self,
        run_model: Callable[[StepInputs], Tensor],
        inputs: StepInputs,
        num_steps: int,
        logits: Tensor,
        choice: Choice,
        replay: Replay,
    ) -> None:
        self._run_model, self._inputs, self._function = run_model, inputs, choice.function
        num_rows = inputs.bucket.num_tokens
        # Capturing runs passes: what these write is nobody's.
        self._slots = inputs.on_device.slots.new_full((num_steps, num_rows), inputs.scratch_slot)
        self._at = self._slots.new_zeros(1)
        self._logits = logits.new_zeros((num_rows, logits.shape[1]))
        self._columns = [each.new_zeros((num_steps, num_rows, *each.shape[2:])) for each in choice.columns]
        inputs.fill()
        some = self._function(self._logits, *(each[0] for each in self._columns))
        self._results = [each.new_zeros((num_steps, *each.shape)) for each in some]
        self._choose = replay.capture(self._choose_once)
        self._advance = replay.capture(self._advance_once)

    def _choose_once(self) -> None:
        columns = (each.index_select(0, self._at)[0] for each in self._columns)
        for result, chosen in zip(self._results, self._function(self._logits, *columns), strict=True):
            result.index_copy_(0, self._at, chosen[None])

    def _advance_once(self) -> None:
        parts = self._inputs.on_device
        parts.token_ids.copy_(self._results[0].index_select(0, self._at)[0].clamp(min=0))
        parts.slots.copy_(self._slots.index_select(0, self._at)[0])
        self._logits.copy_(self._run_model(self._inputs)[:, : self._logits.shape[1]])
        for numbers in (parts.positions, parts.cache_lens, self._at):
            numbers.add_(1)

    def run(
        self, first: Batch, slots: IntArray, logits: Tensor, columns: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """See `ChainSteps.run`; slots are [num_steps - 1, num_sequences]."""
        num_steps, num = columns[0].shape[:2]
        self._inputs.fill(first)
        self._slots.fill_(self._inputs.scratch_slot)
        self._slots[: num_steps - 1, :num].copy_(to_device(slots.copy(), self._slots.device))
        self._at.zero_()
        self._logits[:num].copy_(logits)
        for ours, given in zip(self._columns, columns, strict=True):
            ours[:num_steps, :num].copy_(given)
        for step in range(num_steps):
            if step:
                self._advance()
            self._choose()
        return tuple(each[:num_steps, :num] for each in self._results)
