"""`python -m benchmarks.text_drafts`: tokens/s with drafts from text, for edits and for new code.

The real services in processes of their own, greedy decoding, one request at a time. The target is the widened
one, and its text is dictated: every pass runs, is sampled from and is paid for, and then its greedy choices
are replaced by the tokens of a given text. So the target can do edits, which the embedded one cannot, and all
systems write the same tokens.

- An edit: a function of Python's standard library, an instruction to rename one of its names, and the first
  line of the result. The text is the rest of the renamed function.
- New code: what the embedded target writes by itself after the prompts of the other benchmarks.

The draft model is the embedded one. The peer is transformers' `generate(prompt_lookup_num_tokens=...)` with
the same weights and the same dictation. Each task is done by all systems in turns, and ratios are taken task
by task. Every request has a cache salt of its own: prompts are not found in caches, outputs not in drafts.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Protocol
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

import coordinator.service
import draft_service.service
import verify_service.service
from benchmarks import prompts as new_code
from benchmarks import stats, widen
from benchmarks.bars import Bar, Report, machine
from specwire import Client, SamplingParams, embedded, tokenizer, tree
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.core import num_in_common
from specwire.engine.jobs import Job
from verify_service.verifier import Judged, VerifyDecider, VerifyJob

CACHE = Path("build/benchmarks")
PEER_NUM_TOKENS = 8
"""Guesses of transformers' lookup, as many as specwire's methods make at most."""
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


# --- tasks ----------------------------------------------------------------------------------------


def edits(encode: Callable[[str], list[int]], num_tasks: int, num_tokens: int) -> list[Task]:
    """Renamed functions, at most two of a module, and at most so many tokens of each."""
    found = []
    for module in MODULES:
        made = (_edit(source, node, encode) for source, node in _functions(module))
        found += [task for task in made if task is not None][:2]
    return [dataclasses.replace(task, text=task.text[:num_tokens]) for task in found[:num_tasks]]


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


# --- the target, dictated --------------------------------------------------------------------------


class Dictated(VerifyDecider):
    """Verdicts as of a target whose greedy texts are given, after the work of the real ones."""

    texts: ClassVar[dict[tuple[int, ...], list[int]]] = {}  # by prompt

    def apply(self, jobs: Sequence[Job], judged: Judged) -> None:
        """See `VerifyDecider`."""
        own, told = iter(judged.token_ids.tolist()), []
        for job in jobs:
            assert isinstance(job, VerifyJob)
            told += _told(job, list(islice(own, job.num_rows)))
        super().apply(jobs, judged._replace(token_ids=np.array(told, np.int64)))


def _told(job: VerifyJob, own: Sequence[int]) -> list[int]:
    """The text's token at each row; the target's own after its end."""
    prompt_len = job.sequence.prompt_len
    text = Dictated.texts[tuple(job.sequence.tokens[:prompt_len])]
    left = text[job.committed_len - prompt_len :]
    depths = [0, *(depth + 1 for depth in tree.depths(job.parents))] if job.parents else range(len(own))
    return [left[depth] if depth < len(left) else own_id for depth, own_id in zip(depths, own, strict=True)]


class Dictation(LogitsProcessor):  # type: ignore[misc]
    """The same for transformers. Other logits stay finite: its lookup drops guesses whose logits are not."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        index = input_ids.shape[1] - len(self._task.prompt)
        if index < len(self._task.text):
            scores = scores.clone()
            scores[:, self._task.text[index]] = scores.max() + 1
        return scores


# --- systems --------------------------------------------------------------------------------------


class System(Protocol):
    """One way to generate."""

    name: str

    def generate(self, task: Task) -> int:
        """Do a task; returns the number of the target's passes."""
        ...


