"""How a draft model's chains are chosen on the device, with what `ModelDrafts` chooses by on the host.

Sequences of a kind are drafted together: greedy, coupled by Gumbel noise, or drawn. What looks at a history
(a penalty, a grammar) or grows trees is left to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from specwire.engine.model.chains import Choice
from specwire.rule import random
from specwire.rule.choices import CHOICES, Kind
from specwire.rule.columns import EDITED, GREEDY, GUMBEL, MATCHED
from specwire.rule.transfer import to_device
from specwire.support import Support
from verify_service.grown import Growing
from verify_service.own import MOST_NOISE


def grouped(growing: Sequence[Growing]) -> dict[Kind, list[Growing]]:
    """Those that can be drafted on the device, by kind; proposals of one token are none of them."""
    found: dict[Kind, list[Growing]] = {}
    for each in growing:
        traits, _, (_, *cuts) = each.sequence.encoded
        if each.num_ranked == 1 and each.growth.max_depth > 1 and not traits & EDITED:
            matched = traits & MATCHED
            is_cut = cuts != [0.0, 1.0, 0.0] and matched != GREEDY
            found.setdefault(Kind(matched, is_cut), []).append(each)
    return found


def fits(kind: Kind, num_scores: int) -> bool:
    """Whether noise of so many tokens at all positions is little enough."""
    return kind.matched != GUMBEL or num_scores <= MOST_NOISE


def choice(kind: Kind, growing: Sequence[Growing], num_steps: int, logits: Tensor) -> Choice:
    """How tokens are chosen after these logits [num_sequences, vocab_size] and in the steps that follow."""
    device, (num, vocab_size) = logits.device, logits.shape
    bases = np.array([len(each.committed) for each in growing])
    seeds = np.tile([each.sequence.seed for each in growing], num_steps)
    positions = (np.arange(num_steps)[:, None] + bases).reshape(-1)
    warps = np.array([each.sequence.encoded.warps for each in growing], np.float32)
    columns = [to_device(np.tile(warps, (num_steps, 1, 1)), device)]
    if kind.matched == GUMBEL:
        noise = random.gumbel_noise(seeds, positions, vocab_size, device)
        columns.append(noise.float().view(num_steps, num, vocab_size))
    elif not kind.matched:
        drawn = random.uniforms(seeds, random.Purpose.DRAFT, positions, np.tile(bases, num_steps))
        columns.append(to_device(drawn.reshape(num_steps, num), device))
    return Choice(CHOICES[kind], columns)


def add(kind: Kind, growing: Sequence[Growing], results: Sequence[Any]) -> None:
    """What was chosen, as arrays [num_steps, num_sequences, ...], becomes the nodes of each."""
    for index, each in enumerate(growing):
        for step in range(each.growth.max_depth):
            token_id, *others = (result[step, index] for result in results)
            if kind.matched:
                if token_id < 0:
                    break
                each.growth.add(step - 1, [int(token_id)], [float(others[0])])
            else:
                ids, probs, length = others
                each.growth.add(step - 1, [max(0, int(token_id))], [1.0])
                each.supports.append(Support(ids[:length], probs[:length]))
