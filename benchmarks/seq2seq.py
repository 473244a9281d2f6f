"""A small pair of encoder-decoders, trained here on two tasks made from this interpreter's own library.

    translate: x = f(a)      ─▶  Assign([Name('x')], Call(Name('f'), [Name('a')], []))
    summarise: def f(a): ..  ─▶  the first line of its docstring

The first is as regular as a translation between close languages, the second as open as a summary.
"""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from benchmarks.embedded import corpus, train
from specwire import embedded

_STATEMENTS = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr, ast.Raise, ast.Assert, ast.ImportFrom)
_MOST_SOURCE, _MOST_TARGET = 64, 64
"""In tokens; longer functions are cut, other longer texts are left out."""
_BATCH = 16
_NUM_FILES = 200
_TARGET = {"d_model": 256, "d_ff": 512, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
_DRAFT = {"d_model": 128, "d_ff": 256, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}


class Example(NamedTuple):
    """What is read, and what is to be written."""

    source: str
    target: str


def translations(documents: Iterable[corpus.Document]) -> Iterator[Example]:
    """Statements, and their syntax trees."""
    for tree in _trees(documents):
        for node in ast.walk(tree):
            if isinstance(node, _STATEMENTS) and not _is_text(node):
                written = ast.dump(node, annotate_fields=False)
                written = written.replace(", Load()", "").replace(", Store()", "")
                yield Example(f"translate: {ast.unparse(node)}", written)


def summaries(documents: Iterable[corpus.Document]) -> Iterator[Example]:
    """Functions without their docstrings, and the first lines of these."""
    for tree in _trees(documents):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and (text := ast.get_docstring(node)):
                node.body = node.body[1:]
                yield Example(f"summarise: {ast.unparse(node)}", text.splitlines()[0])


TASKS = {"translation": translations, "summary": summaries}


def _trees(documents: Iterable[corpus.Document]) -> Iterator[ast.Module]:
    for document in documents:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes in old sources
            yield ast.parse(document.text)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class Pair(NamedTuple):
    """An example in tokens; the target ends with the end token."""

    source: list[int]
    target: list[int]


def encoded(tokenizer: PreTrainedTokenizerFast, examples: Iterable[Example], *, cut: bool) -> list[Pair]:
    """Those that are short enough; `cut` shortens sources instead."""
    listed = list(examples)
    sources = tokenizer([each.source for each in listed])["input_ids"]
    targets = tokenizer([each.target for each in listed])["input_ids"]
    return [
        Pair(source[:_MOST_SOURCE], [*target, tokenizer.eos_token_id])
        for source, target in zip(sources, targets, strict=True)
        if len(target) < _MOST_TARGET and (cut or len(source) <= _MOST_SOURCE)
    ]


def held_out(num: int) -> dict[str, list[list[int]]]:
    """Sources of each task from files that were not trained on."""
    tokenizer, documents = _tokenizer(), corpus.split(corpus.read_library())[1]
    found = {}
    for name, make in TASKS.items():
        pairs = encoded(tokenizer, make(documents), cut=name == "summary")
        chosen = random.Random(0).sample([pair for pair in pairs if len(pair.target) > 8], num)
        found[name] = [pair.source for pair in chosen]
    return found


def train_pair(out: Path, target_s: float, draft_s: float) -> None:
    """Train both in so many seconds, and save them as `out/target` and `out/draft`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine spin
    tokenizer, documents = _tokenizer(), corpus.split(corpus.read_library())[0]
    documents = random.Random(0).sample(documents, _NUM_FILES)
    pairs = [encoded(tokenizer, make(documents), cut=name == "summary") for name, make in TASKS.items()]
    print(*(f"{len(of_task)} pairs" for of_task in pairs), flush=True)
    target = T5ForConditionalGeneration(_config(tokenizer, _TARGET))
    _train(target, pairs, target_s, "target")
    target.eval().requires_grad_(False)
    draft = T5ForConditionalGeneration(_config(tokenizer, _DRAFT))
    _train(draft, pairs, draft_s, "draft", teacher=target)
    for name, model in (("target", target), ("draft", draft)):
        model.eval().save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)


def _tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(embedded.TARGET_DIR)


def _config(tokenizer: PreTrainedTokenizerFast, sizes: dict[str, int]) -> T5Config:
    end = tokenizer.eos_token_id
    return T5Config(
        vocab_size=corpus.VOCAB_SIZE,
        d_kv=64,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        decoder_start_token_id=end,
        pad_token_id=end,
        eos_token_id=end,
        **sizes,
    )


def _train(model: Any, tasks: Sequence[list[Pair]], seconds: float, name: str, teacher: Any = None) -> None:
    rng, budget = random.Random(0), train.Budget(seconds, 1_000_000)
    optimizer = train.Optimizer(model, 3e-3, inner=".block.")
    while (progress := budget.progress) < 1:
        batch = _batch(rng.sample(tasks[budget.step % len(tasks)], _BATCH), model.config.pad_token_id)
        logits, wanted = _logits(model, batch)
        if teacher is None:
            loss = torch.nn.functional.cross_entropy(logits.float(), wanted)
        else:
            with torch.no_grad():
                taught, _ = _logits(teacher, batch)
            loss = train.distillation_loss(taught, logits, torch.tensor(min(0.9, progress)))
        torch.autograd.backward(loss)
        optimizer.step(progress)
        budget.step += 1
        train.report_progress(name, budget, loss)


class _Batch(NamedTuple):
    sources: Tensor
    seen: Tensor
    starts: Tensor
    targets: Tensor


def _batch(pairs: Sequence[Pair], start: int) -> _Batch:
    """Rows of sources and targets, filled up with -1 where nothing is read or wanted."""
    sources, targets = (
        torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row) for row in rows], batch_first=True, padding_value=-1
        )
        for rows in zip(*pairs, strict=True)
    )
    starts = torch.cat([torch.full((len(pairs), 1), start), targets[:, :-1].clamp(min=0)], dim=1)
    return _Batch(sources.clamp(min=0), sources >= 0, starts, targets)


def _logits(model: Any, batch: _Batch) -> tuple[Tensor, Tensor]:
    """Logits [num_tokens, vocab_size] at the targets' tokens, and these."""
    with torch.autocast("cpu", torch.bfloat16):
        output = model(
            input_ids=batch.sources,
            attention_mask=batch.seen.long(),
            decoder_input_ids=batch.starts,
            use_cache=False,
        )
    is_wanted = batch.targets >= 0
    return output.logits[is_wanted], batch.targets[is_wanted]
