"""Where drafts of a target less some layers should end: thresholds of confidence, replayed.

What is drafted after every place of the target's own text is computed once. How many of these tokens a
threshold lets through, and so rounds and their time, follow without the models. See `benchmarks.layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specwire.engine.batch import Feed
from specwire.engine.layers.blocks import Blocks
from specwire.engine.model.runner import ModelRunner
from specwire.rule.random import gumbel_noise
from tools.layers.objective import Costs
from verify_service.threshold import Threshold

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Place:
    """What is drafted after one place of a text.

    Attributes:
        confidences: [num_draft_tokens] of the draft in each token, given the ones before it.
        num_right: how many are right before the first wrong one.
    """

    confidences: Sequence[float]
    num_right: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """Rounds of all texts.

    Attributes:
        num_drafted, num_accepted: [num_rounds].
    """

    num_drafted: Sequence[int]
    num_accepted: Sequence[int]

    @property
    def tokens_a_round(self) -> float:
        """Accepted ones and the target's own."""
        return 1 + sum(self.num_accepted) / len(self.num_accepted)

    def speedup(self, costs: Costs, draft_ms: float) -> float:
        """Predicted, over plain decoding."""
        spent_ms = sum(costs.passes[num] + num * draft_ms for num in self.num_drafted)
        return len(self.num_drafted) * self.tokens_a_round * costs.passes[0] / spent_ms


def replay(texts: Sequence[Sequence[Place]], first: float, target_rate: float, most: int) -> Replayed:
    """Rounds with a threshold that begins anew in each text.

    Args:
        texts: the places of each.
        most: draft tokens of a round.
    """
    drafted, accepted = [], []
    for places in texts:
        threshold, place = Threshold(first, target_rate), 0
        while place < len(places):
            confidences = places[place].confidences[:most]
            unsure = (num for num, each in enumerate(confidences, 1) if each < threshold.value)
            drafted.append(next(unsure, most))
            accepted.append(min(drafted[-1], places[place].num_right))
            threshold.learn(accepted[-1], drafted[-1], was_longest=drafted[-1] == most)
            place += accepted[-1] + 1
    return Replayed(drafted, accepted)


class Texts:
    """The target's own texts after some prompts, and what it drafts in them.

    Args:
        runner: with room for `num_pages`.
        is_sampled: drawn with Gumbel noise at temperature 1, which drafts share; else the likeliest tokens.
    """

    def __init__(
        self, runner: ModelRunner, prompts: Sequence[Sequence[int]], num_tokens: int, *, is_sampled: bool
    ) -> None:
        self._runner, self._is_sampled, self._num_tokens = runner, is_sampled, num_tokens
        self._prompts, self._texts = prompts, [[*prompt] for prompt in prompts]
        self._caches = [runner.new_sequence() for _ in prompts]
        pending = [*self._texts]
        for _ in range(num_tokens):
            logits = runner.forward([Feed(*each) for each in zip(self._caches, pending, strict=True)])
            scores = self._scores(logits, range(len(prompts)), [*map(len, self._texts)])
            pending = [[token_id] for token_id in scores.argmax(dim=-1).tolist()]
            for text, [token_id] in zip(self._texts, pending, strict=True):
                text.append(token_id)

    def _scores(self, logits: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
        """[num_rows, vocab_size], the highest of which is drawn."""
        if not self._is_sampled:
            return logits
        rows = np.array(seeds, np.int64), np.array(positions, np.int64)
        return logits + gumbel_noise(*rows, logits.shape[1], logits.device).float()

    def places(self, left_out: Blocks, most: int) -> list[list[Place]]:
        """Of each text, after all of its tokens but the last `most`."""
        return [self._places(number, left_out, most) for number in range(len(self._texts))]

    def _places(self, number: int, left_out: Blocks, most: int) -> list[Place]:
        text, begin = self._texts[number], len(self._prompts[number])
        ends = range(begin, len(text) - most)
        forks = []
        for end in ends:
            forks.append(self._caches[number].fork())
            forks[-1].truncate(end - 1)
        pending, confidences, drafted = [text[end - 1] for end in ends], [], []
        for depth in range(most):
            feeds = [Feed(fork, [token_id]) for fork, token_id in zip(forks, pending, strict=True)]
            logits = self._runner.forward_without(left_out, feeds)
            scores = self._scores(logits, [number] * len(ends), [end + depth for end in ends])
            best = scores.max(dim=-1)
            confidences.append(torch.exp(best.values - scores.logsumexp(dim=-1)).tolist())
            pending = best.indices.tolist()
            drafted.append(pending)
        for fork in forks:
            fork.release()
        rows = zip(ends, zip(*confidences, strict=True), zip(*drafted, strict=True), strict=True)
        return [Place(sure, _num_equal(found, text[end:])) for end, sure, found in rows]

    def close(self) -> None:
        """Release all memory."""
        for cache in self._caches:
            cache.release()


def num_pages(prompts: Sequence[Sequence[int]], num_tokens: int, most: int) -> int:
    """Of a cache that has room for all texts and for the drafts in one of them."""
    own = sum(-(-(len(prompt) + num_tokens) // PAGE_SIZE) for prompt in prompts)
    return own + num_tokens * (-(-most // PAGE_SIZE) + 2)


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """At the beginning of both."""
    return next((num for num, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
