"""Masks of grammars over logits."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from specwire import Grammar, Rule, SamplingParams
from specwire.engine.grammars.matcher import LazyMasks
from specwire.rule import sampling
from specwire.rule.columns import Row, Rows

VOCAB_SIZE = 37


def test_only_rows_with_a_mask_change() -> None:
    """Tokens beyond a mask are not allowed: a padded vocabulary is wider than its tokenizer."""
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(grammar=Grammar(regex="a"), rule=Rule.GUMBEL, seed=1)
    matcher: Any = SimpleNamespace(fill=lambda *_: np.array([[0b101, 0, 0, 0b10000000]], np.uint8))
    masks = pickle.loads(pickle.dumps(LazyMasks(matcher, [], (), ())))  # as a process of a group gets them
    rows = [Row(params, 0, [], i, 1, masks=masks if i == 1 else None) for i in range(3)]
    found = sampling.apply_history(logits, Rows.of(rows))
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    assert found[1].isfinite().nonzero()[:, 0].tolist() == [0, 2, 31]
    assert torch.equal(found[1, [0, 2, 31]], logits[1, [0, 2, 31]])
