"""A draft's logits as scores of a target's tokens, on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draft_service.vocabulary import SharedVocabulary
from specwire.rule.transfer import to_device, to_host
from specwire.support import IntArray


class SharedScores:
    """From the draft's vocabulary to the target's. What is needed on the device is put there once."""

    def __init__(self, shared: SharedVocabulary) -> None:
        self._shared = shared
        self._columns: tuple[Tensor, Tensor, Tensor] | None = None

    def of_target(self, logits: Tensor) -> Tensor:
        """The draft's distribution over the tokens that it shares with the target: a shared token has its own
        probability, and that of other tokens whose text begins with it in the target's tokens.

        Args:
            logits: [num_rows, the draft's vocabulary].

        Returns:
            float32 [num_rows, the target's vocabulary], log probabilities up to a constant; -inf for tokens
            that are not shared. A row of logits that are not finite is not finite.
        """
        own_ids, first_ids, _ = self._on(logits.device)
        probs = logits.float().softmax(dim=-1)[:, own_ids]
        return probs.new_zeros(len(logits), self._shared.target_size).index_add_(1, first_ids, probs).log()

    def likeliest(self, logits: Tensor, rows: Mapping[int, IntArray | None]) -> dict[int, int]:
        """The likeliest of the draft's tokens in some rows: of those given with the row, or, where none are,
        of all that mean something to the target."""
        if not rows:
            return {}
        chosen = []
        for row, limits in rows.items():
            ids = self._on(logits.device)[2] if limits is None else to_device(limits, logits.device)
            chosen.append(ids[logits[row, ids].argmax()])
        [own_ids] = to_host(torch.stack(chosen))
        return dict(zip(rows, own_ids.tolist(), strict=True))

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if self._columns is None:
            shared = self._shared
            ids = shared.own_ids, shared.first_ids, shared.free_ids
            self._columns = tuple(to_device(each, device) for each in ids)  # type: ignore[assignment]
            assert self._columns is not None
        return self._columns
