"""Train the embedded pair from nothing but this interpreter's own library: one command, CPU is enough.

    python -m benchmarks.embedded.train --out DIR

The target learns next-token prediction; the draft then learns the target's distribution, on library text and
on text the target samples itself (DistillSpec, arXiv 2310.08461). Budgets are seconds or steps, whichever
ends first, and the learning rate follows the budget, so a slower machine ends well too, only earlier.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.embedded import corpus
from benchmarks.embedded.evaluation import evaluate, sample
from specwire import embedded

TOKENS_PER_STEP = 4096
TAUGHT_TOKENS = 8192
SHORT, LONG = 512, corpus.MAX_CONTEXT
NUM_CUT_VARIANTS = 4


@dataclass(frozen=True)
class Recipe:
    """Everything the result depends on, apart from the library's version and the machine's speed."""

    target_seconds: float = 2580.0
    """Wall-clock budget of the target's training, compilation included; 0 keeps the target found in DIR."""
    target_steps: int = 1_000_000
    draft_seconds: float = 1320.0
    """Wall-clock budget of the distillation, the preparation of its data included."""
    draft_steps: int = 1_000_000
    target_learning_rate: float = 3e-3
    draft_learning_rate: float = 2e-3
    seed: int = 0
    threads: int = 2
    compile: bool = True
    """Compile the losses: 1.4 times as fast, but wants a C++ compiler."""