class Specwire:
    """The services, by a request's `draft`."""

    def __init__(self, client: Client, name: str, draft: str) -> None:
        self.name, self._client, self._draft = name, client, draft

    def generate(self, task: Task) -> int:
        """See `System`."""
        params = SamplingParams(
            max_tokens=len(task.text),
            temperature=0,
            ignore_eos=True,
            draft=self._draft,
            cache_salt=str(time.monotonic_ns()),
        )
        done = self._client.generate(prompt_token_ids=task.prompt, params=params)
        assert list(done.token_ids) == task.text
        return done.speculation.num_rounds


class TransformersLookup:
    """The peer's prompt lookup, in this process."""

    name = "transformers' prompt lookup"

    def __init__(self, directory: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        self._num_passes = 0
        self._model.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self._num_passes += 1

    def generate(self, task: Task) -> int:
        """See `System`."""
        self._num_passes = 0
        ids = torch.tensor([task.prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=len(task.text),
            eos_token_id=None,
            prompt_lookup_num_tokens=PEER_NUM_TOKENS,
            max_matching_ngram_size=PEER_MAX_MATCH,
            logits_processor=LogitsProcessorList([Dictation(task)]),
        )
        assert out[0, len(task.prompt) :].tolist() == task.text
        return self._num_passes


@contextlib.contextmanager
def running(target: Path, tasks: Sequence[Task], num_threads: int) -> Iterator[Client]:
    """The three services with the dictated target, each in a process of its own."""
    verify = VerifyConfig(model=str(target), dtype="bfloat16", num_threads=num_threads)
    draft = DraftConfig(model=str(embedded.DRAFT_DIR), dtype="float32", num_threads=1)
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(_process(config, tasks)) for config in (verify, draft)]
        config = CoordinatorConfig(verify_address=addresses[0], draft_address=addresses[1])
        yield stack.enter_context(Client(stack.enter_context(_process(config, tasks))))


ServiceConfig = VerifyConfig | DraftConfig | CoordinatorConfig


@contextlib.contextmanager
def _process(config: ServiceConfig, tasks: Sequence[Task]) -> Iterator[str]:
    """Of a service; its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(config, tasks, theirs))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()  # the service ends with it
        process.join()


def _run(config: ServiceConfig, tasks: Sequence[Task], pipe: Connection) -> None:
    async def run() -> None:
        async with _serving(config) as address:
            pipe.send(address)
            with contextlib.suppress(EOFError):
                await asyncio.to_thread(pipe.recv)

    Dictated.texts = {tuple(task.prompt): task.text for task in tasks}
    with mock.patch.object(verify_service.service, "VerifyDecider", Dictated):
        asyncio.run(run())


def _serving(config: ServiceConfig) -> contextlib.AbstractAsyncContextManager[str]:
    if isinstance(config, VerifyConfig):
        return verify_service.service.serving(config)
    if isinstance(config, DraftConfig):
        return draft_service.service.serving(config)
    return coordinator.service.serving(config)


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system on one kind of task.

    Attributes:
        tokens_per_s: [num_samples] of each task and repetition, prefill included.
        tokens_a_pass: over all tasks.
    """

    system: str
    tokens_per_s: list[float]
    tokens_a_pass: float


def measure(systems: Sequence[System], tasks: Sequence[Task], num_repetitions: int) -> dict[str, Row]:
    """All systems on the same tasks, in turns; the first task is done once before, unmeasured."""
    for system in systems:
        system.generate(tasks[0])
    rates: dict[str, list[float]] = {system.name: [] for system in systems}
    num_passes = dict.fromkeys(rates, 0)
    for _ in range(num_repetitions):
        for number, task in enumerate(tasks):
            first = number % len(systems)
            for system in [*systems[first:], *systems[:first]]:
                print(f"{time.strftime('%X')} {system.name}: task {number}", file=sys.stderr)
                started_s = time.perf_counter()
                num_passes[system.name] += system.generate(task)
                rates[system.name].append(len(task.text) / (time.perf_counter() - started_s))
    num_tokens = num_repetitions * sum(len(task.text) for task in tasks)
    return {
        name: Row(system=name, tokens_per_s=rates[name], tokens_a_pass=num_tokens / num_passes[name])
        for name in rates
    }


def ratio(rows: dict[str, Row], system: str, reference: str) -> stats.Summary:
    """Of tokens/s, task by task."""
    return stats.summarise(stats.ratios(rows[system].tokens_per_s, rows[reference].tokens_per_s))


# --- the report -----------------------------------------------------------------------------------


def table(rows: dict[str, Row]) -> str:
    """As Markdown."""
    lines = ["| draft | tokens/s | × plain | × the model alone | tokens a pass |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        cells = [stats.summarise(row.tokens_per_s).text(1)]
        cells += [ratio(rows, name, reference).text(2) for reference in ("plain", "model")]
        lines.append(f"| {name} | {' | '.join(cells)} | {row.tokens_a_pass:.2f} |")
    return "\n".join(lines)


def bars(edited: dict[str, Row], new: dict[str, Row]) -> list[Bar]:
    """Of issue 15, section 3: medians of ratios of tokens/s."""
    found = (
        ("edits: ngram over plain", ratio(edited, "ngram", "plain"), 3.0),
        ("edits: ngram and model over the model alone", ratio(edited, "ngram and model", "model"), 1.15),
        ("edits: ngram over transformers' lookup", ratio(edited, "ngram", TransformersLookup.name), 1.0),
        ("new code: ngram over plain", ratio(new, "ngram", "plain"), 0.98),
        ("new code: suffix over plain", ratio(new, "suffix", "plain"), 0.98),
        ("new code: ngram and model over the model alone", ratio(new, "ngram and model", "model"), 0.98),
    )
    return [Bar(what=what, measured=found.median, limit=limit, at_least=True) for what, found, limit in found]


_ABOUT = """Greedy, one stream, widened target (252 M, bfloat16, threads: {threads}), embedded draft. Edits:
{edits}; new code: {new}, twice. The target's text is dictated: its passes run and cost what they cost, and
then its choices are replaced by a given text, which is what a target writes that can do the edit, or what the
embedded target writes as new code. Tokens/s and ratios are medians over tasks (least to greatest), prefill
included."""


def _size(tasks: Sequence[Task]) -> str:
    return f"{len(tasks)} tasks with {sum(len(task.text) for task in tasks)} tokens"


def main() -> None:
    """Measure and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.text_drafts", description=__doc__)
    parser.add_argument("--tasks", type=int, default=20, help="edits")
    parser.add_argument("--tokens", type=int, default=96, help="most of each task")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the target")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args()
    facts = machine()
    loaded = tokenizer.load(embedded.TARGET_DIR)
    assert loaded is not None
    tasks = edits(loaded.encode, args.tasks, args.tokens)
    new_tasks = continuations(loaded.encode, args.tokens)
    target = widen.cached(embedded.TARGET_DIR, widen.SHAPE_250M, torch.bfloat16, CACHE)
    torch.set_num_threads(args.threads)
    with running(target, [*tasks, *new_tasks], args.threads) as client:
        drafts = {"plain": "off", "model": "model", "ngram": "ngram", "suffix": "suffix"}
        drafts |= {"ngram and model": "ngram,model"}
        systems: list[System] = [Specwire(client, name, draft) for name, draft in drafts.items()]
        systems.append(TransformersLookup(target))
        edited = measure(systems, tasks, 1)
        new = measure(systems, new_tasks, 2)
    result = Report(
        name="text_drafts",
        title="Drafts from text",
        machine=facts,
        about=_ABOUT.format(threads=args.threads, edits=_size(tasks), new=_size(new_tasks)),
        bars=bars(edited, new),
        details=f"## Edits\n\n{table(edited)}\n\n## New code\n\n{table(new)}",
        data={
            name: [asdict(row) for row in rows.values()]
            for name, rows in (("edits", edited), ("new code", new))
        },
    )
    print(result.write(args.out))


if __name__ == "__main__":
    main()
