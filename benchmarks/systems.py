"""The systems side by side: each takes the same work and says how long it took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.names import ASSISTED, ASSISTED_CONSTANT, NO_SPECULATION, PLAIN, SPECWIRE
from benchmarks.peers import Order, Peer
from specwire import Client, SamplingParams
from specwire.completion import Stage, Timing

__all__ = ["ASSISTED", "ASSISTED_CONSTANT", "NO_SPECULATION", "PLAIN", "SPECWIRE"]

CONSTANT_TOKENS = 4
"""Guesses a round of the assisted generation with a constant number."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One prompt to continue by exactly `num_tokens` tokens."""

    prompt_token_ids: Sequence[int]
    num_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one system made of it.

    Attributes:
        elapsed_s: from the request to the last token, prefill included.
        num_passes: forward passes of the target, the prefill's counted.
        own_ms: the coordinator's own time over all rounds; specwire only.
    """

    elapsed_s: float
    token_ids: Sequence[int]
    num_passes: int
    own_ms: float = 0.0


class System(Protocol):
    """One way to generate."""

    name: str

    def generate(self, work: Work) -> Sample:
        """Do the work once."""
        ...


class TransformersSystem:
    """`generate` in the peer process, timed there."""

    def __init__(
        self, name: str, peer: Peer, *, assisted: bool, num_assistant_tokens: int | None = None
    ) -> None:
        self.name = name
        self._peer = peer
        self._assisted = assisted
        self._num_assistant_tokens = num_assistant_tokens

    def generate(self, work: Work) -> Sample:
        """See `System`."""
        answer = self._peer.run(
            Order(
                prompt_token_ids=work.prompt_token_ids,
                max_new_tokens=work.num_tokens,
                temperature=work.temperature,
                seed=work.seed,
                assisted=self._assisted,
                num_assistant_tokens=self._num_assistant_tokens,
            )
        )
        return Sample(elapsed_s=answer.elapsed_s, token_ids=answer.token_ids, num_passes=answer.num_passes)


class SpecwireSystem:
    """The three services, through the public client and timed at the client."""

    def __init__(self, name: str, client: Client, num_draft_tokens: int | None) -> None:
        """`num_draft_tokens` as in `SamplingParams`: None is the server's choice, 0 is none."""
        self.name = name
        self._client = client
        self._num_draft_tokens = num_draft_tokens

    def generate(self, work: Work) -> Sample:
        """See `System`."""
        params = SamplingParams(
            max_tokens=work.num_tokens,
            temperature=work.temperature,
            seed=work.seed,
            num_draft_tokens=self._num_draft_tokens,
            ignore_eos=True,
        )
        started_s = time.perf_counter()
        done = self._client.generate(prompt_token_ids=work.prompt_token_ids, params=params)
        return Sample(
            elapsed_s=time.perf_counter() - started_s,
            token_ids=done.token_ids,
            num_passes=done.speculation.num_rounds,
            own_ms=own_ms(done.timing),
        )


def own_ms(timing: Timing) -> float:
    """The coordinator's own time: the rule, text, messages to the client, and the rest of its work."""
    return timing.of(Stage.RULE, Stage.EMIT, Stage.COORDINATOR)