class Budget:
    """The share of a time or step budget that is spent."""

    def __init__(
        self, seconds: float, steps: int = 1_000_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self.steps, self.step = seconds, steps, 0
        self._clock, self._start = clock, clock()

    @property
    def elapsed(self) -> float:
        """Seconds by the clock."""
        return self._clock() - self._start

    @property
    def progress(self) -> float:
        """0 at the start, 1 or more when either budget is used up."""
        return max(self.elapsed / self.seconds, self.step / self.steps)


class Optimizer:
    """Muon for the matrices inside the layers, AdamW for the rest; warm-up, then a cosine to zero."""

    def __init__(self, model: Any, learning_rate: float, inner: str = ".layers.") -> None:
        """Args:
        inner: part of the names of what is inside the layers.
        """
        inside = [p for n, p in model.named_parameters() if p.ndim == 2 and inner in n]
        known = {id(p) for p in inside}
        outer = [p for p in model.parameters() if id(p) not in known]
        self.parameters, self.peak = [*inside, *outer], learning_rate
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(inside, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outer, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
        )

    def step(self, progress: float) -> None:
        """Apply and clear the gradients, at the rate that belongs to `progress`."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        rate = self.peak * min(1.0, progress / 0.02) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)


def build_model(
    *, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, tied: bool, eos: int
) -> Any:
    """Return a fresh Llama in float32 over the tokenizer's vocabulary."""
    config = LlamaConfig(
        vocab_size=corpus.VOCAB_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        max_position_embeddings=LONG,
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    return LlamaForCausalLM(config)


def maybe_compile(function: Callable[..., Tensor], recipe: Recipe) -> Callable[..., Tensor]:
    """Compile `function` for the few exact shapes that training uses."""
    return torch.compile(function, dynamic=False) if recipe.compile else function


def report_progress(name: str, budget: Budget, loss: Tensor) -> None:
    """Print one line every fifty steps."""
    if budget.step % 50 == 0:
        print(
            f"{name} step {budget.step} {budget.elapsed:.0f}s {budget.progress:.3f} loss {loss.item():.4f}",
            flush=True,
        )


def fit(name: str, optimizer: Optimizer, budget: Budget, loss_of: Callable[[float], Tensor]) -> None:
    """Step until the budget is spent; `loss_of` is given the progress, from 0 to 1."""
    while (progress := budget.progress) < 1:
        loss = loss_of(progress)
        torch.autograd.backward(loss)
        optimizer.step(progress)
        budget.step += 1
        report_progress(name, budget, loss)


def library_rows(rng: random.Random) -> list[Tensor]:
    """The files that the embedded pair was trained on, in its tokens: one row, int64[N]."""
    documents, _ = corpus.split(corpus.read_library())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded.TARGET_DIR)
    return [torch.tensor(corpus.encode(tokenizer, documents, rng=rng))]


def random_windows(rows: list[Tensor], length: int, rng: random.Random) -> Tensor:
    """Return int64[TOKENS_PER_STEP / length, length + 1], cut anywhere from one of the encodings."""
    row = rng.choice(rows)
    starts = [rng.randrange(row.numel() - length) for _ in range(TOKENS_PER_STEP // length)]
    return torch.stack([row[start : start + length + 1] for start in starts])


def train_target(rows: list[Tensor], recipe: Recipe, *, eos: int) -> tuple[Any, Budget]:
    """Return the trained target and its spent budget; `rows` encode the same text, cut differently."""
    model = build_model(hidden=256, layers=6, heads=4, kv_heads=2, intermediate=704, tied=False, eos=eos)

    def loss_of(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    rng = random.Random(recipe.seed)
    compiled = maybe_compile(loss_of, recipe)
    optimizer = Optimizer(model, recipe.target_learning_rate)
    budget = Budget(recipe.target_seconds, recipe.target_steps)

    def next_loss(progress: float) -> Tensor:
        # Short windows teach the text cheaply; long ones, near the end, teach the far positions.
        length = LONG if progress > 0.7 and budget.step % 3 == 0 else SHORT
        return compiled(random_windows(rows, length, rng))

    fit("target", optimizer, budget, next_loss)
    return model.eval(), budget


@dataclass(frozen=True)
class TaughtWindows:
    """Windows of text with what the target makes of them."""

    tokens: Tensor
    """int64[num_windows, length]"""
    hidden: Tensor
    """bfloat16[num_windows, length, target hidden size]: the target's LM head turns it into logits.

    Kept instead of logits (8 times as large), so that the target's layers run once, not once an epoch.
    """


@torch.no_grad()
def teach(target: Any, row: Tensor, length: int, *, seconds: float, seed: int) -> TaughtWindows:
    """Run the target once over the windows of `row`, int64[N], in random order, for at most `seconds`."""
    tokens = row[: row.numel() // length * length].view(-1, length)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
    deadline = time.monotonic() + seconds
    hidden: list[Tensor] = []
    for batch in torch.split(tokens[order], TAUGHT_TOKENS // length):
        with torch.autocast("cpu", torch.bfloat16):
            hidden.append(target.model(input_ids=batch, use_cache=False).last_hidden_state.bfloat16())
        if time.monotonic() > deadline:
            break
    taught = torch.cat(hidden)
    return TaughtWindows(tokens[order][: len(taught)], taught)


def own_text(target: Any, row: Tensor, *, seconds: float, seed: int) -> Tensor:
    """Return int64[N] of text the target samples at temperature 1, for `seconds`, prompted from `row`."""
    num_rows, prompt_len, num_new = 128, 32, 224
    generator = torch.Generator().manual_seed(seed)
    deadline = time.monotonic() + seconds
    parts: list[Tensor] = []
    while not parts or time.monotonic() < deadline:
        starts = torch.randint(row.numel() - prompt_len, (num_rows, 1), generator=generator)
        prompts = row[starts + torch.arange(prompt_len)]
        parts.append(sample(target, prompts, num_new, temperature=1.0, generator=generator).flatten())
    return torch.cat(parts)


def distillation_share(progress: float) -> Tensor:
    """The `share` of `distillation_loss` at this progress of training: float32 scalar."""
    return torch.tensor(min(0.9, 2 * progress))


def distillation_loss(target_logits: Tensor, draft_logits: Tensor, share: Tensor) -> Tensor:
    """Return the mean of (1 - share) forward KL + share total variation; logits are [..., V].

    Acceptance is 1 - total variation, so that is the aim; but its gradient vanishes where the two hardly
    overlap, so KL leads at first (DistillSpec, arXiv 2310.08461, compares both).
    """
    target_logs = target_logits.float().log_softmax(-1)
    draft_logs = draft_logits.float().log_softmax(-1)
    target_probs = target_logs.exp()
    divergence = (target_probs * (target_logs - draft_logs)).sum(-1).mean()
    variation = 0.5 * (target_probs - draft_logs.exp()).abs().sum(-1).mean()
    return (1 - share) * divergence + share * variation


def taught_batches(pools: list[TaughtWindows], rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, hidden) for ever, the pools in turn, a pool's windows in random order."""
    while True:
        for pool in pools:
            num_windows, length = pool.tokens.shape
            chosen = torch.tensor(rng.sample(range(num_windows), TOKENS_PER_STEP // length))
            yield pool.tokens[chosen], pool.hidden[chosen]


def distil(target: Any, rows: list[Tensor], recipe: Recipe, *, eos: int) -> tuple[Any, Budget]:
    """Return the draft, trained to copy the target's distributions, and its spent budget."""
    budget = Budget(recipe.draft_seconds, recipe.draft_steps)
    seconds, seed = 0.06 * recipe.draft_seconds, recipe.seed
    samples = own_text(target, rows[0], seconds=seconds, seed=seed)
    sources = ((rows[0], SHORT), (samples, SHORT), (rows[1], LONG))
    pools = [teach(target, row, length, seconds=seconds, seed=seed) for row, length in sources]
    print(f"draft: taught {[pool.tokens.numel() for pool in pools]} by {budget.progress:.3f}", flush=True)
    draft = build_model(hidden=256, layers=2, heads=4, kv_heads=2, intermediate=512, tied=False, eos=eos)
    # The target's own tables: what a token means need not be learned again.
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.lm_head.load_state_dict(target.lm_head.state_dict())

    def loss_of(tokens: Tensor, hidden: Tensor, share: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            target_logits = target.lm_head(hidden)
            draft_logits = draft(input_ids=tokens, use_cache=False).logits
        return distillation_loss(target_logits, draft_logits, share)

    target.requires_grad_(False)
    compiled = maybe_compile(loss_of, recipe)
    batches = taught_batches(pools, random.Random(recipe.seed))

    def next_loss(progress: float) -> Tensor:
        return compiled(*next(batches), distillation_share(progress))

    fit("draft", Optimizer(draft, recipe.draft_learning_rate), budget, next_loss)
    return draft.eval(), budget


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write bfloat16 weights, configuration and tokenizer as `from_pretrained` reads them."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_for_evaluation(folder: Path) -> Any:
    """Read back what was saved: the numbers of the card are those of the rounded weights."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main(recipe: Recipe, out: Path) -> None:
    """Train, save and evaluate the pair below `out`."""
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    begin = time.monotonic()
    train, held_out = corpus.split(corpus.read_library())
    tokenizer = corpus.train_tokenizer(train)
    rng, eos = random.Random(recipe.seed), tokenizer.eos_token_id
    rows = [torch.tensor(corpus.encode(tokenizer, train, rng=rng)) for _ in range(NUM_CUT_VARIANTS)]
    print(f"{len(train)} files, {rows[0].numel()} tokens", flush=True)

    steps = {}
    if recipe.target_seconds > 0:
        target, budget = train_target(rows, recipe, eos=eos)
        steps["target"] = budget.step
        save(target, tokenizer, out / "target")
    draft, budget = distil(load_for_evaluation(out / "target").eval(), rows, recipe, eos=eos)
    steps["draft"] = budget.step
    save(draft, tokenizer, out / "draft")
    training = {
        "recipe": asdict(recipe),
        "seconds": time.monotonic() - begin,
        "steps": steps,
        "tokens_per_step": TOKENS_PER_STEP,
        "train_files": len(train),
        "train_tokens": rows[0].numel(),
    }
    report = report_on(out, tokenizer, held_out) | {"training": training}
    (out / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def report_on(
    out: Path, tokenizer: PreTrainedTokenizerFast, held_out: list[corpus.Document]
) -> dict[str, Any]:
    """Evaluate the pair saved below `out` on the held-out files."""
    ids = torch.tensor(corpus.encode(tokenizer, held_out, rng=None))
    num_bytes = sum(len(document.text.encode()) for document in held_out)
    target, draft = (load_for_evaluation(out / name) for name in ("target", "draft"))
    return evaluate(target, draft, tokenizer, ids, num_bytes=num_bytes)


def parse(arguments: list[str] | None = None) -> tuple[Recipe, Path]:
    """Read the command line; every field of `Recipe` is a flag."""
    parser = argparse.ArgumentParser(prog="benchmarks.embedded.train", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="where target/, draft/ and evaluation.json go"
    )
    for field in fields(Recipe):
        flag, default = "--" + field.name.replace("_", "-"), field.default
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    values = vars(parser.parse_args(arguments))
    out = values.pop("out")
    return Recipe(**values), out


if __name__ == "__main__":
    main(*parse())
