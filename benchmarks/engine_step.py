"""Processor time of the engine's thread for one step, by part: what a step costs beside its forward pass.

    python -m benchmarks.engine_step [--num-steps 40] [--repetitions 5] [--only verify] [--json FILE]

Every stream sends a round as soon as the last is answered: for verify one committed token and four draft
tokens, two of which are accepted; for a draft one or two committed tokens, and four steps of one token each.
The jobs of a step are submitted together. Each moment of the thread's processor time belongs to one part: the
innermost function of `PARTS` that is running. *forward* (the emulated device's table, or the model itself)
and *kernels* (what a device does with the logits) are shown, and not in the sum.

Timing a part costs about 1 µs, so functions that are called for each sequence look dearer than they are.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import importlib
import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draft_service.drafter import DraftDecider, DraftJob
from specwire.config.services import DraftConfig
from specwire.core import Rule, SamplingParams
from specwire.engine.device import Decider, Runner
from specwire.engine.emulated import EmulatedModel, EmulatedRunner
from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.loop import Engine
from specwire.engine.replies import Result
from specwire.engine.thread import ComputeThread
from specwire.support import IntArray
from verify_service.verifier import VerifyDecider, VerifyJob

NUM_DRAFT_TOKENS = 4
NUM_ACCEPTED = 2
SUPPORT_LEN = 32
VOCAB_SIZE = 64
PAGE_SIZE = 16
_PROMPT_LEN = 100
_REST = "loop"

PARTS = {
    "specwire.engine.loop:Engine._drain_inbox": "start",
    "specwire.engine.schedule:Scheduler.plan": "plan",
    "specwire.engine.executor:StepExecutor.run": "remember",
    "specwire.engine.batch:Packer._check": "pack",
    "specwire.engine.batch:Packer._pack": "pack",
    "specwire.engine.emulated:EmulatedRunner.forward": "pack",
    "specwire.engine.emulated:EmulatedModel.log_probs": "forward",
    "specwire.engine.emulated:EmulatedRunner.end_step": "forward",
    "specwire.engine.model.runner:ModelRunner._logits": "forward",
    "specwire.engine.model.runner:ModelRunner.compute": "views",
    "specwire.engine.attention.views:plan_reads": "views",
    "specwire.engine.model.padded:StepInputs.fill": "views",
    "verify_service.verifier:VerifyDecider.ask": "ask",
    "verify_service.verifier:VerifyDecider.decide": "decide",
    "verify_service.verifier:VerifyDecider.apply": "apply",
    "draft_service.drafter:DraftDecider.ask": "ask",
    "draft_service.drafter:DraftDecider.decide": "decide",
    "draft_service.drafter:DraftDecider.apply": "apply",
    "specwire.rule.random:gumbel_noise": "kernels",
    "specwire.rule.sampling:gumbel_scores": "kernels",
    "specwire.rule.sampling:greedy": "kernels",
    "specwire.rule.sampling:judge_support": "kernels",
    "specwire.rule.sampling:truncate_support": "kernels",
    "specwire.rule.sampling:draw": "kernels",
    "torch:log_softmax": "kernels",
    "torch:Tensor.exp": "kernels",
    "torch:Tensor.amax": "kernels",
    "specwire.engine.loop:Engine._finish": "replies",
    "specwire.engine.replies:Replies.flush": "replies",
}
"""Functions, and the part of a step that their own time belongs to."""
NOT_COUNTED = "forward", "kernels"
ORDER = "start", "plan", "pack", "views", "ask", "decide", "apply", "remember", "replies", _REST, *NOT_COUNTED


class PartsClock:
    """Divides the processor time of one thread among parts."""

    def __init__(self) -> None:
        self.thread_id = 0
        self._spent_ns: defaultdict[str, int] = defaultdict(int)
        self._part, self._since_ns = _REST, 0

    def reset(self) -> None:
        """Forget what was measured; called on the measured thread."""
        self.thread_id = threading.get_ident()
        self._spent_ns.clear()
        self._since_ns = time.thread_time_ns()

    def read(self) -> dict[str, int]:
        """Nanoseconds by part since `reset`; called on the measured thread."""
        self._enter(self._part)
        return dict(self._spent_ns)

    def _enter(self, part: str) -> str:
        now_ns = time.thread_time_ns()
        self._spent_ns[self._part] += now_ns - self._since_ns
        before, self._part, self._since_ns = self._part, part, now_ns
        return before

    def install(self) -> None:
        """Wrap the functions of `PARTS`, where they are defined."""
        for path, part in PARTS.items():
            module, _, name = path.partition(":")
            owner = functools.reduce(getattr, name.split(".")[:-1], importlib.import_module(module))
            last = name.rpartition(".")[2]
            is_static = isinstance(owner, type) and isinstance(owner.__dict__.get(last), staticmethod)
            timed = self._timed(getattr(owner, last), part)
            setattr(owner, last, staticmethod(timed) if is_static else timed)

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **keywords: Any) -> Any:
            if threading.get_ident() != self.thread_id:
                return function(*args, **keywords)
            before = self._enter(part)
            try:
                return function(*args, **keywords)
            finally:
                self._enter(before)

        return timed


@dataclass(frozen=True, kw_only=True)
class Load:
    """One line of the table."""

    role: str
    rule: str
    num_streams: int
    device: str = "emulated"

    @property
    def name(self) -> str:
        """Shown."""
        num_tokens = NUM_DRAFT_TOKENS + 1 if self.role == "verify" else 1
        return f"{self.role} {self.num_streams}x{num_tokens} {self.rule} {self.device}"

    @property
    def passes_per_round(self) -> int:
        """Forward passes until a job is done."""
        return 1 if self.role == "verify" else NUM_DRAFT_TOKENS

    @property
    def params(self) -> SamplingParams:
        """Of every stream, but for the seed."""
        if self.rule == "greedy":
            return SamplingParams(temperature=0, seed=1)
        return SamplingParams(rule=Rule(self.rule), seed=1)


LOADS = [
    *(Load(role="verify", rule=rule, num_streams=256) for rule in ("greedy", "gumbel", "rejection")),
    *(Load(role="verify", rule="greedy", num_streams=num) for num in (64, 1)),
    *(Load(role="draft", rule=rule, num_streams=256) for rule in ("greedy", "gumbel", "rejection")),
    Load(role="draft", rule="greedy", num_streams=1),
    *(Load(role="verify", rule="greedy", num_streams=num, device="model") for num in (256, 64, 1)),
    Load(role="draft", rule="greedy", num_streams=256, device="model"),
]


class Stream:
    """One stream's rounds, whose outcome is fixed."""

    def __init__(self, load: Load, sequence: TokenSequence, number: int) -> None:
        self._load = load
        self._sequence = sequence
        self._random = random.Random(number)
        self._supports: list[IntArray] = []
        if sequence.params.rule is Rule.REJECTION and not sequence.params.greedy:
            import numpy as np

            self._supports = [np.arange(SUPPORT_LEN, dtype=np.int64) + i for i in range(NUM_DRAFT_TOKENS)]
        self._committed: list[int] = []
        self._new = self._tokens(_PROMPT_LEN + number % PAGE_SIZE)

    def job(self) -> Job:
        """The next round."""
        base_len = len(self._committed)
        new, self._committed = self._new, self._committed + self._new
        if self._load.role == "draft":
            self._new = self._tokens(NUM_ACCEPTED + 1)
            return DraftJob(self._sequence, base_len, new, num_draft_tokens=NUM_DRAFT_TOKENS)
        drafts = self._tokens(NUM_DRAFT_TOKENS)
        self._new = [*drafts[:NUM_ACCEPTED], *self._tokens(1)]
        return VerifyJob(self._sequence, base_len, new, draft_token_ids=drafts, supports=self._supports)

    def _tokens(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


async def measure(load: Load, clock: PartsClock, num_steps: int) -> dict[str, float]:
    """Microseconds of processor time per step, by part."""
    thread = ComputeThread("engine")
    runner = thread.call(lambda: _runner(load))
    decider: Decider = VerifyDecider() if load.role == "verify" else DraftDecider(DraftConfig())
    engine = Engine(
        runner, decider, max_num_tokens=8192, max_prefill_tokens=8192, context_len=1 << 20, thread=thread
    )
    sequences = [engine.open(load.params, _PROMPT_LEN) for _ in range(load.num_streams)]
    streams = [Stream(load, sequence, i) for i, sequence in enumerate(sequences)]
    num_rounds = max(1, num_steps // load.passes_per_round)
    for i in range(2 * num_rounds):
        if i == num_rounds:
            gc.collect()
            gc.freeze()  # as services do
            num_before = engine.status().num_steps
            await _on_thread(engine, clock.reset)
        jobs = [stream.job() for stream in streams]
        await _run(engine, jobs)
    spent = await _on_thread(engine, clock.read)
    steps = engine.status().num_steps - num_before
    clock.thread_id = 0
    engine.close()
    return {part: ns / 1e3 / steps for part, ns in spent.items()}


async def _run(engine: Engine, jobs: Sequence[Job]) -> None:
    """All at once, as they arrive from a coordinator: the engine starts them together."""
    done, num_left = asyncio.Event(), len(jobs)

    def settle(results: Sequence[Result]) -> None:
        nonlocal num_left
        num_left -= len(results)
        for _, result in results:
            if isinstance(result, Exception):
                raise result
        if not num_left:
            done.set()

    with engine.together():
        for job in jobs:
            engine.submit(job, settle, NUM_DRAFT_TOKENS)
    await done.wait()


async def _on_thread(engine: Engine, function: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def call() -> None:
        loop.call_soon_threadsafe(future.set_result, function())

    engine._inbox.put(call)
    return await future


def _runner(load: Load) -> Runner:
    torch.set_num_threads(1)
    num_pages = load.num_streams * 2 * (_PROMPT_LEN // PAGE_SIZE + 20) + 64
    if load.device == "emulated":
        model = EmulatedModel(step_ms=0.0, vocab_size=VOCAB_SIZE)
        return EmulatedRunner(model, num_pages=num_pages, page_size=PAGE_SIZE)
    from specwire.engine.model.runner import ModelRunner

    return ModelRunner(_tiny_model(), num_pages=num_pages, page_size=PAGE_SIZE)


def _tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def _best(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The repetition that other processes disturbed least."""
    return min(({part: run.get(part, 0.0) for part in ORDER} for run in runs), key=_sum)


def _sum(parts: dict[str, float]) -> float:
    return sum(us for part, us in parts.items() if part not in NOT_COUNTED)


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:36}" + "".join(f"{cell:>9}" for cell in cells)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-steps", type=int, default=24, help="steps measured, after as many before")
    parser.add_argument("--repetitions", type=int, default=5, help="the best is shown")
    parser.add_argument("--only", default="", help="loads whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    clock, found = PartsClock(), {}
    clock.install()
    print("µs of processor time per step")
    print(_line("", [*ORDER[: -len(NOT_COUNTED)], "SUM", *NOT_COUNTED]))
    for load in (load for load in LOADS if options.only in load.name):
        runs = [asyncio.run(measure(load, clock, options.num_steps)) for _ in range(options.repetitions)]
        parts = _best(runs)
        counted = [parts[part] for part in ORDER if part not in NOT_COUNTED]
        found[load.name] = parts | {"sum": _sum(parts)}
        cells = [*counted, _sum(parts), *(parts[part] for part in NOT_COUNTED)]
        print(_line(load.name, [f"{cell:.0f}" for cell in cells]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
