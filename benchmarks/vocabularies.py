"""`python -m benchmarks.vocabularies`: what a draft loses when its vocabulary is not the target's.

Two drafts begin as the embedded one and are trained alike, for a minute or two on one core: the first
with the target's tokenizer, the second with another, learnt from fewer files and cutting text at other
places, whose tables begin as those of the text of its tokens. Only counts matter, so the machine may be
busy. Trained drafts are kept below `--models` and found again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import trees, windows
from benchmarks.bars import Bar, Report, machine
from benchmarks.embedded import corpus, train
from specwire import AsyncClient, Rule, SamplingParams, embedded, tokenizer
from specwire.cli.supervisor import Stack
from specwire.core import ModelInfo

VOCAB_SIZE = 1792
BEGIN, END = "<s>", "</s>"
WINDOW, NUM_WINDOWS = 256, 8
"""Tokens of a training step."""
KINDS = trees.KINDS | {"rejection": SamplingParams(rule=Rule.REJECTION, seed=0, ignore_eos=True)}
CHAINS = (4, 8)
LEAST_RATIO = 0.8
CONFIG = json.dumps({"method": "draft_model", "use_heterogeneous_vocab": True})


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


def train_draft(out: Path, own_tokenizer: PreTrainedTokenizerFast, num_steps: int) -> None:
    """The embedded draft with this tokenizer, trained on the library's files that the embedded pair saw."""
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine spin
    documents, _ = corpus.split(corpus.read_library())
    model = with_tokenizer(embedded.DRAFT_DIR, own_tokenizer)
    rng = random.Random(0)
    rows = [torch.tensor(corpus.encode(own_tokenizer, documents, rng=rng))]
    optimizer, budget = train.Optimizer(model, 2e-3), train.Budget(1e9, num_steps)
    while (progress := budget.progress) < 1:
        batch = train.random_windows(rows, WINDOW, rng)[:NUM_WINDOWS]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step(progress)
        budget.step += 1
        train.report_progress(out.name, budget, loss)
    train.save(model.eval(), own_tokenizer, out)


def tokens_a_round(
    draft: Path | str, num_prompts: int, num_tokens: int
) -> tuple[dict[str, float], ModelInfo]:
    """By rule and length of the chain; and what the draft says of itself."""
    ours = tokenizer.load(embedded.TARGET_DIR)
    assert ours is not None
    prompts, found = windows.cut(ours, num_prompts), {}
    with Stack(replace(trees.EMBEDDED, draft=str(draft), speculative_config=CONFIG)) as stack:
        for kind, params in KINDS.items():
            for num in CHAINS:
                given = replace(params, num_draft_tokens=num, max_depth=0, max_tokens=num_tokens)
                done = asyncio.run(trees.generate_all(stack.address, prompts, given))
                found[f"{kind}, {num}"] = trees.tokens_a_round(done)
                print(draft, kind, num, f"{found[f'{kind}, {num}']:.2f}", flush=True)
        info = asyncio.run(_draft_info(stack.address))
    return found, info


async def _draft_info(address: str) -> ModelInfo:
    async with AsyncClient(address) as client:
        _, draft = await client.get_model_info()
    assert draft is not None
    return draft


def main() -> None:
    """Train what is not there, measure, and write the report."""
    parser = argparse.ArgumentParser(prog="benchmarks.vocabularies", description=__doc__)
    parser.add_argument("--models", type=Path, required=True, help="where the trained drafts are, or go")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    facts = machine()
    if not (args.models / "same").exists():
        ours = PreTrainedTokenizerFast.from_pretrained(embedded.TARGET_DIR)
        train_draft(args.models / "same", ours, args.steps)
    if not (args.models / "other").exists():
        documents, _ = corpus.split(corpus.read_library())
        train_draft(args.models / "other", learn_tokenizer(documents[::2]), args.steps)
    same, _ = tokens_a_round(args.models / "same", args.prompts, args.tokens)
    other, info = tokens_a_round(args.models / "other", args.prompts, args.tokens)
    shipped, _ = tokens_a_round("embedded", args.prompts, args.tokens)
    bars = [
        Bar(
            what=f"tokens a round over the same draft with the target's tokenizer, {kind}",
            measured=other[kind] / same[kind],
            limit=LEAST_RATIO,
            at_least=True,
        )
        for kind in other
        if kind.startswith("greedy")
    ]
    cells = {kind: (shipped[kind], same[kind], other[kind], other[kind] / same[kind]) for kind in other}
    rows = [
        f"| {kind} | {' | '.join(f'{cell:.2f}' for cell in of_kind)} |" for kind, of_kind in cells.items()
    ]
    head = "| | embedded draft | the target's tokenizer | its own tokenizer | ratio |"
    shared = (
        f"Its own tokenizer has {VOCAB_SIZE} tokens, among them {info.shared_vocab:.1%} of the target's, "
        f"and {info.shared_text:.1%} of those of a sample text."
    )
    about = (
        f"Tokens a round: accepted ones and the one after them. {args.prompts} prompts, {args.tokens} tokens "
        f"each, embedded target in float32, chains of 4 and 8; {args.steps} training steps of "
        f"{WINDOW * NUM_WINDOWS} tokens. Gumbel coupling and rejection sampling at temperature 1."
    )
    report = Report(
        name="vocabularies",
        title="Drafts with another vocabulary",
        machine=facts,
        about=about,
        bars=bars,
        details="\n".join([shared, "", head, "|---|---|---|---|---|", *rows]),
        data={"same": same, "other": other, "embedded": shipped},
    )
    print(report.write(args.out))


if __name__ == "__main__":
    main()
