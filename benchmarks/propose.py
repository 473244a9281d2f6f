"""`python -m benchmarks.propose`: processor time a row that `BatchDrafter.propose` takes of an engine's step.

The draft service and its link are real; its device is emulated, so that passes take no processor. The engine
sleeps and writes what the draft would. Only steps in which all rows had their proposals at hand are counted,
and nothing that is sent or received between two steps.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.report import say, summarise
from coordinator.batches import BatchDrafter, StepRow
from coordinator.cost import CallOutcome
from specwire.cli.process import Service
from specwire.config.services import CoordinatorConfig
from specwire.core import ModelInfo
from specwire.engine.emulated import EmulatedModel

DEVICE = "emulated:step_ms=1,vocab_size=1024"
MODEL = EmulatedModel.parse(DEVICE)
CONTEXT_LEN = 16384


class Sleeper:
    """An engine that accepts what its target would have written of a proposal, and writes a token more."""

    def __init__(self, num_rows: int) -> None:
        self.rows = [StepRow(np.full(CONTEXT_LEN, i, np.int32), 1, 1) for i in range(num_rows)]

    def judge(self, proposals: Sequence[Sequence[int]]) -> None:
        for i, proposal in enumerate(proposals):
            token_ids, length = self.rows[i].token_ids, self.rows[i].num_tokens
            for num_new in range(1, len(proposal) + 2):
                place = length + num_new - 1
                token_ids[place] = MODEL.likeliest(np.array([place]), token_ids[place - 1 : place])[0]
                if proposal[num_new - 1 : num_new] != [token_ids[place]]:
                    break
            self.rows[i] = StepRow(token_ids, length + num_new, num_new)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.propose", description=__doc__)
    for name, value in ("rows", 64), ("steps", 60), ("pass-ms", 200):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, text in ("num-draft-tokens", "4"), ("num-outcomes", "8"):
        parser.add_argument(f"--{name}", default=text)
    args = parser.parse_args()
    flags = ["--model", DEVICE, "--num-kv-tokens", "2000000", "--address", "127.0.0.1:0", "--grace-s", "0"]
    with contextlib.ExitStack() as stack:
        stack.callback((service := Service("draft_service", flags)).stop)
        numbers = {"num_draft_tokens": args.num_draft_tokens, "num_outcomes": args.num_outcomes}
        config = CoordinatorConfig(draft_address=service.ready(60.0), **numbers)
        target = ModelInfo(name="target", vocab_size=MODEL.vocab_size, context_len=CONTEXT_LEN)
        drafts = stack.enter_context(contextlib.closing(BatchDrafter(config, target, 8)))
        engine, us = Sleeper(args.rows), []
        for _ in range(args.steps):
            before_s = time.process_time()
            proposals = drafts.propose(engine.rows)
            took_s, counts = time.process_time() - before_s, drafts.take_counts()
            if counts.outcomes[CallOutcome.READY] == args.rows:
                us.append(1e6 * took_s / args.rows)
            engine.judge(proposals)
            time.sleep(args.pass_ms / 1e3)
    if not us:
        raise SystemExit("in no step all proposals were at hand: a longer --pass-ms")
    say(f"us a row: {summarise(us).text(1)}; {len(us)} of {args.steps} steps")


if __name__ == "__main__":
    main()
