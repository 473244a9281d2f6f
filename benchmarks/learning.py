"""`python -m benchmarks.learning`: a draft that learns while it serves, on a text that it has not seen.

The draft has the shape of the embedded one, and has read prose alone: the topics of Python's `help`. It
serves the embedded target, which writes Python after the beginnings of files that neither has seen: several
streams, half of the requests greedy and half sampled at temperature 1 with rejection sampling. Acceptance is
counted while it learns; and before and after on other prompts, beside plain decoding and the embedded draft,
which was distilled from this target for 22 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib import import_module
from itertools import cycle, product
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks import windows
from benchmarks.bars import Bar, Report, machine
from benchmarks.embedded import corpus, train
from benchmarks.trees import NUM_STREAMS, table
from specwire import AsyncClient, Client, Completion, Rule, SamplingParams, embedded, tokenizer
from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig
from specwire.core import Learning

NUM_DRAFT_TOKENS = 4
_COMMON = SamplingParams(num_draft_tokens=NUM_DRAFT_TOKENS, rule=Rule.REJECTION, ignore_eos=True)
KINDS = {"greedy": replace(_COMMON, temperature=0), "temperature 1": _COMMON}
"""Chains."""
LEAST_RISE = 0.1
WINDOW, NUM_WINDOWS = 256, 8
"""Tokens of a training step."""
NUM_PROMPTS, EVERY = 720, 30
"""Every thirtieth is kept for the tests before and after."""
BUCKET_S = 120.0
PLAIN = "plain decoding"


class Sample(NamedTuple):
    """One request while the draft learns."""

    ended_s: float
    kind: str
    done: Completion


# --- a draft that has read prose --------------------------------------------------------------------------


def train_draft(out: Path, num_steps: int) -> None:
    """The embedded draft's shape and the target's token tables, trained on prose."""
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine spin
    ours = PreTrainedTokenizerFast.from_pretrained(embedded.TARGET_DIR)
    target = train.load_for_evaluation(embedded.TARGET_DIR)
    assert ours.eos_token_id is not None
    model = train.build_model(
        hidden=256, layers=2, heads=4, kv_heads=2, intermediate=512, tied=False, eos=ours.eos_token_id
    )
    model.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    model.lm_head.load_state_dict(target.lm_head.state_dict())
    rng = random.Random(0)
    rows = [torch.tensor(corpus.encode(ours, [corpus.Document("topics", _prose())], rng=rng))]
    optimizer, budget = train.Optimizer(model, 2e-3), train.Budget(1e9, num_steps)
    while (progress := budget.progress) < 1:
        batch = train.random_windows(rows, WINDOW, rng)[:NUM_WINDOWS]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step(progress)
        budget.step += 1
        train.report_progress(out.name, budget, loss)
    train.save(model.eval(), ours, out)


def _prose() -> str:
    """The topics of Python's `help`: 700 KB, left out of the embedded pair's training."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics.values())


# --- while it learns --------------------------------------------------------------------------------------


def config(draft: Path | str, **settings: Any) -> UpConfig:
    """Of a stack whose passes are one thread each."""
    return UpConfig(
        draft=str(draft),
        draft_placement="service",
        dtype="float32",
        draft_dtype="float32",
        address="127.0.0.1:0",
        num_threads=1,
        num_outcomes="0",
        **settings,
    )


def learn(
    draft: Path, out: Path, minutes: float, share: float, num_tokens: int
) -> tuple[list[Sample], Learning]:
    """Requests in turns of their kinds, for so long; and what the draft says of itself at the end."""
    with Stack(
        config(draft, draft_learn=True, draft_learn_share=share), {"SPECWIRE_LEARN_OUT": str(out)}
    ) as stack:
        samples = asyncio.run(_serve(stack.address, 60 * minutes, num_tokens))
        with Client(stack.address) as client:
            _, info = client.get_model_info()
    assert info is not None
    assert info.learning is not None
    return samples, info.learning


