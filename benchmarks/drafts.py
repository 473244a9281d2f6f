"""Drafts for the embedded target that the package does not have, trained here for `benchmarks.methods`.

All learn from the standard library's files that the embedded pair was trained on, but for the draft that has
read prose alone before it learns while it serves. Minutes on one core each; how good they get does not matter
for whether they cost anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import dflash_training, mtp_training
from benchmarks.embedded import corpus, train
from benchmarks.prompts import python_windows
from specwire import AsyncClient, Rule, SamplingParams, embedded
from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig
from tools.drafts import TrainEagle3Config, TrainHeadsConfig
from tools.eagle3 import training as eagle3_training
from tools.heads import training

VOCAB_SIZE = 1792
BEGIN, END = "<s>", "</s>"
WINDOW, NUM_WINDOWS = 256, 8
"""Tokens of a training step."""
_TEXT_CHARS, _EAGLE_CHARS = 1_000_000, 6_000_000
_NUM_STREAMS, _LEARNT_WINDOWS, _LEARNT_TOKENS = 8, 720, 96


def heads(out: Path, seconds: float) -> None:
    """Heads of the embedded target, in closed form: they take as long as they take."""
    with _text(_TEXT_CHARS) as text:
        training.train(TrainHeadsConfig(text=text, out=str(out)), _quiet)


def eagle3(out: Path, seconds: float) -> None:
    """An EAGLE-3 of the embedded target, with about as many steps as one core takes in this time."""
    with _text(_EAGLE_CHARS) as text:
        config = TrainEagle3Config(text=text, out=str(out), steps=max(1, int(seconds)), num_threads=1)
        eagle3_training.train(config, _quiet)


@contextlib.contextmanager
def _text(num_chars: int) -> Iterator[str]:
    """A file with so much of what the embedded pair was trained on."""
    documents, _ = corpus.split(corpus.read_library())
    random.Random(0).shuffle(documents)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as text:
        text.write("\n".join(document.text for document in documents)[:num_chars])
        text.flush()
        yield text.name


@contextlib.contextmanager
def _quiet(title: str, total: int) -> Iterator[Any]:
    yield lambda num: None


def inner(out: Path, seconds: float) -> None:
    """The embedded draft without its second layer, trained to guess as the whole one does."""
    teacher = LlamaForCausalLM.from_pretrained(embedded.DRAFT_DIR, dtype=torch.float32).eval()
    model: Any = LlamaForCausalLM(LlamaConfig(**teacher.config.to_dict() | {"num_hidden_layers": 1}))
    model.load_state_dict(teacher.state_dict(), strict=False)

    def loss_of(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
        found = model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
        return torch.nn.functional.kl_div(
            found.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean"
        )

    documents, _ = corpus.split(corpus.read_library())
    _train(model, _own_tokenizer(), documents, loss_of, out, seconds)


def other(out: Path, seconds: float) -> None:
    """The embedded draft with another tokenizer, learnt from fewer files and cutting text at other places."""
    documents, _ = corpus.split(corpus.read_library())
    tokenizer = learn_tokenizer(documents[::2])
    model = with_tokenizer(embedded.DRAFT_DIR, tokenizer)
    _train(model, tokenizer, documents, _next_token_loss(model), out, seconds)


def learnt(out: Path, seconds: float) -> None:
    """A draft that has read prose alone (the topics of Python's `help`), and then learns while it serves.

    Each takes half of the time.
    """
    target = train.load_for_evaluation(embedded.TARGET_DIR)
    tokenizer = _own_tokenizer()
    model = train.build_model(
        hidden=256, layers=2, heads=4, kv_heads=2, intermediate=512, tied=False, eos=tokenizer.eos_token_id
    )
    model.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    model.lm_head.load_state_dict(target.lm_head.state_dict())
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    documents = [corpus.Document("topics", "\n\n".join(topics.values()))]
    with tempfile.TemporaryDirectory() as folder:
        prose = Path(folder) / "prose"
        _train(model, tokenizer, documents, _next_token_loss(model), prose, seconds / 2)
        config = UpConfig(
            draft=str(prose),
            dtype="float32",
            draft_dtype="float32",
            draft_placement="service",
            draft_learn=True,
            draft_learn_share=0.5,
            address="127.0.0.1:0",
            num_threads=1,
        )
        with Stack(config, {"SPECWIRE_LEARN_OUT": str(out)}) as stack:
            asyncio.run(_serve(stack.address, seconds / 2))
        if not out.exists():  # nothing was learnt in this time
            shutil.copytree(prose, out)


async def _serve(address: str, seconds: float) -> None:
    """Requests of both kinds for so long, from files that neither model has seen."""
    prompts, numbers, until_s = python_windows(_LEARNT_WINDOWS), count(), time.monotonic() + seconds
    params = SamplingParams(
        num_draft_tokens=4, rule=Rule.REJECTION, ignore_eos=True, max_tokens=_LEARNT_TOKENS
    )

    async def stream(client: AsyncClient) -> None:
        while time.monotonic() < until_s:
            number = next(numbers)
            given = replace(params, temperature=float(number % 2), seed=number)
            await client.generate(params=given, prompt_token_ids=prompts[number % len(prompts)])

    async with AsyncClient(address) as client:
        await asyncio.gather(*(stream(client) for _ in range(_NUM_STREAMS)))


MAKERS: Mapping[str, Callable[[Path, float], None]] = {
    "heads": heads,
    "inner": inner,
    "other": other,
    "learnt": learnt,
    "mtp": mtp_training.make,
    "dflash": dflash_training.make,
    "eagle3": eagle3,
}
"""By name in the folder of models: each writes a directory, after so many seconds of training."""


def _train(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[corpus.Document],
    loss_of: Callable[[Tensor], Tensor],
    out: Path,
    seconds: float,
) -> None:
    """Train on windows of these documents, int64[`NUM_WINDOWS`, `WINDOW` + 1], and save."""
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine spin
    rng = random.Random(0)
    rows = [torch.tensor(corpus.encode(tokenizer, documents, rng=rng))]

    def next_loss(progress: float) -> Tensor:
        return loss_of(train.random_windows(rows, WINDOW, rng)[:NUM_WINDOWS])

    train.fit(out.name, train.Optimizer(model, 2e-3), train.Budget(seconds), next_loss)
    train.save(model.eval(), tokenizer, out)


def _next_token_loss(model: Any) -> Callable[[Tensor], Tensor]:
    def loss_of(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    return loss_of


def _own_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(embedded.TARGET_DIR)


def learn_tokenizer(
    documents: Sequence[corpus.Document], vocab_size: int = VOCAB_SIZE
) -> PreTrainedTokenizerFast:
    """A byte-level BPE that cuts text as GPT-2's: a run of spaces lends its last one to the word after it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BEGIN, eos_token=END, clean_up_tokenization_spaces=False
    )


def with_tokenizer(source: Path, other: PreTrainedTokenizerFast) -> Any:
    """A Llama for another tokenizer: a token is read as the last of the old tokens of its text, and written
    as the first of them."""
    old = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    ours = PreTrainedTokenizerFast.from_pretrained(source)
    size = max(other.get_vocab().values()) + 1
    parts = [[0]] * size
    for name, token_id in other.get_vocab().items():
        known = ours.get_vocab().get(name)
        spelt = ours.encode(other.decode([token_id]), add_special_tokens=False)
        parts[token_id] = [known] if known is not None else spelt or [0]
    for special in other.all_special_ids:
        parts[special] = [ours.eos_token_id]
    weights = old.state_dict()
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][[part[-1] for part in parts]]
    weights["lm_head.weight"] = weights["lm_head.weight"][[part[0] for part in parts]]
    names = {"vocab_size": size, "bos_token_id": other.bos_token_id, "eos_token_id": other.eos_token_id}
    new = LlamaForCausalLM(LlamaConfig(**old.config.to_dict() | names))
    new.load_state_dict(weights)
    return new
