"""What several files here share."""

from __future__ import annotations

import pytest
import torch

from tests.support.pairs import markov_logits, markov_model


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    """float32 [vocab_size, vocab_size] of `markov_model`: row a holds those after token a."""
    return markov_logits(markov_model())