async def _serve(address: str, seconds: float, num_tokens: int) -> list[Sample]:
    """`NUM_STREAMS` at a time."""
    samples: list[Sample] = []
    requests = enumerate(_requests())
    began_s = time.monotonic()

    async def stream(client: AsyncClient) -> None:
        while (now_s := time.monotonic() - began_s) < seconds:
            number, (kind, prompt) = next(requests)
            params = replace(KINDS[kind], max_tokens=num_tokens, seed=number)
            done = await client.generate(params=params, prompt_token_ids=prompt)
            samples.append(Sample(time.monotonic() - began_s, kind, done))
            if number % 50 == 0:
                print(f"{now_s:.0f} s", (await client.get_model_info())[1], flush=True)

    async with AsyncClient(address) as client:
        await asyncio.gather(*(stream(client) for _ in range(NUM_STREAMS)))
    return sorted(samples, key=lambda each: each.ended_s)


def _requests() -> Iterator[tuple[str, list[int]]]:
    prompts, _ = cut_prompts(0)
    random.Random(1).shuffle(prompts)
    return zip(cycle(KINDS), cycle(prompts), strict=False)


def cut_prompts(num_tests: int) -> tuple[list[list[int]], list[list[int]]]:
    """Beginnings of Python that the embedded pair has not seen: those that are learnt with, and others."""
    ours = tokenizer.load(embedded.TARGET_DIR)
    assert ours is not None
    found = windows.cut(ours, NUM_PROMPTS)
    tests = found[::EVERY]
    return [prompt for i, prompt in enumerate(found) if i % EVERY], tests[:num_tests]


def acceptance(completions: Sequence[Completion]) -> float:
    """Accepted draft tokens of those that were judged: in a round, up to the first one that was rejected."""
    num_accepted = sum(done.speculation.num_accepted_tokens for done in completions)
    num_judged = num_accepted + sum(
        sum(done.speculation.acceptance_histogram[:NUM_DRAFT_TOKENS]) for done in completions
    )
    return num_accepted / max(1, num_judged)


