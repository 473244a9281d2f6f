"""`python -m benchmarks.text_drafts`: tokens a pass with drafts from the text itself, for edits and new code.

The target's text is given, and the drafters propose along it: with greedy decoding every draft gives the same
text, so that tokens a pass need no target.

- An edit: a function of Python's standard library, an instruction to rename one of its names, and the first
  line of the result. The text is the rest of the renamed function, which a model that can do the edit writes.
- New code: what the embedded target writes by itself after the prompts of the other benchmarks.

The draft model is the embedded one; the peer is the candidate generator behind transformers'
`generate(prompt_lookup_num_tokens=...)`. The coordinator's own drafters are used; a round has 8 draft tokens.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from benchmarks import prompts as new_code
from benchmarks.bars import Bar, Report, machine
from coordinator.cost import Cost
from coordinator.drafts.combined import CombinedDrafter
from coordinator.drafts.ngram import NgramDrafter
from coordinator.generation import Drafter, Plan, Round
from specwire import embedded, tokenizer
from specwire.config.speculative import NgramConfig
from specwire.core import Outcome, Proposal, Verdict, num_in_common
from specwire.telemetry.tracing import NO_SPAN, Span

NUM_DRAFT_TOKENS = 8
CONFIG = NgramConfig(num_speculative_tokens=NUM_DRAFT_TOKENS)
PEER_MAX_MATCH = 16
"""Of the sizes 2 (its default), 4 and 16 the one with which transformers does the edits in fewest passes."""
MODULES = (
    "ast",
    "bisect",
    "calendar",
    "colorsys",
    "copy",
    "csv",
    "difflib",
    "fnmatch",
    "fractions",
    "heapq",
    "inspect",
    "ntpath",
    "posixpath",
    "random",
    "shlex",
    "shutil",
    "statistics",
    "string",
    "textwrap",
)
MIN_TOKENS, MAX_TOKENS = 60, 200
"""Length of an edited function."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Token ids of a prompt, and those that the target writes after it."""

    prompt: list[int]
    text: list[int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to draft on one kind of task.

    Attributes:
        tokens_a_pass: over all tasks.
        by_source: rounds, draft tokens and accepted ones of each source.
    """

    system: str
    tokens_a_pass: float
    by_source: dict[str, list[int]]


# --- tasks ----------------------------------------------------------------------------------------


def edits(encode: Callable[[str], list[int]], num_tasks: int) -> list[Task]:
    """Renamed functions, at most two of a module."""
    found = []
    for module in MODULES:
        made = (_edit(source, node, encode) for source, node in _functions(module))
        found += [task for task in made if task is not None][:2]
    return found[:num_tasks]


def _functions(module: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Source and syntax of the module's own functions."""
    source = inspect.getsource(importlib.import_module(module))
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            yield ast.get_source_segment(source, node) or "", node


def _edit(source: str, function: ast.FunctionDef, encode: Callable[[str], list[int]]) -> Task | None:
    """None if the function has no name to change, or an unsuitable length."""
    if not function.args.args or not MIN_TOKENS <= len(encode(source)) <= MAX_TOKENS:
        return None
    old = function.args.args[0].arg
    renamed = re.sub(rf"\b{old}\b", f"new_{old}", source)
    before = f"{source}\n\n\n# The same, with {old} renamed to new_{old}:\n"
    prompt, whole = encode(before + renamed[: renamed.index("\n") + 1]), encode(before + renamed)
    num_prompt_tokens = num_in_common(prompt, whole)
    return Task(prompt=prompt[:num_prompt_tokens], text=whole[num_prompt_tokens:])


def continuations(encode: Callable[[str], list[int]], num_tokens: int) -> list[Task]:
    """New code, by the embedded target."""
    target = _model(embedded.TARGET_DIR)
    tasks = []
    for prompt in map(encode, new_code.PROMPTS):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        made = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens)
        tasks.append(Task(prompt=prompt, text=made[0, len(prompt) :].tolist()))
    return tasks


def _model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


# --- drafters -------------------------------------------------------------------------------------


class AlongTheText:
    """A source of proposals along a known text."""

    source = unavailable = ""

    async def propose(self, committed: Sequence[int], plan: Plan, parent: Span) -> tuple[Proposal, Cost]:
        """See `generation.Drafter`."""
        token_ids = self.token_ids(list(committed), plan)
        return Proposal(len(committed), token_ids, source=self.source), Cost()

    def token_ids(self, committed: list[int], plan: Plan) -> list[int]:
        """Of the proposal."""
        return []

    def observe(self, done: Round) -> None:
        """See `generation.Drafter`."""

    def close(self) -> None:
        """See `generation.Drafter`."""


class EmbeddedModel(AlongTheText):
    """The embedded draft: its likeliest token after each prefix of the text, from one pass.

    As far as they agree with the text these are the chain that the model drafts; what follows the first
    token that differs is never judged.
    """

    source = "model"

    def __init__(self, model: Any, task: Task) -> None:
        with torch.inference_mode():
            logits = model(torch.tensor([task.prompt + task.text])).logits[0]
        self._next: list[int] = logits.argmax(dim=-1).tolist()

    def token_ids(self, committed: list[int], plan: Plan) -> list[int]:
        """See `AlongTheText`."""
        start = len(committed) - 1
        return self._next[start : start + plan.num_draft_tokens]


