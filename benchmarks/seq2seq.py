"""A small pair of encoder-decoders, trained here on two tasks made from this interpreter's own library.

    translate: x = f(a)      ─▶  Assign([Name('x')], Call(Name('f'), [Name('a')], []))
    summarise: def f(a): ..  ─▶  the first line of its docstring

The first is as regular as a translation between close languages, the second as open as a summary.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.embedded import corpus, train
from specwire import embedded

_STATEMENTS = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr, ast.Raise, ast.Assert, ast.ImportFrom)
_MOST_SOURCE, _MOST_TARGET = 64, 64
"""In tokens; longer functions are cut, other longer texts are left out."""
_BATCH, _SORTED = 32, 4
_NUM_FILES = 400
_GENERATED = 64
_TRAINING = "training.json"
_OWN_TEXTS_SHARE = 0.3
"""Of the draft's time: the target writes what it learns from."""
_TARGET = {"d_model": 256, "d_ff": 512, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
_DRAFT = {"num_decoder_layers": 1}


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


_Tasks = Sequence[list[Pair]]


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
    """Train what is not there yet of `out/target` and `out/draft`, for so many seconds of processor time."""
    if (out / "draft").exists():
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine spin
    tokenizer, documents = _tokenizer(), corpus.split(corpus.read_library())[0]
    documents = random.Random(0).sample(documents, _NUM_FILES)
    tasks = [encoded(tokenizer, make(documents), cut=name == "summary") for name, make in TASKS.items()]
    print(*(f"{len(pairs)} pairs" for pairs in tasks), flush=True)
    if not (out / "target").exists():
        target, budget = _trained_target(_config(tokenizer, _TARGET), tasks, target_s)
        _save(target, budget, tokenizer, out / "target")
    target = T5ForConditionalGeneration.from_pretrained(out / "target").eval().requires_grad_(False)
    draft, budget = _distilled(target, tasks, draft_s)
    _save(draft, budget, tokenizer, out / "draft")


def card(pair: Path) -> str:
    """How both were trained."""
    found = {name: json.loads((pair / name / _TRAINING).read_text()) for name in ("target", "draft")}
    return ", ".join(
        f"the {name} of {each['parameters'] / 1e6:.1f} million parameters in {each['seconds']:.0f} s of "
        f"processor time, {each['steps']} steps of {_BATCH} texts"
        for name, each in found.items()
    )


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


def _save(model: Any, budget: train.Budget, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    facts = {"seconds": budget.elapsed, "steps": budget.step, "parameters": model.num_parameters()}
    (folder / _TRAINING).write_text(json.dumps(facts))


def _trained_target(config: T5Config, tasks: _Tasks, seconds: float) -> tuple[Any, train.Budget]:
    model = T5ForConditionalGeneration(config)
    _take_embeddings(model)
    optimizer, rng = train.Optimizer(model, 3e-3, inner=".block."), random.Random(0)
    budget = train.Budget(seconds, clock=time.process_time)
    for batch in _batches(tasks, config.pad_token_id, rng):
        if (progress := budget.progress) >= 1:
            break
        logits = _output(model, batch).logits[batch.is_wanted]
        loss = torch.nn.functional.cross_entropy(logits.float(), batch.targets[batch.is_wanted])
        _step(optimizer, loss, progress)
        budget.step += 1
        train.report_progress("target", budget, loss)
    return model, budget


def _take_embeddings(model: Any) -> None:
    """What a token means need not be learned again: the embedded target's table, at T5's scale."""
    with safetensors.safe_open(embedded.TARGET_DIR / "model.safetensors", "pt") as tensors:
        table = tensors.get_tensor("model.embed_tokens.weight").float()
    with torch.no_grad():
        model.shared.weight.copy_(table / table.std())


def _distilled(target: Any, tasks: _Tasks, seconds: float) -> tuple[Any, train.Budget]:
    """A draft with the target's encoder and one decoder layer, which learns what the target makes of its own
    texts (DistillSpec, arXiv 2310.08461)."""
    budget, rng = train.Budget(seconds, clock=time.process_time), random.Random(1)
    own: _Tasks = [[] for _ in tasks]
    while budget.progress < _OWN_TEXTS_SHARE:
        for pairs, of_task in zip(tasks, own, strict=True):
            for is_sampled in (False, True):
                sources = [pair.source for pair in rng.sample(pairs, _GENERATED)]
                of_task.extend(_written(target, sources, is_sampled=is_sampled))
    print(f"draft: {[len(pairs) for pairs in own]} texts by {budget.progress:.3f}", flush=True)
    draft = T5ForConditionalGeneration(T5Config.from_dict(target.config.to_dict() | _DRAFT))
    draft.load_state_dict(target.state_dict(), strict=False)  # all but the other decoder layers
    draft.encoder.requires_grad_(False)
    optimizer = train.Optimizer(draft, 3e-3, inner=".block.")
    for batch in _batches(own, target.config.pad_token_id, rng):
        if (progress := budget.progress) >= 1:
            break
        with torch.no_grad():
            taught = _output(target, batch)
        states = taught.encoder_last_hidden_state
        logits = _output(draft, batch, encoder_outputs=(states,)).logits[batch.is_wanted]
        share = torch.tensor(min(0.9, 2 * progress))
        loss = train.distillation_loss(taught.logits[batch.is_wanted], logits, share)
        _step(optimizer, loss, progress)
        budget.step += 1
        train.report_progress("draft", budget, loss)
    return draft, budget


@torch.no_grad()
def _written(target: Any, sources: Sequence[list[int]], *, is_sampled: bool) -> list[Pair]:
    """What the target writes for these sources, as far as its end token."""
    end = target.config.eos_token_id
    ids = _padded(sources)
    rows = target.generate(
        input_ids=ids.clamp(min=0),
        attention_mask=(ids >= 0).long(),
        max_new_tokens=_MOST_TARGET,
        # The cache that generate makes has as many layers as the encoder, which are fewer here.
        past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
        **({"do_sample": True, "top_k": 0} if is_sampled else {}),
    )[:, 1:].tolist()
    targets = [row[: row.index(end) + 1] if end in row else row for row in rows]
    return [Pair(source, target) for source, target in zip(sources, targets, strict=True)]


def _step(optimizer: train.Optimizer, loss: Tensor, progress: float) -> None:
    torch.autograd.backward(loss)
    optimizer.step(progress)


class _Batch(NamedTuple):
    sources: Tensor
    seen: Tensor
    starts: Tensor
    targets: Tensor

    @property
    def is_wanted(self) -> Tensor:
        """bool[num_rows, num_tokens]"""
        return self.targets >= 0


def _batches(tasks: _Tasks, start: int, rng: random.Random) -> Iterator[_Batch]:
    """For ever, of the tasks in turns: rows of much the same length, so that little is filled up."""
    for pairs in itertools.cycle(tasks):
        drawn = sorted(rng.sample(pairs, _BATCH * _SORTED), key=lambda pair: len(pair.target))
        first = rng.randrange(_SORTED) * _BATCH
        yield _batch(drawn[first : first + _BATCH], start)


def _batch(pairs: Sequence[Pair], start: int) -> _Batch:
    """Rows of sources and targets, filled up with -1 where nothing is read or wanted."""
    sources, targets = (_padded(rows) for rows in zip(*pairs, strict=True))
    starts = torch.cat([torch.full((len(pairs), 1), start), targets[:, :-1].clamp(min=0)], dim=1)
    return _Batch(sources.clamp(min=0), sources >= 0, starts, targets)


def _padded(rows: Sequence[list[int]]) -> Tensor:
    """int64[num_rows, longest], -1 after the end of a row."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=-1)


def _output(model: Any, batch: _Batch, **given: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(
            input_ids=None if given else batch.sources,
            attention_mask=batch.seen.long(),
            decoder_input_ids=batch.starts,
            use_cache=False,
            **given,
        )