def over_time(samples: Sequence[Sample]) -> list[list[Any]]:
    """Rows of acceptance by kind, and tokens/s of all streams, for every two minutes."""
    rows: list[list[Any]] = []
    for bucket in range(int(samples[-1].ended_s // BUCKET_S)):
        some = [each for each in samples if int(each.ended_s // BUCKET_S) == bucket]
        by_kind = [[each.done for each in some if each.kind == kind] for kind in KINDS]
        minutes = f"{bucket * BUCKET_S / 60:g} to {(bucket + 1) * BUCKET_S / 60:g}"
        num_tokens = sum(len(each.done.token_ids) for each in some)
        rows.append([minutes, *map(acceptance, by_kind), num_tokens / BUCKET_S])
    return rows


# --- before and after -------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """One draft, one kind of request.

    Attributes:
        over_plain: tokens/s over those of plain decoding, median of the prompts.
    """

    alpha: float
    tokens_a_pass: float
    tokens_per_s: float
    over_plain: float
    num_unlike: int


def measure(
    drafts: dict[str, Path | str], prompts: Sequence[list[int]], num_tokens: int
) -> dict[str, dict[str, Measured]]:
    """By kind and draft, and of plain decoding, which take turns: one stream, each prompt with each."""
    done: dict[str, dict[str, list[Completion]]] = {
        kind: {name: [] for name in (*drafts, PLAIN)} for kind in KINDS
    }
    with ExitStack() as running:
        clients = {
            name: running.enter_context(Client(running.enter_context(Stack(config(draft))).address))
            for name, draft in drafts.items()
        }
        clients[PLAIN] = next(iter(clients.values()))
        for seed, (prompt, (kind, params)) in enumerate(product(prompts, KINDS.items())):
            for name, client in clients.items():
                given = replace(params, max_tokens=num_tokens, seed=seed)
                if name == PLAIN:
                    given = replace(given, num_draft_tokens=0)
                done[kind][name].append(client.generate(params=given, prompt_token_ids=prompt))
    return {
        kind: {name: _measured(each, by_name[PLAIN]) for name, each in by_name.items()}
        for kind, by_name in done.items()
    }


def _measured(each: Sequence[Completion], plain: Sequence[Completion]) -> Measured:
    rates, plain_rates = (list(map(_tokens_per_s, some)) for some in (each, plain))
    return Measured(
        acceptance(each),
        sum(len(done.token_ids) for done in each) / sum(done.speculation.num_rounds for done in each),
        median(rates),
        median(map(truediv, rates, plain_rates)),
        sum(ours.token_ids != theirs.token_ids for ours, theirs in zip(each, plain, strict=True)),
    )


def _tokens_per_s(done: Completion) -> float:
    return len(done.token_ids) / done.timing.total_ms * 1e3


def main() -> None:
    """Train what is not there, measure, and write the report."""
    parser = argparse.ArgumentParser(prog="benchmarks.learning", description=__doc__)
    parser.add_argument(
        "--models", type=Path, required=True, help="where drafts and their learning are, or go"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    facts = machine()
    before, after = args.models / "prose", args.models / "learnt"
    if not before.exists():
        train_draft(before, args.steps)
    kept = args.models / "learnt.json"
    if not kept.exists():
        samples, found_out = learn(before, after, args.minutes, args.share, args.tokens)
        kept.write_text(json.dumps({"over_time": over_time(samples), "learning": asdict(found_out)}))
    seen = json.loads(kept.read_text())
    rows, learning = seen["over_time"], Learning(**seen["learning"])
    print(*rows, learning, sep="\n", flush=True)
    _, prompts = cut_prompts(args.prompts)
    found = measure({"before": before, "after": after, "embedded draft": "embedded"}, prompts, args.tokens)
    about = (
        f"{args.minutes:g} minutes, {NUM_STREAMS} streams, {args.tokens} tokens a request, chains of "
        f"{NUM_DRAFT_TOKENS}, learning in {args.share:.0%} of the draft's time; embedded target in float32, "
        f"one thread for each model, on a machine that was busy with other work. Then {args.prompts} prompts "
        "without learning, one stream, drafts and plain decoding in turns; medians."
    )
    report = Report(
        name="learning",
        title="A draft that learns while it serves",
        machine=facts,
        about=about,
        bars=_bars(found),
        details=_details(rows, learning, found),
        data={
            "over_time": rows,
            "learning": asdict(learning),
            "found": {
                kind: {name: each._asdict() for name, each in by_name.items()}
                for kind, by_name in found.items()
            },
        },
    )
    print(report.write(args.out))


def _bars(found: dict[str, dict[str, Measured]]) -> list[Bar]:
    num_unlike = sum(each.num_unlike for each in found["greedy"].values())
    return [
        *(
            Bar(
                what=f"acceptance after less before, {kind}",
                measured=each["after"].alpha - each["before"].alpha,
                limit=LEAST_RISE,
                at_least=True,
            )
            for kind, each in found.items()
        ),
        Bar(what="greedy texts unlike those of plain decoding", measured=num_unlike, limit=0),
    ]


def _details(rows: Sequence[Sequence[Any]], learning: Learning, found: dict[str, dict[str, Measured]]) -> str:
    said = (
        f"{learning.num_steps} steps, {learning.num_judged_tokens} judged tokens; weights replaced "
        f"{learning.num_versions} times, given up {learning.num_rollbacks} times; agreement "
        f"{learning.first_agreement:.3f} at first, {learning.agreement:.3f} at the end."
    )
    over_minutes = table(["minutes", *(f"α, {kind}" for kind in KINDS), "tokens/s"], rows)
    tables = (_table_of(kind, by_name) for kind, by_name in found.items())
    return "\n\n".join([said, over_minutes, *tables])


def _table_of(kind: str, by_name: dict[str, Measured]) -> str:
    rows = [[name, *each[:4]] for name, each in by_name.items()]
    head = ["draft", "α", "tokens a pass", "tokens/s", "times plain"]
    return f"## {kind.capitalize()}\n\n{table(head, rows)}"


if __name__ == "__main__":
    main()
