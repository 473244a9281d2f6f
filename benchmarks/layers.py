"""`python -m benchmarks.layers`: what leaving out layers of the embedded target brings, and their search.

- `search`: the set that Bayesian optimisation finds, beside all sets of blocks (a grid search).
- `tokens`: tokens a pass with that set, on held-out prompts, and whether texts are those of plain decoding.
- `thresholds`: what the confidence at which a proposal ends is worth, replayed (`early_exit.py`).
- `rates`: tokens/s beside plain decoding and the embedded draft, in turns, lengths chosen; `paced`: with
  passes of a larger target (`--least-pass-ms`), where a draft pass takes its share.
- `deeper`: the closed form for targets that can spare more.

Only `rates` and `paced` need an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from benchmarks import early_exit
from benchmarks.bars import Bar, Part, Report, earlier, machine
from benchmarks.embedded import corpus
from benchmarks.heads import rates
from benchmarks.trees import KINDS, cut_prompts, generate_all, table
from specwire import embedded, tokenizer
from specwire.cli.supervisor import Stack
from specwire.config.blocks import Block, parse_skip, skip_text
from specwire.config.stack import UpConfig
from specwire.engine.layers.blocks import ModelBlocks
from specwire.engine.model.loading import load_model
from specwire.engine.model.runner import ModelRunner
from tools.layers import command as search_layers
from tools.layers import search
from tools.layers.objective import NUM_PLACES, Costs, Promise, Trials, num_pages, promise
from verify_service.threshold import FIRST, TARGET_RATE

LENGTHS = (1, 2, 4, 8)
LEAST_SHARE_OF_BEST = 0.98
PACED_MS = 20.0
NUM_DRAFT_TOKENS = 8
FIRSTS, TARGET_RATES = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9), (0.7, 0.8, 0.9, 0.95)
_PAGE_SIZE = 16


# --- the search -------------------------------------------------------------------------------------


def prompts_to_search(num: int) -> list[list[int]]:
    """The beginnings of files that the embedded pair was trained on; other parts measure on held-out ones."""
    loaded = tokenizer.load(str(embedded.TARGET_DIR))
    assert loaded is not None
    documents, _ = corpus.split(corpus.read_library())
    step = max(1, len(documents) // num)
    texts = (document.text[:4000] for document in documents[::step])
    return [loaded.encode(text)[-search.PROMPT_LEN :] for text in texts][:num]


class Searched:
    """Sets of blocks of the embedded target, judged on the same places and costs."""

    def __init__(self, num_prompts: int, num_draft_tokens: int) -> None:
        prompts = prompts_to_search(num_prompts)
        room = num_pages(len(prompts), search.PROMPT_LEN, num_draft_tokens, _PAGE_SIZE)
        model = load_model(str(embedded.TARGET_DIR), dtype="float32")
        self.blocks = ModelBlocks(model)
        runner = ModelRunner(model, num_pages=room, page_size=_PAGE_SIZE)
        self._trials = Trials(runner, prompts, num_draft_tokens)
        self.costs = self._trials.costs(self.blocks, time.process_time)  # of one thread: others may compute
        self._known: dict[tuple[Block, ...], Promise] = {}

    def __call__(self, skipped: tuple[Block, ...]) -> Promise:
        if skipped not in self._known:
            reached = self._trials.reached(self.blocks.without(skipped))
            self._known[skipped] = promise(skipped, reached, self.costs)
        return self._known[skipped]

    def grid(self) -> list[Promise]:
        """Every set."""
        every = self.blocks.all()
        return [self(skipped) for size in range(1, len(every) + 1) for skipped in combinations(every, size)]


def searched(num_prompts: int, num_trials: int, picture: Path) -> Part:
    """Bayesian optimisation, then the grid."""
    searching = Searched(num_prompts, NUM_DRAFT_TOKENS)
    started_s = time.monotonic()
    tried = search.search(searching.blocks.all(), searching, num_trials)
    search_s = time.monotonic() - started_s
    best = max(tried, key=lambda each: each.speedup)
    print(best, searching.costs, flush=True)
    picture.parent.mkdir(parents=True, exist_ok=True)
    search_layers.draw(picture, tried)
    started_s = time.monotonic()
    grid = searching.grid()
    grid_s = time.monotonic() - started_s
    front = search_layers.front(grid)
    top = max(grid, key=lambda each: each.speedup)
    is_on_front = any((each.cost, each.tokens_a_pass) == (best.cost, best.tokens_a_pass) for each in front)
    found_after = 1 + next(num for num, each in enumerate(tried) if each == best)
    bars = [
        Bar(
            what="predicted speed of the set found, over that of the best of all sets",
            measured=best.speedup / top.speedup,
            limit=LEAST_SHARE_OF_BEST,
            at_least=True,
        ),
        Bar(
            what="the set found is on the grid's front (1: yes)", measured=is_on_front, limit=1, at_least=True
        ),
    ]
    rows = [
        [f"search, {len(tried)} sets, {search_s:.0f} s; found after {found_after}", *_cells(best)],
        [f"all {len(grid)} sets, {grid_s:.0f} s more", *_cells(top)],
    ]
    head = ["", "left out", "cost", "draft tokens", "tokens a pass", "predicted, × plain"]
    costs = searching.costs
    about = (
        f"{num_prompts} prompts, {NUM_PLACES} places in each. One pass of the target takes "
        f"{costs.passes[0]:.2f} ms of processor time, of {len(costs.passes)} tokens {costs.passes[-1]:.2f}; "
        f"an attention that is left out saves {costs.attention:.2f}, an MLP {costs.mlp:.2f}."
        "\n\n![search](layers.png)"
    )
    data = {
        "best": _plain(best),
        "costs": costs._asdict(),
        "tried": [_plain(each) for each in tried],
        "front": [_plain(each) for each in front],
    }
    return Part(bars=bars, text=f"## Search\n\n{about}\n\n{table(head, rows)}", data=data)


def _cells(each: Promise) -> list[Any]:
    return [skip_text(each.blocks), each.cost, str(each.num_draft_tokens), each.tokens_a_pass, each.speedup]


def _plain(each: Promise) -> dict[str, Any]:
    return each._asdict() | {"blocks": skip_text(each.blocks)}


# --- counts -----------------------------------------------------------------------------------------


def config(skip: str, **settings: Any) -> UpConfig:
    """Of a stack whose target drafts without these blocks."""
    return UpConfig(draft=f"layers:{skip}", dtype="float32", address="127.0.0.1:0", num_threads=1, **settings)


def tokens(skip: str, num_prompts: int, num_tokens: int) -> Part:
    """Tokens a pass by length, and acceptance."""
    prompts, rows, num_unlike = cut_prompts(num_prompts), [], 0
    with Stack(config(skip)) as stack:
        for kind, params in KINDS.items():
            params = replace(params, max_tokens=num_tokens)  # noqa: PLW2901
            plain = asyncio.run(generate_all(stack.address, prompts, replace(params, num_draft_tokens=0)))
            for length in LENGTHS:
                done = asyncio.run(
                    generate_all(stack.address, prompts, replace(params, num_draft_tokens=length))
                )
                num_unlike += sum(a.token_ids != b.token_ids for a, b in zip(done, plain, strict=True))
                spent = [each.speculation for each in done]
                drafted = sum(each.num_draft_tokens for each in spent)
                rounds = sum(each.num_rounds for each in spent)
                accepted = sum(each.num_accepted_tokens for each in spent)
                a_pass = sum(len(each.token_ids) for each in done) / rounds
                rows.append([f"{kind}, up to {length}", drafted / rounds, accepted / max(1, drafted), a_pass])
                print(*rows[-1], flush=True)
    bars = [Bar(what="texts unlike those of plain decoding", measured=num_unlike, limit=0)]
    about = (
        f"Without {skip}; {num_prompts} prompts, {num_tokens} tokens each, the first pass included. Gumbel "
        "at temperature 1."
    )
    head = ["", "draft tokens a round", "accepted", "tokens a pass"]
    return Part(bars=bars, text=f"## Tokens a pass\n\n{about}\n\n{table(head, rows)}", data=rows)


# --- thresholds -------------------------------------------------------------------------------------


def thresholds(skip: str, num_prompts: int, num_tokens: int) -> Part:
    """What first thresholds and target rates are worth, by the most draft tokens of a round."""
    prompts = cut_prompts(num_prompts)
    model = load_model(str(embedded.TARGET_DIR), dtype="float32")
    left_out = ModelBlocks(model).without(parse_skip("layers", skip))
    room = early_exit.num_pages(prompts, num_tokens, NUM_DRAFT_TOKENS)
    runner = ModelRunner(model, num_pages=room, page_size=early_exit.PAGE_SIZE)
    paced, draft_ms = Costs([PACED_MS] * (NUM_DRAFT_TOKENS + 1), 0.0, 0.0), PACED_MS * left_out.share_read
    tried = [(first, TARGET_RATE) for first in FIRSTS]
    tried += [(FIRST, rate) for rate in TARGET_RATES if rate != TARGET_RATE]
    rows: list[list[Any]] = [[f"{first:g}", f"{rate:g}"] for first, rate in tried]
    for params in KINDS.values():
        texts = early_exit.Texts(runner, prompts, num_tokens, is_sampled=params.temperature != 0)
        places = texts.places(left_out, NUM_DRAFT_TOKENS)
        texts.close()
        for row, (first, rate) in zip(rows, tried, strict=True):
            for most in LENGTHS[1:]:
                made = early_exit.replay(places, first, rate, most)
                row.append(f"{made.speedup(paced, draft_ms):.3f} ({made.tokens_a_round:.2f})")
    print(*rows, sep="\n", flush=True)
    head = ["first", "rate", *(f"{kind}, up to {most}" for kind in KINDS for most in LENGTHS[1:])]
    about = (
        "Predicted speed over plain decoding, in brackets tokens a round, by first threshold and target "
        f"rate. Without {skip}; {num_prompts} prompts, {num_tokens} tokens each; {PACED_MS:g} ms "
        f"for any pass, and {left_out.share_read:.2f} of it for a draft pass."
    )
    return Part(bars=[], text=f"## Thresholds\n\n{about}\n\n{table(head, rows)}", data=rows)


# --- the report -------------------------------------------------------------------------------------


def deeper() -> Part:
    """Predicted by the closed form: a verify pass costs as much as one of a token, as on a GPU."""
    costs, alphas = (0.7, 0.6, 0.5, 0.4, 0.3), (0.8, 0.9, 0.95)
    rows = []
    for cost in costs:
        row: list[Any] = [f"{cost:g}"]
        for alpha in alphas:
            free = Costs([1.0] * 17, attention=1 - cost, mlp=0.0)
            made = promise((Block(0, "a"),), [alpha**depth for depth in range(1, 17)], free)
            row.append(f"{made.speedup:.2f} ({made.num_draft_tokens})")
        rows.append(row)
    head = ["cost of a draft pass", *(f"α = {alpha:g}" for alpha in alphas)]
    about = "Times plain, and the number of draft tokens, by the closed form; a verify pass costs one pass."
    return Part(bars=[], text=f"## Deeper targets\n\n{about}\n\n{table(head, rows)}", data=rows)


def main() -> None:
    """Measure the parts that are asked for; the report has the latest of all that were measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", help="search, tokens, thresholds, rates, paced, deeper; default: all"
    )
    parser.add_argument("--skip", help="blocks that are left out; by default those that `search` found")
    parser.add_argument("--num-trials", type=int, default=150)
    parser.add_argument("--search-prompts", type=int, default=16)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=128, help="of each generation")
    parser.add_argument("--num-runs", type=int, default=8, help="of `rates` and `paced`")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts, found = machine(), earlier(args.out / "layers.json")

    def skip() -> str:
        return args.skip or found["search"].data["best"]["blocks"]

    measure: dict[str, Callable[[], Part]] = {
        "search": lambda: searched(args.search_prompts, args.num_trials, args.out / "layers.png"),
        "tokens": lambda: tokens(skip(), args.num_prompts, args.num_tokens),
        "thresholds": lambda: thresholds(skip(), args.num_prompts, args.num_tokens),
        "rates": lambda: rates("layers", config(skip()), args.num_tokens, args.num_runs, 0.0),
        "paced": lambda: rates("layers", config(skip()), args.num_tokens, args.num_runs, PACED_MS),
        "deeper": deeper,
    }
    for part in args.parts or measure:
        found[part] = measure[part]()
    result = Report.of(
        {part: found[part] for part in measure if part in found},
        name="layers",
        title="Layers left out",
        machine=facts,
        about="The embedded target in float32, drafting without some of its attention and MLP blocks.",
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
