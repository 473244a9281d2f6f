"""A client's tokens of a prompt, where a coordinator begins to report them again."""

from __future__ import annotations

from specwire import SamplingParams
from specwire.client.resume import ReceivedTokens
from specwire.rpc.wire.client import generate_request, prompt_chunk


def test_what_is_sent_again_counts_once() -> None:
    params = SamplingParams(prompt_logprobs=0, max_tokens=0)
    received = ReceivedTokens(generate_request(None, params, range(6)))
    new = []
    for first, last in ((0, 1), (1, 4), (0, 1), (1, 4), (4, 6)):  # lost after the fourth token
        tokens = [(token_id, str(token_id), None) for token_id in range(first, last)]
        chunk = received.take(prompt_chunk(first, tokens))
        new.append([token.token_id for token in chunk.prompt])
    assert new == [[0], [1, 2, 3], [], [], [4, 5]]
    assert [token.text for token in received.prompt] == list("012345")
