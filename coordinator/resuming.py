"""Going on with a generation that another coordinator began. Knows no grpc.

The client sends its request again, with the tokens that it has. They count as emitted: prompt and generated
tokens are committed, while the length of the prompt, from which penalties on the output count, stays. So
everything after them is as if this coordinator had come so far itself.

**Why it is exact.** Where tokens are matched, the next one is a function of seed and committed tokens, so the
text is that of an undisturbed generation. Under rejection sampling the text may differ, since rounds begin
elsewhere, but its law does not: a round ends by what came before it, so where the seam lies says nothing
about the tokens after it, and given those before it they follow the target's law. Random numbers of the
positions after it may have been used before, for tokens that nobody saw or judged.

This needs *all* tokens of the rounds that the client heard of, those included whose text is held back. To
draw the held ones anew would bend the law, though nobody saw them. Say `a` is held back, as it may begin the
stop string "ab", and `b` is not, each with probability 1/2. A generation cut after one token would keep every
`b` and draw again for every `a`: `b` would come with 3/4. Hence `Chunk.held`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specwire.completion import ResumeInfo
from specwire.core import ModelInfo, SamplingParams
from specwire.errors import HandshakeError, InvalidRequestError

_MAX_DIGEST_LEN = 64
"""Of any digest, of this version or another."""


def context_digest(prompt: Sequence[int], target: ModelInfo) -> str:
    """Of the target, its tokenizer and the prompt: what a generation depends on beside its parameters."""
    names = (target.name, target.weights_fingerprint, target.tokenizer_fingerprint, target.dtype)
    model = "\0".join((*names, str(target.vocab_size), "")).encode()
    return hashlib.sha256(model + np.asarray(prompt, "<i8").tobytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Seam:
    """Where a stream takes a generation on; at its beginning, usually.

    Attributes:
        token_ids: generated before.
        info: what the client must send along to have it resumed once more.
    """

    token_ids: Sequence[int]
    info: ResumeInfo


def find_seam(
    token_ids: Sequence[int],
    digest: str,
    *,
    prompt: Sequence[int],
    params: SamplingParams,
    target: ModelInfo,
) -> Seam:
    """Check what a request says of an earlier stream; seed and rule are chosen by now.

    Args:
        token_ids: `generated_token_ids` of the request.
        digest: its `context_digest`, empty for none.

    Raises:
        InvalidRequestError: an id is outside the vocabulary, or the digest is none.
        HandshakeError: the text would not be that of one model after one prompt.
    """
    for i, token_id in enumerate(token_ids):
        if not 0 <= token_id < target.vocab_size:
            problem = f"is outside the vocabulary of {target.vocab_size}"
            raise InvalidRequestError(f"generated_token_ids[{i}]", token_id, problem)
    if len(digest) > _MAX_DIGEST_LEN:
        raise InvalidRequestError("context_digest", f"{len(digest)} characters", f"over {_MAX_DIGEST_LEN}")
    ours = context_digest(prompt, target)
    if digest and digest != ours:
        raise HandshakeError(
            "the generation to be resumed began with another target, tokenizer or prompt: "
            f"context_digest={digest}, here {ours}"
        )
    assert params.seed is not None
    assert params.rule is not None
    return Seam(token_ids, ResumeInfo(seed=params.seed, rule=params.rule, context_digest=ours))
