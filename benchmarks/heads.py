"""`python -m benchmarks.heads`: what heads of the embedded target bring, beside plain decoding and the draft.

Heads are trained on the files that the embedded pair was trained on, in closed form; prompts are from those
that were held out. First tokens a pass by shape; then tokens/s with shapes that the coordinator chooses, once
with the target's own passes and once with passes of a larger target (`--least-pass-ms`), where plain
decoding, heads and the embedded draft take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bars import Bar, Part, Report, machine
from benchmarks.embedded import corpus
from benchmarks.trees import KINDS, Shape, cut_prompts, generate_all, table
from specwire import Client, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig
from tools.heads import training
from tools.heads.config import TrainHeadsConfig

SHAPES = (Shape(2), Shape(4), Shape(8, 3), Shape(16, 4), Shape(32, 6))
LEAST_TOKENS, LEAST_RATIO = 1.5, 0.98
PACED_MS = 20.0
SETTLING_TOKENS = 1500
_TEXT_CHARS = 1_000_000


def train(out: Path) -> float:
    """Heads of the embedded target; returns how long that took, in seconds."""
    documents, _ = corpus.split(corpus.read_library())
    random.Random(0).shuffle(documents)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as text:
        text.write("\n".join(document.text for document in documents)[:_TEXT_CHARS])
        text.flush()
        started_s = time.monotonic()
        training.train(TrainHeadsConfig(text=text.name, out=str(out)), _quiet)
    return time.monotonic() - started_s


@contextlib.contextmanager
def _quiet(title: str, total: int) -> Iterator[Any]:
    yield lambda num: None
    print(title, flush=True)


def config(heads: Path, **settings: Any) -> UpConfig:
    """Of a stack with heads."""
    return UpConfig(draft=f"heads:{heads}", dtype="float32", address="127.0.0.1:0", num_threads=1, **settings)


def tokens(
    own: UpConfig, shapes: Sequence[Shape], num_prompts: int, num_tokens: int, least: float = 1.0
) -> Part:
    """Tokens a pass of each shape, and whether the texts are those of plain decoding.

    Args:
        own: of a stack whose target drafts for itself.
        least: tokens a pass of the best shape, greedy.
    """
    prompts, rows, num_equal, num_texts = cut_prompts(num_prompts), [], 0, 0
    best: dict[str, float] = {}
    with Stack(own) as stack:
        for kind, params in KINDS.items():
            params = replace(params, max_tokens=num_tokens)  # noqa: PLW2901
            plain = asyncio.run(generate_all(stack.address, prompts, replace(params, num_draft_tokens=0)))
            row = []
            for shape in shapes:
                done = asyncio.run(generate_all(stack.address, prompts, shape.of(params)))
                num_rounds = sum(each.speculation.num_rounds for each in done)
                row.append(sum(len(each.token_ids) for each in done) / num_rounds)
                num_equal += sum(a.token_ids == b.token_ids for a, b in zip(done, plain, strict=True))
                num_texts += len(done)
            best[kind] = max(row)
            rows.append([kind, *row])
            print(*rows[-1], flush=True)
    bars = [
        Bar(what="tokens a pass, greedy", measured=best["greedy"], limit=least, at_least=True),
        Bar(what="texts unlike those of plain decoding", measured=num_texts - num_equal, limit=0),
    ]
    about = (
        f"{num_prompts} prompts, {num_tokens} tokens each, the first pass included; Gumbel at temperature 1."
    )
    return Part(
        bars=bars, text=f"## Tokens a pass\n\n{about}\n\n{table(['', *map(str, shapes)], rows)}", data=rows
    )


def rates(name: str, own: UpConfig, num_tokens: int, num_runs: int, least_pass_ms: float) -> Part:
    """Tokens/s of greedy decoding, in turns; plain decoding by a target that has nothing else to do.

    Args:
        name: of what drafts.
        own: of a stack whose target drafts for itself.
    """
    draft = UpConfig(
        dtype="float32",
        draft_dtype="float32",
        address="127.0.0.1:0",
        num_threads=1,
        least_pass_ms=least_pass_ms,
    )
    configs = {name: replace(own, least_pass_ms=least_pass_ms), "embedded draft": draft}
    params = replace(KINDS["greedy"], max_tokens=num_tokens)
    prompts = cut_prompts(num_runs)
    found: dict[str, list[float]] = {each: [] for each in ("plain", *configs)}
    with ExitStack() as running:
        clients = {
            kind: running.enter_context(Client(running.enter_context(Stack(each)).address))
            for kind, each in configs.items()
        }
        for client in clients.values():
            _settle(client, params)
        for prompt in prompts:
            plain = replace(params, num_draft_tokens=0)
            found["plain"].append(_rate(clients["embedded draft"], plain, prompt))
            for kind, client in clients.items():
                found[kind].append(_rate(client, params, prompt))
    ratios = {kind: median(map(_ratio, found[kind], found["plain"])) for kind in configs}
    passes = f"passes of {least_pass_ms:g} ms" if least_pass_ms else "the target's own passes"
    what = f"tokens/s over plain decoding, {passes}"
    bars = [Bar(what=what, measured=ratios[name], limit=LEAST_RATIO, at_least=True)]
    rows = [[kind, median(each), ratios.get(kind, 1.0)] for kind, each in found.items()]
    print(*rows, flush=True)
    about = (
        f"One stream, greedy, {passes}, shapes chosen; {num_runs} runs of {num_tokens} tokens in turns, "
        f"after {SETTLING_TOKENS} tokens. Medians."
    )
    text = f"## Tokens/s, {passes}\n\n{about}\n\n{table(['', 'tokens/s', 'times plain'], rows)}"
    return Part(bars=bars, text=text, data=found)


def _settle(client: Client, params: SamplingParams) -> None:
    per_run = params.max_tokens or 1
    for prompt in cut_prompts(-(-SETTLING_TOKENS // per_run)):
        _rate(client, params, prompt)


def _rate(client: Client, params: SamplingParams, prompt: Sequence[int]) -> float:
    done = client.generate(params=params, prompt_token_ids=prompt)
    return len(done.token_ids) / done.timing.total_ms * 1e3


def _ratio(one: float, other: float) -> float:
    return one / other


def main() -> None:
    """Train, measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads", description=__doc__)
    parser.add_argument("--heads", type=Path, help="directory of heads; trained if not given")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=128, help="of each generation")
    parser.add_argument("--num-runs", type=int, default=8, help="of tokens/s")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        heads = args.heads or Path(folder) / "heads"
        trained = f" Trained in {train(heads):.0f} s." if args.heads is None else ""
        parts = {
            "tokens": tokens(config(heads), SHAPES, args.num_prompts, args.num_tokens, LEAST_TOKENS),
            "rates": rates("heads", config(heads), args.num_tokens, args.num_runs, 0.0),
            "paced": rates("heads", config(heads), args.num_tokens, args.num_runs, PACED_MS),
        }
    result = Report.of(
        parts,
        name="heads",
        title="Heads",
        machine=facts,
        about=f"Heads of the embedded target, in float32.{trained}",
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
