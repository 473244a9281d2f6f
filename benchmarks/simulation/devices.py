"""Simulated devices: the real engine and the emulated models, whose passes take simulated time.

The distribution is that of `specwire.engine.emulated`, token for token. With `Exact` what is made of it is
the real services' own code; with `Fast`, for greedy decoding only, a short cut that comes to the same tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draft_service.drafter import DraftJob
from specwire import clock
from specwire.core import Verdict
from specwire.engine.batch import Feed
from specwire.engine.device import NO_DRAFTING, Decider
from specwire.engine.drawn import Drawn
from specwire.engine.emulated import PROBS, EmulatedModel, EmulatedRunner
from specwire.engine.jobs import Job
from specwire.engine.loop import Engine
from specwire.engine.threads import ComputeThread
from specwire.proposals.estimate.costs import CostModel
from specwire.proposals.growth import NUM_RANKS
from specwire.rule.choices import SHARPNESS
from specwire.support import IntArray
from verify_service.verifier import VerifyJob

_NUM_PAGES = 1 << 18
_PAGE_SIZE = 16
_NUM_LIKELY = 4
_MAX_NUM_TOKENS = 2048
"""As the services' default."""
_RESOLUTION_S = 1e-9
"""Of the virtual clock."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Of a forward pass: `base_ms` for one token of one sequence, and more for each one beyond."""

    base_ms: float
    sequence_us: float = 0.0
    token_us: float = 0.0

    def seconds(self, num_sequences: int, num_tokens: int) -> float:
        """Of a pass over so many tokens of so many sequences."""
        beyond_us = self.sequence_us * (num_sequences - 1) + self.token_us * (num_tokens - 1)
        return self.base_ms / 1e3 + beyond_us / 1e6

    def measured(self) -> CostModel:
        """As a service measures it before its first request."""
        costs, sizes = CostModel(2), ((1, 1), (1, 17), (8, 1), (8, 5), (32, 1))
        costs.assume([((n, n * each), 1e9 * self.seconds(n, n * each)) for n, each in sizes])
        return costs


class LogitsDecider:
    """Passes on the logits themselves, for tests and simulations.

    Args:
        consume: called with the jobs of a step whose rows are complete, and their logits.
    """

    drafting = NO_DRAFTING

    def __init__(self, consume: Callable[[list[Job], Any], None]) -> None:
        self._consume = consume

    def ask(self, jobs: Sequence[Job]) -> int:
        """See `Decider`."""
        return len(jobs)

    @staticmethod
    def decide(question: int, logits: Tensor) -> Tensor:
        """See `Decider`."""
        return logits

    def apply(self, jobs: Sequence[Job], answer: Tensor) -> None:
        """See `Decider`."""
        self._consume(list(jobs), answer)


class Device:
    """What passes run on; while several do, each takes `slowdown` times as long."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown, self._num_running = slowdown, 0
        self._changed = asyncio.Event()

    async def run(self, pass_s: float) -> None:
        """A pass that takes so long alone."""
        loop = asyncio.get_running_loop()
        self._change(1)
        while pass_s > _RESOLUTION_S:
            started_s, slowdown = loop.time(), self._slowdown if self._num_running > 1 else 1.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pass_s * slowdown):
                    await self._changed.wait()
            pass_s -= (loop.time() - started_s) / slowdown
        self._change(-1)

    def _change(self, by: int) -> None:
        """Wake all passes, to look at their number anew."""
        self._num_running += by
        self._changed.set()
        self._changed = asyncio.Event()


class Rows(NamedTuple):
    """Instead of logits: where a law is asked for, int64 [n] each."""

    positions: IntArray
    tokens_before: IntArray


class VirtualRunner(EmulatedRunner):
    """The emulated runner without its sleep; `step_s` is what the last pass costs, in seconds."""

    def __init__(self, model: EmulatedModel, cost: StepCost, *, exact: bool) -> None:
        super().__init__(model, num_pages=_NUM_PAGES, page_size=_PAGE_SIZE)
        self._cost, self._exact = cost, exact
        self.step_s = 0.0

    def forward(self, feeds: Sequence[Feed]) -> Any:
        """The logits, or just `Rows` where logits are not read."""
        rows = Rows(*self._append(feeds))
        self.step_s = self._cost.seconds(len(feeds), sum(len(feed.token_ids) for feed in feeds))
        return torch.from_numpy(self._model.log_probs(*rows)) if self._exact else rows

    def end_step(self) -> None:
        """The engine lets the time pass."""


class _Inbox(queue.SimpleQueue[Callable[[], None]]):
    """Orders to the engine, which a task waits for instead of a thread."""

    def __init__(self) -> None:
        self._filled = asyncio.Event()

    def put(self, item: Callable[[], None], block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self._filled.set()

    async def arrival(self, timeout_s: float | None = None) -> None:
        """Wait for an order, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s if self.empty() else 0):
                self._filled.clear()
                await self._filled.wait()


