"""Resuming a generation that another coordinator began. Knows no grpc.

The client sends its request again, with the tokens that it has received. They count as emitted: prompt and
generated tokens are committed, while the prompt length, from which penalties on the output count, stays. So
everything after them is as if this coordinator had generated them itself.

**Why it is exact.** Where tokens are matched, the next one is a function of the seed and the committed
tokens, so the text is that of an uninterrupted generation. Under rejection sampling the text may differ,
since rounds begin at other positions, but its distribution does not: a round ends depending on what came
before it, so the position of the resume point carries no information about the tokens after it, and given
those before it they follow the target's distribution. Random numbers of the positions after it may have been
used before, for tokens that were neither sent nor judged.

This needs *all* tokens of the rounds that the client has heard of, including those whose text is held back.
Drawing the held ones again would bias the distribution, although the client never saw their text. Say `a` is
held back, as it may begin the stop string "ab", and `b` is not, each with probability 1/2. A generation cut
after one token would keep every `b` and draw again for every `a`: `b` would have probability 3/4. Hence
`Chunk.held`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from specwire.completion import ResumeInfo
from specwire.core import ModelInfo, SamplingParams, check_token_ids
from specwire.errors import HandshakeError, InvalidRequestError

_MAX_DIGEST_LEN = 64
"""Longest digest of any version, in characters."""


def context_digest(prompt: Sequence[int], target: ModelInfo, adapter: str = "") -> str:
    """Of the target, its adapter of this name, its tokenizer and the prompt: what a generation depends on
    besides its parameters."""
    names = [target.name, target.weights_fingerprint, target.tokenizer_fingerprint, target.dtype]
    names.append(str(target.vocab_size))
    if target.batch_invariant:  # the text is to go on as it would have
        names.append(f"batch-invariant, {target.num_ranks} ranks")
    if adapter:
        names.append(f"adapter {target.adapters[adapter]}")
    model = "\0".join((*names, "")).encode()
    return hashlib.sha256(model + np.asarray(prompt, "<i8").tobytes()).hexdigest()[:16]


def checked_resume_info(
    generated_token_ids: Sequence[int],
    digest: str,
    *,
    prompt: Sequence[int],
    params: SamplingParams,
    target: ModelInfo,
) -> ResumeInfo:
    """Check what a request says about an earlier stream; the result is what resumes this one.

    Args:
        generated_token_ids: by the earlier stream; empty for a new generation.
        digest: the earlier stream's `context_digest`; empty for none.
        params: with a seed and a rule.

    Raises:
        InvalidRequestError: an id is outside the vocabulary, or the digest is too long.
        HandshakeError: target, adapter, tokenizer or prompt differ from those of the earlier stream.
    """
    check_token_ids("generated_token_ids", generated_token_ids, target.vocab_size)
    if len(digest) > _MAX_DIGEST_LEN:
        raise InvalidRequestError("context_digest", f"{len(digest)} characters", f"over {_MAX_DIGEST_LEN}")
    ours = context_digest(prompt, target, params.adapter)
    if digest and digest != ours:
        raise HandshakeError(
            "the generation to be resumed began with another target, adapter, tokenizer or prompt: "
            f"context_digest={digest}, here {ours}"
        )
    assert params.seed is not None
    assert params.rule is not None
    return ResumeInfo(seed=params.seed, rule=params.rule, context_digest=ours)
