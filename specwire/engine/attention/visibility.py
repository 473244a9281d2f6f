"""Which keys a token sees where sequences may end in trees; on any device, without reading values back."""

from __future__ import annotations

import torch
from torch import Tensor

from specwire.core import MAX_TREE_NODES


def unseen_keys(positions: Tensor, words: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """The keys that queries do not see, bool [..., num_query, num_keys].

    A node of depth d is at position start + d and sees d + 1 nodes, so position and word give start.
    A token before the tree sees no node, and by the same sum every key up to its own.

    Args:
        positions, words: int64 [..., num_query], see `TokenTree`.
        keys: int64 [num_keys], indices of tokens in the sequence.
        window: number of keys of its own path that a query may see, its own included; None for all.
    """
    bit = torch.arange(MAX_TREE_NODES, device=words.device)
    seen = words[..., None] >> bit & 1
    start = (positions + 1 - seen.sum(-1))[..., None]
    in_prefix = keys < start
    nodes, prefix = seen.bool(), in_prefix
    if window is not None:
        nodes = nodes & (seen.flip(-1).cumsum(-1).flip(-1) <= window)  # nodes of its path, from each on
        prefix = prefix & (keys > positions[..., None] - window)
    nodes = torch.nn.functional.pad(nodes, (0, 1))  # no token sees a key after the last node
    return ~torch.where(in_prefix, prefix, nodes.gather(-1, (keys - start).clamp(0, MAX_TREE_NODES)))
