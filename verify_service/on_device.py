"""Chains that a draft model in the target's process drafts on the device.

Sequences of a kind are drafted together: greedy, coupled by Gumbel noise, or drawn. What looks at a history
(a penalty, a grammar) or grows trees is left to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specwire.engine import chosen
from specwire.rule.choices import Kind
from specwire.support import Support
from verify_service.grown import Growing


def grouped(growing: Sequence[Growing]) -> dict[Kind, list[Growing]]:
    """Those that can be drafted on the device, by kind; proposals of one token are none of them."""
    found: dict[Kind, list[Growing]] = {}
    for each in growing:
        kind = chosen.kind_of(each.sequence.encoded)
        if kind is not None and each.num_ranked == 1 and each.growth.max_depth > 1:
            found.setdefault(kind, []).append(each)
    return found


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
