"""`python -m benchmarks.encoder_decoder`: table 2 of Leviathan et al. (2023) in small.

With a pair that is trained here, for a translation and for summaries, at temperature 0 and 1: acceptance α,
cost c of a draft token in passes of the target, the length γ that the closed form likes best, and the
speed-up that it predicts and that is measured. Nothing is prepared ahead, as the closed form assumes. Once
with passes of a larger target (`--least-pass-ms`), and once with the target's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import seq2seq
from benchmarks.bars import Bar, Report, machine
from benchmarks.trees import table
from specwire import Client, Completion, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.completion import Stage
from specwire.config.stack import UpConfig

PACED_MS = 40.0
TRIED = 4
"""Draft tokens a round where acceptance is measured."""
MOST = 10
NUM_TOKENS = 64
PAPER = {"translation": ((0.75, 3.4), (0.62, 2.6)), "summary": ((0.65, 3.1), (0.53, 2.3))}
"""α and speed-up of T5-XXL with T5-small, at temperature 0 and 1."""


class Row(NamedTuple):
    """One line of the table."""

    task: str
    temperature: int
    alpha: float
    cost: float
    gamma: int
    predicted: float
    measured: float
    tokens_a_pass: float
    plain_rate: float
    num_unequal: int


def expected_gain(alpha: float, cost: float, gamma: int) -> float:
    """Theorem 3.8 of the paper: how many times as fast as plain decoding."""
    tokens = gamma + 1 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return tokens / (gamma * cost + 1)


def measure(pair: Path, prompts: dict[str, list[list[int]]], least_pass_ms: float) -> list[Row]:
    """All tasks and temperatures."""
    config = UpConfig(
        target=str(pair / "target"),
        draft=str(pair / "draft"),
        dtype="float32",
        draft_dtype="float32",
        address="127.0.0.1:0",
        num_threads=1,
        num_outcomes="0",
        verify_ahead=False,
        least_pass_ms=least_pass_ms,
    )
    rows = []
    with Stack(config) as stack, Client(stack.address) as client:
        for task, of_task in prompts.items():
            for temperature in (0, 1):
                rows.append(_row(client, task, of_task, temperature))
                print(rows[-1], flush=True)
    return rows


def _row(client: Client, task: str, prompts: Sequence[Sequence[int]], temperature: int) -> Row:
    params = {"temperature": temperature, "max_tokens": NUM_TOKENS, "rule": Rule.REJECTION, "max_depth": 0}
    [tried, plain] = _in_turns(client, params, prompts, (TRIED, 0))
    alpha, cost = _alpha(tried), _draft_ms(tried) / _token_ms(plain)
    gamma = max(range(1, MOST + 1), key=lambda each: expected_gain(alpha, cost, each))
    [chosen] = _in_turns(client, params, prompts, (gamma,))
    pairs = zip(chosen, plain, strict=True)
    return Row(
        task=task,
        temperature=temperature,
        alpha=alpha,
        cost=cost,
        gamma=gamma,
        predicted=expected_gain(alpha, cost, gamma),
        measured=_token_ms(plain) / _token_ms(chosen),
        tokens_a_pass=_num_tokens(chosen) / sum(each.speculation.num_rounds for each in chosen),
        plain_rate=1e3 / _token_ms(plain),
        num_unequal=sum(a.token_ids != b.token_ids for a, b in pairs) if temperature == 0 else 0,
    )


def _in_turns(
    client: Client, params: dict[str, Any], prompts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> list[list[Completion]]:
    """Completions of all prompts for each number of draft tokens."""
    found: list[list[Completion]] = [[] for _ in lengths]
    for prompt in prompts:
        for completions, num in zip(found, lengths, strict=True):
            given = SamplingParams(**params, num_draft_tokens=num)
            completions.append(client.generate(params=given, prompt_token_ids=prompt))
    return found


def _alpha(completions: Sequence[Completion]) -> float:
    """Accepted over judged draft tokens: a round judges those that it accepts, and the next one if any."""
    accepted = sum(each.speculation.num_accepted_tokens for each in completions)
    refused = sum(sum(each.speculation.acceptance_histogram[:TRIED]) for each in completions)
    return accepted / max(1, accepted + refused)


def _draft_ms(completions: Sequence[Completion]) -> float:
    """Of one draft token, with its messages."""
    stages = (Stage.DRAFT, Stage.DRAFT_QUEUE, Stage.DRAFT_NETWORK)
    num = sum(each.speculation.num_draft_tokens for each in completions)
    return sum(each.timing.of(*stages) for each in completions) / max(1, num)


def _token_ms(completions: Sequence[Completion]) -> float:
    return sum(each.timing.total_ms for each in completions) / _num_tokens(completions)


def _num_tokens(completions: Sequence[Completion]) -> int:
    return sum(len(each.token_ids) for each in completions)


def _details(parts: dict[str, list[Row]]) -> str:
    head = ["task", "T", "α", "c", "γ", "predicted", "measured", "tokens a pass", "plain tokens/s"]
    head += ["XXL: α", "XXL: measured"]
    texts = []
    for name, rows in parts.items():
        cells = [[*row[:9], *PAPER[row.task][row.temperature]] for row in rows]
        texts.append(f"## {name}\n\n{table(head, cells)}")
    return "\n\n".join(texts)


def main() -> None:
    """Train the pair if it is not there, measure, and write the report."""
    parser = argparse.ArgumentParser(prog="benchmarks.encoder_decoder", description=__doc__)
    parser.add_argument("--models", type=Path, required=True, help="where the trained pair is, or goes")
    parser.add_argument("--target-seconds", type=float, default=900.0, help="of processor time, to train it")
    parser.add_argument("--draft-seconds", type=float, default=300.0)
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    parser.add_argument("--only-train", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    facts = machine()
    seq2seq.train_pair(args.models, args.target_seconds, args.draft_seconds)
    if args.only_train:
        return
    prompts = seq2seq.held_out(args.prompts)
    parts = {
        f"Passes of {PACED_MS:g} ms": measure(args.models, prompts, PACED_MS),
        "The target's own passes": measure(args.models, prompts, 0.0),
    }
    rows = [row for of_part in parts.values() for row in of_part]
    paced = next(iter(parts.values()))
    bars = [
        Bar(
            what="texts unlike those of plain decoding",
            measured=sum(row.num_unequal for row in rows),
            limit=0,
        ),
        *(
            Bar(
                what=f"measured over predicted speed-up, {row.task}, T = {row.temperature}",
                measured=row.measured / row.predicted,
                limit=0.8,
                at_least=True,
            )
            for row in paced
        ),
    ]
    report = Report(
        name="encoder_decoder",
        title="Encoder-decoders",
        machine=facts,
        about=(
            f"A pair of T5 trained here: {seq2seq.card(args.models)}. "
            f"{args.prompts} inputs of each task from files that were not trained on, at most {NUM_TOKENS} "
            "tokens, one stream, plain and speculative in turns, the encoder's pass included. T = 1 under "
            "rejection sampling. XXL: T5-XXL with T5-small in the paper."
        ),
        bars=bars,
        details=_details(parts),
        data={name: [row._asdict() for row in of_part] for name, of_part in parts.items()},
    )
    print(report.write(args.out))


if __name__ == "__main__":
    main()