class _NoThread(ComputeThread):
    def __init__(self) -> None:
        """Nothing is started."""

    def start(self, function: Callable[[], None]) -> None:
        """The engine's task does its work."""


class VirtualEngine(Engine):
    """The real engine: only its thread is a task, and its waits are in simulated time."""

    def __init__(
        self,
        runner: VirtualRunner,
        decider: Decider,
        context_len: int,
        device: Device,
        costs: CostModel | None = None,
    ) -> None:
        super().__init__(
            runner,
            decider,
            max_num_tokens=_MAX_NUM_TOKENS,
            max_prefill_tokens=256,
            context_len=context_len,
            thread=_NoThread(),
            prefix_sharing=False,
            costs=costs,
        )
        self._inbox: _Inbox = _Inbox()
        self._virtual_runner, self._device = runner, device
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        """As `Engine._run`."""
        while True:
            self._drain_inbox(timeout_s=0)
            while wait_s := self._gathering_s():
                await self._inbox.arrival(wait_s)
                self._drain_inbox(timeout_s=0)
            if self._queues:
                await self._timed_step()
            else:
                await self._inbox.arrival()

    async def _timed_step(self) -> None:
        started_ns = clock.stopwatch_ns()
        with torch.inference_mode():
            step = self._begin_step(started_ns)
        if step is not None:
            await self._device.run(self._virtual_runner.step_s)
            self._end_step(step, started_ns)


def _shares(num_likely: int) -> list[float]:
    """[NUM_RANKS + 1] as of the real draft, where only so many tokens are likely."""
    weights = PROBS[:num_likely] ** SHARPNESS
    return [*(weights / weights.sum()).tolist(), *[0.0] * (NUM_RANKS + 1 - num_likely)]


_SHARES = [_shares(n) if n else [] for n in range(_NUM_LIKELY + 1)]


class GreedyDrafts:
    """As `Drafter.consume` under greedy decoding, from the emulated law's numbers instead of its logits."""

    def __init__(self, model: EmulatedModel) -> None:
        self._model = model

    def consume(self, jobs: Sequence[Job], rows: Any) -> None:
        """The likely tokens at each row."""
        vocab_size = self._model.vocab_size
        half = vocab_size // 2
        first = self._model.likeliest(*rows).tolist()
        agrees = self._model.agrees(*rows).tolist()
        num_wrong = self._model.num_wrong(*rows).tolist() if self._model.runner_up else [half] * len(first)
        ranked, shares = [], []
        for i in range(len(first)):
            likely = [(first[i] + k) % half for k in range(_NUM_LIKELY)]
            num_first = _NUM_LIKELY
            if not agrees[i]:
                wrong = [token_id + half for token_id in likely[: num_wrong[i]]]
                num_first = len(wrong)
                likely = wrong + likely if len(wrong) < _NUM_LIKELY else wrong
            others = [(likely[-1] + k) % vocab_size for k in range(1, NUM_RANKS + 2)]  # as good as impossible
            likely += [token_id for token_id in others if token_id not in likely]
            ranked.append(likely[: NUM_RANKS + 1])
            shares.append(_SHARES[num_first])
        drawn, row = Drawn([likely[0] for likely in ranked], ranked=ranked, shares=shares), 0
        for job in jobs:
            assert isinstance(job, DraftJob)
            num_rows = job.num_rows
            job.add(drawn, row)
            row += num_rows


class GreedyVerdicts:
    """As `verifier.consume` under greedy decoding, likewise."""

    def __init__(self, model: EmulatedModel) -> None:
        self._model = model

    def consume(self, jobs: Sequence[Job], rows: Any) -> None:
        """The target's own token at each row."""
        first = self._model.likeliest(*rows).tolist()
        start = 0
        for job in jobs:
            assert isinstance(job, VerifyJob)
            job.result = Verdict(job.committed_len, first[start : start + job.num_rows])
            start += job.num_rows
