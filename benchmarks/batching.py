"""transformers' continuous batching (`generate_batch`) inside the peer process."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_REQUESTS = 64
"""Most prompts in one order."""


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """Prompts to continue all at once, greedily, each by exactly `max_new_tokens` tokens."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class BatchAnswer:
    """What came of them.

    Attributes:
        token_ids: [num_prompts][num_tokens].
        first_s, last_s: [num_prompts] when a prompt's first and its last token was there, in seconds since
            the order.
    """

    token_ids: list[list[int]]
    first_s: list[float]
    last_s: list[float]


class BatchGenerator:
    """`generate_batch` on a loaded model, with its manager kept warm between orders."""

    def __init__(self, model: Any) -> None:
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        # It would say with every order that the manager stays.
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        self._model = model
        self._generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._batching = ContinuousBatchingConfig(**_SETTINGS)

    def run(self, order: BatchOrder) -> BatchAnswer:
        """Generate; the time in which the manager ends its thread after the last token does not count.

        Raises:
            RuntimeError: a request failed.
        """
        prompts = [list(prompt) for prompt in order.prompts]
        started_s = time.perf_counter()
        outputs = self._model.generate_batch(
            prompts,
            generation_config=self._generation,
            continuous_batching_config=self._batching,
            max_new_tokens=order.max_new_tokens,
            record_timestamps=True,
            persistent_manager=True,  # a new one takes seconds
        )
        done = list(outputs.values())  # in the order of the prompts
        errors = [output.error for output in done if output.error]
        if errors or len(done) != len(prompts):
            raise RuntimeError(f"{len(done)} of {len(prompts)} requests ended: {errors}")
        return BatchAnswer(
            token_ids=[output.generated_tokens for output in done],
            first_s=[output.timestamps[0] - started_s for output in done],
            last_s=[output.timestamps[-1] - started_s for output in done],
        )


# Chosen for transformers among page sizes from 16 to 256, budgets of 128 to 2,048 tokens a batch, 96 to 4,096
# blocks, both schedulers and eager attention, by CPU time with 16 streams: all lay within a tenth of each
# other, but on the widened target a budget of 128 and eager attention took a quarter more. The page size is
# the default, 256: such a page never fills with a prompt of the benchmark, so no prefix is found again.
# Blocks are far more than 64 requests need: while under 15 % of them are free, new requests wait.
_SETTINGS: dict[str, Any] = {
    "num_blocks": 256,
    "max_batch_tokens": 512,
    "max_requests_per_batch": MAX_REQUESTS,
}
