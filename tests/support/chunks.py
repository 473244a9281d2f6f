"""Chunks as the coordinator sends them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specwire.completion import ResumeInfo, Token
from specwire.core import Logprobs, Rule
from specwire.rpc.wire.client import OpenChunk
from specwire.v1 import generation_pb2


def message_of(
    tokens: Sequence[Token], held: Sequence[Token] = (), rejected: Sequence[Token] = (), first_index: int = 0
) -> generation_pb2.Chunk:
    """The chunk of one round with these tokens."""
    making = OpenChunk(ResumeInfo(seed=0, rule=Rule.GUMBEL, context_digest=""))
    making.skip(first_index)
    items = [making.item(each.token_id, each.fate, each.source, _logprobs(each)) for each in (*tokens, *held)]
    for item, token in zip(items, tokens, strict=False):
        making.add(item, token.text)
    for token in rejected:
        making.reject(token.token_id, token.source, token.text)
    return making.take(items[len(tokens) :]).chunk


def _logprobs(token: Token) -> Logprobs | None:
    if token.logprob is None:
        return None
    entries = [(token.token_id, token.logprob), *token.top_logprobs]
    token_ids, values = zip(*entries, strict=True)
    return Logprobs(np.array(token_ids), np.array(values, np.float32), len(token.top_logprobs))
