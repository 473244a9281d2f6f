"""`python -m benchmarks.hierarchy`: what a drafter of the draft's own brings, and that it never costs.

The embedded pair, alone and with inner drafters: the text (`ngram`), and a model with one of the draft's two
layers, which is distilled from the draft here. The draft's passes are its own, or at least `DRAFT_PASS_MS`
long like those of a larger one. Stacks take turns; chains of a fixed length, and shapes that the coordinator
chooses. Passes of the draft are its engine's own count.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import grpc
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.bars import Bar, Part, Report, machine
from benchmarks.embedded import corpus, train
from benchmarks.trees import KINDS, cut_prompts, table
from specwire import Client, Completion, SamplingParams, embedded
from specwire.cli.supervisor import Stack
from specwire.config.flags import env_name
from specwire.config.stack import UpConfig
from specwire.v1 import draft_pb2, draft_pb2_grpc

WINDOW, NUM_WINDOWS = 256, 8
"""Tokens of a training step."""
DRAFT_PASS_MS, TARGET_PASS_MS = 20.0, 100.0
NUM_DRAFT_TOKENS = 8
LEAST_RATIO = 0.98
CHAINS: dict[str, dict[str, Any]] = {
    f"chains of {NUM_DRAFT_TOKENS}": {"num_draft_tokens": NUM_DRAFT_TOKENS, "max_depth": 0}
}
SHAPES: dict[str, dict[str, Any]] = CHAINS | {"shapes chosen": {}}
ALONE, PLAIN, TEXT = "draft alone", "plain", "ngram alone"


def distil(out: Path, num_steps: int) -> None:
    """The embedded draft without its second layer, trained to guess as the whole one does."""
    torch.set_num_threads(1)
    documents, _ = corpus.split(corpus.read_library())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded.DRAFT_DIR)
    teacher = LlamaForCausalLM.from_pretrained(embedded.DRAFT_DIR, dtype=torch.float32).eval()
    model = LlamaForCausalLM(LlamaConfig(**teacher.config.to_dict() | {"num_hidden_layers": 1}))
    model.load_state_dict(teacher.state_dict(), strict=False)
    rng = random.Random(0)
    rows = [torch.tensor(corpus.encode(tokenizer, documents, rng=rng))]
    optimizer, budget = train.Optimizer(model, 2e-3), train.Budget(1e9, num_steps)
    while (progress := budget.progress) < 1:
        batch = train.random_windows(rows, WINDOW, rng)[:NUM_WINDOWS]
        with torch.no_grad():
            wanted = teacher(input_ids=batch, use_cache=False).logits.log_softmax(-1)
        found = model(input_ids=batch, use_cache=False).logits.log_softmax(-1)
        loss = torch.nn.functional.kl_div(
            found.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean"
        )
        torch.autograd.backward(loss)
        optimizer.step(progress)
        budget.step += 1
        train.report_progress(out.name, budget, loss)
    train.save(model.eval(), tokenizer, out)


class Running(NamedTuple):
    """A stack with one kind of draft."""

    client: Client
    draft_address: str

    def num_passes(self) -> int:
        """Of the draft since its start."""
        with grpc.insecure_channel(self.draft_address) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            asked = draft_pb2.DraftServiceGetModelInfoRequest()
            return int(stub.GetModelInfo(asked, timeout=10).status.num_steps)


class Run(NamedTuple):
    """One generation.

    Attributes:
        passes_a_round: of the draft; of a lone stream.
    """

    done: Completion
    passes_a_round: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return len(self.done.token_ids) / self.done.timing.total_ms * 1e3


def _started(stack: ExitStack, draft: str, *, is_paced: bool) -> Running:
    config = UpConfig(
        draft=draft,
        draft_placement="service",
        dtype="float32",
        draft_dtype="float32",
        address="127.0.0.1:0",
        num_outcomes="0",
        num_threads=1,
        least_pass_ms=TARGET_PASS_MS if is_paced else 0.0,
    )
    environ = {env_name("least_pass_ms"): str(DRAFT_PASS_MS)} if is_paced else {}
    running = stack.enter_context(Stack(config, environ))
    assert running.draft is not None
    return Running(stack.enter_context(Client(running.address)), running.draft.address)


def _run(running: Running, params: SamplingParams, prompt: Sequence[int]) -> Run:
    before = running.num_passes()
    done = running.client.generate(params=params, prompt_token_ids=prompt)
    num_rounds = max(1, sum(done.speculation.acceptance_histogram))
    return Run(done, (running.num_passes() - before) / num_rounds)


def measure(inners: dict[str, str], num_tokens: int, num_runs: int, *, is_paced: bool) -> Part:
    """Every kind of draft on the same prompts, in turns.

    Args:
        inners: `--draft` by name; the first one has no inner drafter.
    """
    prompts = cut_prompts(num_runs)
    bars, parts, data = [], [], {}
    passes = f"passes of {DRAFT_PASS_MS:g} and {TARGET_PASS_MS:g} ms" if is_paced else "their own passes"
    with ExitStack() as stack:
        running = {name: _started(stack, draft, is_paced=is_paced) for name, draft in inners.items()}
        for kind, given in KINDS.items():
            for shape, fields in (CHAINS if is_paced else SHAPES).items():
                given = replace(given, max_tokens=num_tokens)  # noqa: PLW2901
                wanted = {
                    PLAIN: (running[ALONE], replace(given, num_draft_tokens=0)),
                    TEXT: (running[ALONE], replace(given, draft="ngram")),
                    **{name: (each, replace(given, **fields)) for name, each in running.items()},
                }
                found: dict[str, list[Run]] = {name: [] for name in wanted}
                for i, prompt in enumerate([prompts[0], *prompts]):  # the first is to warm up
                    for name, (each, params) in wanted.items():
                        found[name].append(_run(each, replace(params, seed=i), prompt))
                title = f"{kind}, {shape}, {passes}"
                rows = _rows({name: runs[1:] for name, runs in found.items()})
                print(title, *rows, sep="\n", flush=True)
                bars += _bars(title, rows, found)
                head = ["", "tokens/s", "× plain", "× draft alone", "draft passes a round", "tokens a round"]
                parts.append(f"### {title}\n\n{table(head, rows)}")
                data[title] = rows
    return Part(bars=bars, text=f"## Draft and target with {passes}\n\n" + "\n\n".join(parts), data=data)


def _rows(found: dict[str, list[Run]]) -> list[list[Any]]:
    rows = []
    for name, runs in found.items():
        ratios = [
            median(a.rate / b.rate for a, b in zip(runs, found[other], strict=True))
            for other in (PLAIN, ALONE)
        ]
        num_rounds = sum(run.done.speculation.num_rounds for run in runs)
        tokens = sum(len(run.done.token_ids) for run in runs) / num_rounds
        rows.append(
            [name, median(r.rate for r in runs), *ratios, median(r.passes_a_round for r in runs), tokens]
        )
    return rows


def _bars(title: str, rows: Sequence[Sequence[Any]], found: dict[str, list[Run]]) -> list[Bar]:
    texts = [[run.done.token_ids for run in runs] for runs in found.values()]
    num_unlike = sum(a != b for each in texts for a, b in zip(each, texts[0], strict=True))
    ours = {row[0]: row[3] for row in rows if row[0] not in (PLAIN, TEXT, ALONE)}
    return [
        Bar(what=f"texts unlike those of plain decoding, {title}", measured=num_unlike, limit=0),
        *(
            Bar(
                what=f"{name}, tokens/s over the draft alone, {title}",
                measured=ratio,
                limit=LEAST_RATIO,
                at_least=True,
            )
            for name, ratio in ours.items()
        ),
    ]


def main() -> None:
    """Distil, measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hierarchy", description=__doc__)
    parser.add_argument("--inner", type=Path, help="directory of the inner model; distilled if not given")
    parser.add_argument("--steps", type=int, default=240, help="of its distillation")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        inner = args.inner or Path(folder) / "inner"
        if not inner.exists():
            distil(inner, args.steps)
        kinds = {ALONE: "embedded", "ngram": "ngram>embedded", "one layer": f"{inner}>embedded"}
        parts = {
            "paced": measure(kinds, args.tokens, args.runs, is_paced=True),
            "own": measure(kinds, args.tokens, args.runs, is_paced=False),
        }
    about = (
        f"Embedded pair in float32, one stream, {args.runs} prompts of {args.tokens} tokens each, in turns "
        f"after one to warm up, nothing prepared ahead; medians. "
        f"The inner model had {args.steps} steps of {WINDOW * NUM_WINDOWS} tokens."
    )
    result = Report.of(
        parts,
        name="hierarchy",
        title="A draft with a drafter of its own",
        machine=facts,
        about=about,
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