class TransformersLookup(AlongTheText):
    """The peer's prompt lookup."""

    source = "transformers"

    def __init__(self, task: Task) -> None:
        self._generator = PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor([0]),
            num_output_tokens=NUM_DRAFT_TOKENS,
            max_matching_ngram_size=PEER_MAX_MATCH,
            max_length=len(task.prompt) + len(task.text) + NUM_DRAFT_TOKENS,
            vocab_size=1 << 20,
        )

    def token_ids(self, committed: list[int], plan: Plan) -> list[int]:
        """See `AlongTheText`."""
        candidates, _ = self._generator.get_candidates(torch.tensor([committed]))
        found: list[int] = candidates[0, len(committed) :].tolist()
        return found[: plan.num_draft_tokens]


# --- rounds ---------------------------------------------------------------------------------------


def measure(tasks: Sequence[Task]) -> list[Row]:
    """All drafters on the same tasks."""
    draft = _model(embedded.DRAFT_DIR)

    def text() -> NgramDrafter:
        return NgramDrafter(CONFIG, matches_tokens=True, is_fixed=True)

    makers: dict[str, Callable[[Task], Drafter]] = {
        "plain": lambda _: AlongTheText(),
        "model": lambda task: EmbeddedModel(draft, task),
        "ngram": lambda _: text(),
        "ngram and model": lambda task: CombinedDrafter(text(), EmbeddedModel(draft, task)),
        "transformers' prompt lookup": TransformersLookup,
    }
    return [_row(name, make, tasks) for name, make in makers.items()]


def _row(name: str, make: Callable[[Task], Drafter], tasks: Sequence[Task]) -> Row:
    rounds = [done for task in tasks for done in asyncio.run(_rounds(task, make(task)))]
    by_source: dict[str, list[int]] = {}
    for done in (each for each in rounds if each.proposal.token_ids):
        counts = by_source.setdefault(done.proposal.source, [0, 0, 0])
        for i, more in enumerate((1, len(done.proposal.token_ids), done.outcome.num_accepted)):
            counts[i] += more
    num_tokens = sum(len(task.text) for task in tasks)
    return Row(system=name, tokens_a_pass=num_tokens / len(rounds), by_source=by_source)


async def _rounds(task: Task, drafter: Drafter) -> list[Round]:
    """Of a generation that writes the task's text."""
    committed, rounds = list(task.prompt), []
    while left := task.text[len(committed) - len(task.prompt) :]:
        plan = Plan(NUM_DRAFT_TOKENS, num_text_tokens=NUM_DRAFT_TOKENS).within(len(left) - 1, len(left))
        proposal, cost = await drafter.propose(committed, plan, NO_SPAN)
        num_accepted = num_in_common(proposal.token_ids, left)
        outcome = Outcome(range(num_accepted), left[num_accepted])
        done = Round(proposal, Verdict(len(committed), left), outcome, cost, Cost())
        committed += [token_id for token_id, _ in done.emitted]
        drafter.observe(done)
        rounds.append(done)
    return rounds


# --- the report -----------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """As Markdown."""
    lines = [
        "| draft | tokens a pass | rounds, draft tokens and accepted ones of each source |",
        "|---|---|---|",
    ]
    for row in rows:
        counts = (f"{name}: {', '.join(map(str, of))}" for name, of in row.by_source.items())
        lines.append(f"| {row.system} | {row.tokens_a_pass:.2f} | {'; '.join(counts)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.text_drafts", description=__doc__)
    parser.add_argument("--tasks", type=int, default=24, help="edits")
    parser.add_argument("--tokens", type=int, default=96, help="of each new code")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    loaded = tokenizer.load(embedded.TARGET_DIR)
    assert loaded is not None
    tasks = edits(loaded.encode, args.tasks)
    edited, new = measure(tasks), measure(continuations(loaded.encode, args.tokens))
    of = {row.system: row.tokens_a_pass for row in edited}
    of_new = {row.system: row.tokens_a_pass for row in new}
    ratios = (
        ("edits: ngram over plain", of["ngram"] / of["plain"], 3.0),
        ("edits: ngram and model over the model alone", of["ngram and model"] / of["model"], 1.15),
        ("edits: ngram over transformers' lookup", of["ngram"] / of["transformers' prompt lookup"], 1.0),
        ("new code: ngram and model over the model", of_new["ngram and model"] / of_new["model"], 0.98),
    )
    bars = [Bar(what=what, measured=ratio, limit=limit, at_least=True) for what, ratio, limit in ratios]
    num_tokens = sum(len(task.text) for task in tasks)
    result = Report(
        name="text_drafts",
        title="Drafts from the text itself",
        machine=facts,
        about=f"Greedy texts, {NUM_DRAFT_TOKENS} draft tokens a round, n-grams of {CONFIG.prompt_lookup_min} "
        f"to {CONFIG.prompt_lookup_max} tokens (transformers: 1 to {PEER_MAX_MATCH}). {len(tasks)} edits "
        f"with {num_tokens} tokens together: the renamed functions themselves, as a target writes them that "
        "can do the edit (the embedded one cannot). New code is what the embedded target writes. Tokens a "
        "pass are counted along these texts with the coordinator's own drafters; no time is measured.",
        bars=bars,
        details=f"## Edits\n\n{table(edited)}\n\n## New code\n\n{table(new)}",
        data={"edits": [asdict(row) for row in edited], "new code": [asdict(row) for row in new]},
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
