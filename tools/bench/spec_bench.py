"""`specwire bench spec-bench`: questions of Spec-Bench with each kind of draft in turn, and its answer files.

Formats and figures are those of Spec-Bench (Xia et al. 2024, arXiv 2401.07851): its script speed.py reads
what is written here. One question is asked at a time, each turn after earlier ones and their answers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from specwire.client.client import Client
from specwire.completion import Token
from specwire.config.client import ClientConfig
from specwire.config.own_methods import DRAFT_MODEL
from specwire.config.sampling_flags import sampling_params
from specwire.config.speculative import METHODS, MODEL, NGRAM
from specwire.core import Fate, ModelInfo, SamplingParams
from specwire.errors import ConfigError
from tools.files import read_text

PLAIN, AUTO, TREE, OVERALL = "plain", "auto", "tree", "overall"
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
TASKS: dict[str, tuple[str, ...]] = {"mt_bench": _MT_BENCH} | {
    name: (name,) for name in ("translation", "summarization", "qa", "math_reasoning", "rag")
}
"""Categories of the questions by task, in the order of the paper."""


@dataclass(frozen=True, kw_only=True)
class BenchQuestion:
    """One line of a file of questions; fields beside these are ignored."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


@dataclass(kw_only=True)
class BenchAnswer:
    """What one method wrote; the lists have an entry for each turn, `accept_lengths` for each pass of all."""

    question: BenchQuestion
    turns: list[str] = field(default_factory=list)
    decoding_steps: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    wall_time: list[float] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)

    def line(self, model_id: str) -> str:
        """As Spec-Bench writes it."""
        about = dataclasses.asdict(self) | {"index": 0}
        question = about.pop("question")
        shown = {"question_id": question["question_id"], "category": question["category"]}
        shown |= {"answer_id": uuid.uuid4().hex, "model_id": model_id, "choices": [about]}
        return json.dumps(shown | {"tstamp": time.time()}, ensure_ascii=False) + "\n"


Answers = Mapping[str, Sequence[BenchAnswer]]
"""By method, of the same questions in the same order."""


def read(path: Path) -> list[BenchQuestion]:
    """The questions of a file.

    Raises:
        ConfigError: naming the file, the line and the field.
    """
    lines = read_text("--questions", path).split("\n")
    found = [
        _question(line, f"--questions {path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise ConfigError(f"--questions {path}: holds no question")
    return found


def _question(line: str, where: str) -> BenchQuestion:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: is not a JSON object")
    known, category, turns = (fields.get(name) for name in ("question_id", "category", "turns"))
    if not isinstance(known, int | str) or isinstance(known, bool):
        raise ConfigError(f"{where}: question_id={known!r} is neither a number nor text")
    categories = [each for task in TASKS.values() for each in task]
    if category not in categories:
        raise ConfigError(f"{where}: category={category!r} is not one of {', '.join(categories)}")
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)):
        raise ConfigError(f"{where}: turns={turns!r} is not a list of texts")
    return BenchQuestion(question_id=known, category=category, turns=tuple(turns))


def methods(target: ModelInfo, draft: ModelInfo | None) -> dict[str, dict[str, Any]]:
    """What a server can draft with, plain first, as changes of a request's parameters."""
    found: dict[str, dict[str, Any]] = {PLAIN: {"num_draft_tokens": 0}, AUTO: {}}
    is_in_target = target.own_source == DRAFT_MODEL
    if draft is not None or is_in_target:
        found |= {MODEL: {"draft": MODEL}, f"{NGRAM},{MODEL}": {"draft": f"{NGRAM},{MODEL}"}}
    if target.trees and (is_in_target or (draft is not None and draft.trees)):
        found[TREE] = {"draft": MODEL, "num_draft_tokens": 32, "max_depth": 6}
    if target.own_source not in ("", DRAFT_MODEL):
        found[target.own_source] = {"draft": target.own_source}
    return found | {name: {"draft": name} for name in METHODS}


def run(config: ClientConfig, args: argparse.Namespace) -> int:
    """Ask everything, write the answers and the page, and print it.

    Raises:
        ConfigError: a file that cannot be used, or a method that the server has not.
        SpecwireError: a generation failed; the answers before it are written.
    """
    params, questions = sampling_params(args), read(args.questions)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {args.output}: cannot be written ({error})") from None
    with Client(config.server, timeout_s=config.timeout_s, **config.credentials) as client:
        target, draft = client.get_model_info()
        known = methods(target, draft)
        for name in args.methods:
            if name not in known:
                raise ConfigError(f"--methods {name}: is not one of this server's: {', '.join(known)}")
        asked = (PLAIN, *args.methods) if args.methods else known
        chosen = {name: changes for name, changes in known.items() if name in asked}
        found = _ask(client, target, questions, chosen, params, args.output)
    text = page(found)
    (args.output / "spec-bench.md").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


