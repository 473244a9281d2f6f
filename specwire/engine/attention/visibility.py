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
    start = positions + 1 - seen.sum(-1)
    before = keys < start[..., None]
    nodes = seen.bool()
    if window is not None:
        nodes &= seen.flip(-1).cumsum(-1).flip(-1) <= window  # its own path, from each node on
        before &= keys > positions[..., None] - window
    nodes = torch.nn.functional.pad(nodes, (0, 1))  # a key past the tree's last node is hidden
    place = (keys - start[..., None]).clamp(0, MAX_TREE_NODES)
    return ~torch.where(keys < start[..., None], before, nodes.gather(-1, place))
