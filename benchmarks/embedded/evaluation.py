"""What the model card reports, measured on held-out files: loss, acceptance, agreement, cost, samples."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast

WINDOW = 1024
PROMPTS = ("import os\n\n\ndef ", 'class Stack:\n    """', "def read_lines(path):\n")


def overlap(target_logits: Tensor, draft_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return sum over tokens of min(target, draft) probability, over the last axis.

    This is the chance that rejection sampling keeps a draft token (Leviathan et al. 2023, corollary 3.6).
    """
    target_probs = (target_logits.float() / temperature).softmax(-1)
    draft_probs = (draft_logits.float() / temperature).softmax(-1)
    return torch.minimum(target_probs, draft_probs).sum(-1)


@torch.no_grad()
def compare(target: Any, draft: Any, ids: Tensor, *, window: int = WINDOW) -> dict[str, float]:
    """Return the pair's mean losses and agreement over consecutive windows of `ids`, int64[N]."""
    sums: dict[str, float] = {}
    count = 0
    for start in range(0, ids.numel() - 1, window):
        piece = ids[start : start + window + 1]
        inputs, labels = piece[None, :-1], piece[1:]
        target_logits = target(input_ids=inputs, use_cache=False).logits[0].float()
        draft_logits = draft(input_ids=inputs, use_cache=False).logits[0].float()
        for name, value in _window_sums(target_logits, draft_logits, labels).items():
            sums[name] = sums.get(name, 0.0) + value
        count += labels.numel()
    return {name: value / count for name, value in sums.items()}


def _window_sums(target_logits: Tensor, draft_logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return sums over the positions of one window; logits are [T, V], labels [T]."""
    nll = torch.nn.functional.cross_entropy
    same = target_logits.argmax(-1) == draft_logits.argmax(-1)
    return {
        "target_nats_per_token": nll(target_logits, labels, reduction="sum").item(),
        "draft_nats_per_token": nll(draft_logits, labels, reduction="sum").item(),
        "alpha_t1.0": overlap(target_logits, draft_logits).sum().item(),
        "alpha_t0.7": overlap(target_logits, draft_logits, 0.7).sum().item(),
        "greedy_agreement": same.sum().item(),
    }


@torch.no_grad()
def loss_by_position(model: Any, ids: Tensor, *, window: int, edges: Sequence[int]) -> dict[str, float]:
    """Return nats a token between consecutive `edges` of full windows: does a long context still help?"""
    losses = []
    for start in range(0, ids.numel() - window, window):
        piece = ids[start : start + window + 1]
        logits = model(input_ids=piece[None, :-1], use_cache=False).logits[0].float()
        losses.append(torch.nn.functional.cross_entropy(logits, piece[1:], reduction="none"))
    mean = torch.stack(losses).mean(0)
    return {f"{low}-{high}": mean[low:high].mean().item() for low, high in pairwise(edges)}


@torch.no_grad()
def sample(
    model: Any, prompts: Tensor, num_new: int, *, temperature: float, generator: torch.Generator
) -> Tensor:
    """Return `prompts`, int64[B, P], continued to [B, P + num_new]; temperature 0 is greedy."""
    cache = DynamicCache()
    row, inputs = prompts, prompts
    for _ in range(num_new):
        logits = model(input_ids=inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        if temperature == 0:
            inputs = logits.argmax(-1, keepdim=True)
        else:
            inputs = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        row = torch.cat([row, inputs], dim=1)
    return row


@torch.no_grad()
def step_ms(model: Any, *, context: int = 256, repeats: int = 60) -> float:
    """Return the median milliseconds of a one-token forward behind `context` cached tokens."""
    cache = DynamicCache()
    model(input_ids=torch.ones(1, context, dtype=torch.long), past_key_values=cache)
    token = torch.ones(1, 1, dtype=torch.long)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        model(input_ids=token, past_key_values=cache)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def show_samples(
    model: Any, tokenizer: PreTrainedTokenizerFast, *, num_new: int = 160, seed: int = 0
) -> list[dict[str, Any]]:
    """Return unedited continuations of `PROMPTS`, greedy and at temperature 0.8, cut at end-of-text."""
    samples = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        for temperature in (0.0, 0.8):
            generator = torch.Generator().manual_seed(seed)
            row = sample(model, ids, num_new, temperature=temperature, generator=generator)[0].tolist()
            text = tokenizer.decode(row).split(tokenizer.eos_token)[0]
            samples.append({"prompt": prompt, "temperature": temperature, "text": text})
    return samples


def evaluate(
    target: Any, draft: Any, tokenizer: PreTrainedTokenizerFast, held_out: Tensor, *, num_bytes: int
) -> dict[str, Any]:
    """Return every number of the model card; `held_out` is int64[N], the tokens of `num_bytes` of text."""
    target, draft = target.float().eval(), draft.float().eval()
    report: dict[str, Any] = dict(compare(target, draft, held_out))
    tokens_per_byte = (held_out.numel() - 1) / num_bytes
    for name in ("target", "draft"):
        report[f"{name}_bits_per_byte"] = report[f"{name}_nats_per_token"] * tokens_per_byte / math.log(2)
    edges = (0, 256, 512, 1024, 1536, 2048)
    report["target_nats_by_position"] = loss_by_position(target, held_out, window=2048, edges=edges)
    report |= _on_own_samples(target, draft, held_out)
    report["target_step_ms"], report["draft_step_ms"] = step_ms(target), step_ms(draft)
    report["cost_ratio_c"] = report["draft_step_ms"] / report["target_step_ms"]
    report["num_parameters"] = {"target": target.num_parameters(), "draft": draft.num_parameters()}
    report["held_out"] = {"num_bytes": num_bytes, "num_tokens": held_out.numel()}
    report["samples"] = show_samples(target, tokenizer)
    return report


def _on_own_samples(target: Any, draft: Any, held_out: Tensor) -> dict[str, float]:
    """Return alpha where decoding really happens: on text that the target wrote, at T=1 and greedily."""
    num_rows, prompt_len, num_new = 48, 32, 224
    starts = torch.linspace(0, held_out.numel() - prompt_len - 1, num_rows).long()
    prompts = torch.stack([held_out[start : start + prompt_len] for start in starts.tolist()])
    generator = torch.Generator().manual_seed(0)
    report = {}
    for temperature, name in ((1.0, "alpha_t1.0"), (0.0, "greedy_agreement")):
        rows = sample(target, prompts, num_new, temperature=temperature, generator=generator)
        with torch.no_grad():
            target_logits = target(input_ids=rows, use_cache=False).logits[:, prompt_len - 1 : -1]
            draft_logits = draft(input_ids=rows, use_cache=False).logits[:, prompt_len - 1 : -1]
        same = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float()
        value = same if temperature == 0 else overlap(target_logits, draft_logits)
        report[f"own_samples_{name}"] = value.mean().item()
    return report
