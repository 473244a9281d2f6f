"""What passes cost, measured once a model is loaded: what a coordinator's first choice goes by.

From then on a target's engine corrects it with every pass that it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from specwire.core import Load, SamplingParams
from specwire.engine import chosen
from specwire.engine.batch import Feed
from specwire.engine.cache.kv_cache import SequenceCache
from specwire.engine.device import Runner
from specwire.proposals.estimate.costs import CostModel
from specwire.proposals.growth import NUM_EXPANDED, NUM_RANKS
from specwire.proposals.tree import TokenTree
from specwire.rule.choices import SHARPNESS, Kind, likeliest
from specwire.rule.columns import GREEDY, Encoded
from specwire.rule.transfer import to_host
from specwire.support import IntArray

_SIZES = ((1, 1), (1, 5), (1, 17), (8, 1), (8, 5), (32, 1))
"""Sequences of a pass, and tokens of each: plain decoding, a chain, a tree, and many streams."""
_NUM_TIMES = 4
"""Passes of each size, of which the shortest one counts: the first takes longer, and any may be paused."""
_NUM_STEPS = 8
"""Of a chain; as for passes, the shortest of so many chains counts."""
_MOST_S = 1.0
"""No more sizes are begun after that."""


def measure(runner: Runner) -> CostModel:
    """Of sizes that fit, by sequences and tokens; on the thread that runs the passes."""
    costs = CostModel(2)
    costs.assume([(each[:2], each[2]) for each in _measured(runner)])
    return costs


def measure_draft(runner: Any) -> CostModel:
    """The same of a draft model that runs after the target's passes, or goes on after its own (a
    `ModelRunner`): by nodes, one of each sequence, since what a sequence costs is most of what a node does,
    and by the share of the passes after which the host chooses tokens, where the device chooses those of
    chains."""
    costs = CostModel(2)
    if runner.can_decode:
        costs.assume([*_draft_measured(runner)])
    else:
        costs.assume([((each[1], 0), each[2]) for each in _measured(runner) if each[0] == each[1]])
    return costs


def as_load(costs: CostModel, draft_costs: CostModel | None) -> Load:
    """What both measured, for a handshake."""
    of_draft = (draft_costs.base, *draft_costs.rates) if draft_costs else ()
    return Load(0, 1, *map(int, (costs.known_base, *costs.rates, *of_draft)))


def _draft_measured(runner: Any) -> Iterator[tuple[tuple[int, int], float]]:
    """Nodes of a step, and the nanoseconds that it takes: one of each sequence, chosen by the device, and a
    depth of trees, whose tokens the host chooses."""

    def decode(caches: list[SequenceCache]) -> None:
        num = len(caches)
        logits = torch.zeros((num, runner.vocab_size), device=runner.device)
        greedy, ones = [Encoded.of(SamplingParams(temperature=0), 0)] * num, [1] * num
        choice = chosen.choice(Kind(GREEDY, is_cut=False), greedy, ones, ones, _NUM_STEPS, logits)
        if found := runner.decode(caches, logits, choice):
            to_host(*found)

    def expand(caches: list[SequenceCache]) -> None:
        token_ids, tree = np.arange(NUM_EXPANDED) % runner.vocab_size, TokenTree(0, (-1,) * NUM_EXPANDED)
        logits = runner.forward([Feed(cache, token_ids, NUM_EXPANDED, tree) for cache in caches])
        to_host(*likeliest(logits.log_softmax(dim=-1), most=NUM_RANKS, sharpness=SHARPNESS))

    for run, num_nodes, num_steps, is_hosted in ((decode, 1, _NUM_STEPS, 0), (expand, NUM_EXPANDED, 1, 1)):
        started_s = time.perf_counter()
        for num in (1, 8):
            if time.perf_counter() - started_s > _MOST_S or num > runner.pool.num_pages:
                break
            yield (num * num_nodes, is_hosted), _shortest_ns(runner, num, run) / num_steps


def _measured(runner: Runner) -> Iterator[tuple[int, int, int]]:
    """Sequences, tokens of all of them, and nanoseconds of a pass."""
    started_s = time.perf_counter()
    for num_sequences, num_tokens in _SIZES:
        pages = num_sequences * -(-num_tokens // runner.pool.page_size)
        if time.perf_counter() - started_s > _MOST_S or pages > runner.pool.num_pages:
            break
        token_ids = np.arange(num_tokens) % runner.vocab_size
        run = partial(_pass, runner, token_ids)
        yield num_sequences, num_sequences * num_tokens, _shortest_ns(runner, num_sequences, run)


def _pass(runner: Runner, token_ids: IntArray, caches: list[SequenceCache]) -> None:
    feeds = [Feed(cache, token_ids, len(token_ids)) for cache in caches]
    runner.run(feeds, None, _nothing)
    runner.end_step()


def _shortest_ns(runner: Runner, num_sequences: int, run: Callable[[list[SequenceCache]], None]) -> int:
    """What it takes with so many empty sequences."""
    caches, times_ns = [runner.new_sequence() for _ in range(num_sequences)], []
    try:
        for _ in range(_NUM_TIMES):
            for cache in caches:
                cache.truncate(0)
            began_ns = time.perf_counter_ns()
            run(caches)
            times_ns.append(time.perf_counter_ns() - began_ns)
    finally:
        for cache in caches:
            cache.release()
    return max(1, min(times_ns))


def _nothing(question: object, logits: object) -> None:
    """What is decided about rows that nobody wants: a function of a module, because ranks get it pickled."""
