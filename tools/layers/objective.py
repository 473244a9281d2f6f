"""What leaving out some blocks promises: tokens a second by the closed form, from measurements of the target.

    speed-up(γ) = (1 + reached_1 + ... + reached_γ) · pass(1) / (pass(γ + 1) + γ · draft)

reached_k is the share of places in the target's own greedy text where k or more draft tokens are right;
pass(n) is the time of a pass of n tokens, and draft that of a draft pass. Drafts are run as in service,
behind the keys that the whole model computed. Source of the closed form: Leviathan et al. 2023 (arXiv
2211.17192), section 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from specwire.config.blocks import ATTENTION, Block
from specwire.engine.batch import Feed
from specwire.engine.cache.kv_cache import SequenceCache
from specwire.engine.layers.blocks import Blocks, ModelBlocks
from specwire.engine.model.runner import ModelRunner

NUM_PLACES = 16
"""In each text, at which tokens are drafted."""
_STRIDE = 4
"""Tokens from one place to the next."""
_REPETITIONS = 25


class Costs(NamedTuple):
    """Times of passes of one sequence, in ms.

    Attributes:
        passes: [num_draft_tokens + 1] of 1, 2, ... tokens.
        attention, mlp: that leaving out one such block saves.
    """

    passes: Sequence[float]
    attention: float
    mlp: float

    def draft(self, blocks: Sequence[Block]) -> float:
        """A draft pass without these blocks."""
        num_attentions = sum(block.kind == ATTENTION for block in blocks)
        saved = num_attentions * self.attention + (len(blocks) - num_attentions) * self.mlp
        return max(0.0, self.passes[0] - saved)


class Promise(NamedTuple):
    """Of a set of blocks that are left out.

    Attributes:
        num_draft_tokens: with the highest predicted speed.
        tokens_a_pass: that a round of so many commits.
        cost: of a draft pass, in passes of the target.
        speedup: predicted, over plain decoding.
    """

    blocks: tuple[Block, ...]
    num_draft_tokens: int
    tokens_a_pass: float
    cost: float
    speedup: float


def promise(blocks: tuple[Block, ...], reached: Sequence[float], costs: Costs) -> Promise:
    """By the closed form, with the best number of draft tokens.

    Args:
        reached: [num_draft_tokens], share of places where so many draft tokens are right.
    """
    plain, draft = costs.passes[0], costs.draft(blocks)
    tokens = [*accumulate(reached, initial=1.0)]
    speedups = [tokens[num] * plain / (costs.passes[num] + num * draft) for num in range(1, len(reached) + 1)]
    best = max(range(len(speedups)), key=speedups.__getitem__)
    return Promise(blocks, best + 1, tokens[best + 1], draft / plain, speedups[best])


class Trials:
    """The target's own greedy texts after some prompts, in its cache, and drafts at places in them.

    Args:
        runner: with room for all texts and their forks, see `num_pages`.
        prompts: token ids, at least one each.
        num_draft_tokens: most at each place.
    """

    def __init__(self, runner: ModelRunner, prompts: Sequence[Sequence[int]], num_draft_tokens: int) -> None:
        self._runner, self._num_draft_tokens = runner, num_draft_tokens
        prompt_lens = [*map(len, prompts)]
        self._texts = [[*prompt] for prompt in prompts]
        self._caches = [runner.new_sequence() for _ in prompts]
        num_tokens = 1 + NUM_PLACES * _STRIDE + num_draft_tokens
        pending = [*self._texts]
        for _ in range(num_tokens):
            feeds = [Feed(*each) for each in zip(self._caches, pending, strict=True)]
            chosen = runner.forward(feeds).argmax(dim=-1).tolist()
            for text, token_id in zip(self._texts, chosen, strict=True):
                text.append(token_id)
            pending = [[token_id] for token_id in chosen]
        self._places: list[tuple[SequenceCache, list[int], int]] = []
        for cache, text, length in zip(self._caches, self._texts, prompt_lens, strict=True):
            for end in range(length + 1, length + 1 + NUM_PLACES * _STRIDE, _STRIDE):
                fork = cache.fork()
                fork.truncate(end - 1)
                self._places.append((fork, text, end))

    def reached(self, left_out: Blocks) -> list[float]:
        """[num_draft_tokens], the share of places where so many draft tokens, or more, are right."""
        right, reached = self._places, []
        for depth in range(self._num_draft_tokens):
            if right:
                feeds = [Feed(fork, [text[end + depth - 1]]) for fork, text, end in right]
                chosen = self._runner.forward_without(left_out, feeds).argmax(dim=-1).tolist()
                right = [
                    (fork, text, end)
                    for (fork, text, end), token_id in zip(right, chosen, strict=True)
                    if text[end + depth] == token_id
                ]
            reached.append(len(right) / len(self._places))
        for fork, _, end in self._places:
            fork.truncate(end - 1)
        return reached

    def costs(self, blocks: ModelBlocks) -> Costs:
        """The least that was measured, kinds of passes in turns: other work of the machine only adds."""
        cache, text = self._caches[0], self._texts[0]
        length, token_ids = cache.length, [text[-1]] * (self._num_draft_tokens + 1)

        def draft(left_out: Blocks) -> None:
            self._runner.forward_without(left_out, [Feed(cache, token_ids[:1])])

        def verify(num_tokens: int) -> None:
            self._runner.forward([Feed(cache, token_ids[:num_tokens], num_tokens)])

        kinds = [
            blocks.without([block for block in blocks.all() if (block.kind == ATTENTION) == is_attention])
            for is_attention in (True, False)
        ]
        runs: list[Callable[[], None]] = [partial(draft, left_out) for left_out in kinds]
        runs += [partial(verify, num) for num in range(1, len(token_ids) + 1)]
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(_REPETITIONS):
            for run, found in zip(runs, times, strict=True):
                started_s = time.perf_counter()
                run()
                found.append((time.perf_counter() - started_s) * 1e3)
                cache.truncate(length)
        without_attention, without_mlp, *passes = map(min, times)
        saved = [(passes[0] - each) / blocks.num_layers for each in (without_attention, without_mlp)]
        # A pass of more tokens does not cost less: noise of the measurement.
        return Costs([*accumulate(passes, max)], *(max(0.0, each) for each in saved))

    def close(self) -> None:
        """Release all memory."""
        for cache in (*self._caches, *(fork for fork, _, _ in self._places)):
            cache.release()


def num_pages(num_prompts: int, longest_prompt: int, num_draft_tokens: int, page_size: int) -> int:
    """Of a cache that has room for all texts and their forks."""
    text_len = longest_prompt + 1 + NUM_PLACES * _STRIDE + 2 * num_draft_tokens + 1
    pages_of_fork = -(-num_draft_tokens // page_size) + 1
    return num_prompts * (-(-text_len // page_size) + 1 + NUM_PLACES * pages_of_fork)
