"""Outputs of earlier generations, to draft from: bounded, and separate where they must not be seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from specwire.proposals.history import NO_TOKENS, TokenArray

MAX_SCOPES = 128
MAX_TOKENS = 16_384
"""Of a scope; a look-up takes time with them."""
MAX_BYTES = MAX_SCOPES * MAX_TOKENS * 4


class EarlierOutputs:
    """The latest outputs of each scope, oldest first; at most MAX_BYTES for tokens.

    A scope is the set of requests that may be drafted for from each other's outputs. A client sees rejected
    draft tokens, so a scope must not be wider than who may read the outputs. The least recently used scope
    goes first, and of a scope its oldest tokens.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, TokenArray] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Of all tokens that are kept."""
        return sum(tokens.nbytes for tokens in self._tokens.values())

    def of(self, scope: str | None) -> TokenArray:
        """[num_tokens] of a scope, never changed afterwards; none of None."""
        if scope is None or scope not in self._tokens:
            return NO_TOKENS
        self._tokens.move_to_end(scope)
        return self._tokens[scope]

    def add(self, scope: str | None, token_ids: Sequence[int]) -> None:
        """Append an output to a scope; None keeps nothing."""
        if scope is None or not token_ids:
            return
        new = np.array(token_ids[-MAX_TOKENS:], dtype=np.int32)
        self._tokens[scope] = np.concatenate([self.of(scope), new])[-MAX_TOKENS:].copy()
        self._tokens.move_to_end(scope)
        if len(self._tokens) > MAX_SCOPES:
            self._tokens.popitem(last=False)