def _ask(
    client: Client,
    target: ModelInfo,
    questions: Sequence[BenchQuestion],
    chosen: Mapping[str, dict[str, Any]],
    params: SamplingParams,
    output: Path,
) -> Answers:
    """All methods answer a question before the next one: what changes on the machine meets all of them.

    Each has a salt of its own, or it would find the prompts and the outputs of the others in caches.
    """
    run_id = uuid.uuid4().hex
    requests = {
        name: dataclasses.replace(params, **changes, cache_salt=f"{run_id}-{name}")
        for name, changes in chosen.items()
    }
    found: dict[str, list[BenchAnswer]] = {name: [] for name in chosen}
    for request in requests.values():
        warm = dataclasses.replace(request, cache_salt=f"warm-{request.cache_salt}")
        _answer(client, questions[0], warm, is_chat=bool(target.chat_template))
    with contextlib.ExitStack() as opened:
        files = {
            name: opened.enter_context((output / f"{name}.jsonl").open("w", encoding="utf-8"))
            for name in chosen
        }
        for question in questions:
            for name, request in requests.items():
                answer = _answer(client, question, request, is_chat=bool(target.chat_template))
                found[name].append(answer)
                files[name].write(answer.line(f"{target.name}-{name}"))
                files[name].flush()
    return found


def _answer(client: Client, question: BenchQuestion, params: SamplingParams, *, is_chat: bool) -> BenchAnswer:
    """All turns; without a chat template they and their answers are lines of one text."""
    answer, said = BenchAnswer(question=question), list[dict[str, str]]()
    for turn in question.turns:
        said.append({"role": "user", "content": turn})
        text = None if is_chat else "\n".join([*(each["content"] for each in said), ""])
        start_s = time.perf_counter()
        done = client.generate(text, params, messages=said if is_chat else None)
        answer.wall_time.append(time.perf_counter() - start_s)
        answer.turns.append(done.text)
        answer.new_tokens.append(len(done.tokens))
        answer.decoding_steps.append(done.speculation.num_rounds)
        answer.accept_lengths += accept_lengths(done.tokens)
        said.append({"role": "assistant", "content": done.text})
    return answer


def accept_lengths(tokens: Sequence[Token]) -> list[int]:
    """Tokens of each pass. It ends with one of the target's own, the last one perhaps with the output."""
    ends = [0, *(n for n, token in enumerate(tokens, 1) if token.fate is not Fate.ACCEPTED)]
    if ends[-1] < len(tokens):
        ends.append(len(tokens))
    return [end - start for start, end in pairwise(ends)]


def tokens_per_s(answers: Iterable[BenchAnswer]) -> float:
    """Mean over questions of tokens by seconds, as Spec-Bench has it."""
    return fmean(sum(answer.new_tokens) / sum(answer.wall_time) for answer in answers)


def page(found: Answers) -> str:
    """A row for each method: by task, speed by that of plain decoding, and tokens a pass."""
    asked = {answer.question.category for answer in found[PLAIN]}
    tasks = {task: kinds for task, kinds in TASKS.items() if asked.intersection(kinds)}
    tasks[OVERALL] = tuple(asked)
    rows = ["| | " + " | ".join(tasks) + " | tokens/s | texts as plain |", "|---" * (len(tasks) + 3) + "|"]
    for name, answers in found.items():
        cells = [name]
        for kinds in tasks.values():
            mine, plain = (
                [a for a in each if a.question.category in kinds] for each in (answers, found[PLAIN])
            )
            passes = fmean(length for answer in mine for length in answer.accept_lengths)
            cells.append(f"{tokens_per_s(mine) / tokens_per_s(plain):.2f} ({passes:.2f})")
        same = sum(a.turns == b.turns for a, b in zip(answers, found[PLAIN], strict=True))
        cells += [f"{tokens_per_s(answers):.1f}", f"{same} of {len(answers)}"]
        rows.append("| " + " | ".join(cells) + " |")
    about = (
        f"{len(found[PLAIN])} questions, one at a time: times the speed of plain decoding (tokens a pass)."
    )
    return "\n".join([about, "", *rows, ""])
