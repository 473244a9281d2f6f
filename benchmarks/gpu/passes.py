"""Passes of the engine without any service around it: right first, then how long they take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.findings import Findings
from benchmarks.report import summarise
from specwire.core import SamplingParams
from specwire.engine.batch import Feed
from specwire.engine.model.loading import load_model, self_check
from specwire.engine.model.runner import ModelRunner, relative_error
from specwire.rule import random, sampling
from specwire.rule.captured import CudaReplay, EagerReplay
from specwire.rule.columns import Row, Rows

PAGE_LEN = 256
GAMMA = 5
"""Draft tokens of a verify pass; one more token is the last committed one."""
_CACHED_TOKENS = 128


def wait(device: torch.device) -> None:
    """Until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth_gb_s(device: torch.device, num_bytes: int) -> float:
    """Of the device's memory: a copy of so many bytes, read and written, the best of some."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = min(timed_s(lambda: target.copy_(source), device) for _ in range(10))
    return 2 * num_bytes / best_s / 1e9


def timed_s(run: Callable[[], Any], device: torch.device) -> float:
    """Until the device is done."""
    wait(device)
    started_s = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - started_s


def make_runner(source: Path, device: torch.device, dtype: str, **options: Any) -> ModelRunner:
    """As a service makes it, with room for 64 streams."""
    model = load_model(source, dtype=dtype, device=str(device))
    is_cuda = device.type == "cuda"
    replay = CudaReplay() if is_cuda else EagerReplay()
    runner = ModelRunner(model, num_pages=80, page_size=PAGE_LEN, replay=replay, compiles=is_cuda, **options)
    runner.warm()
    return runner


def weights_bytes(model: Any) -> int:
    """What a pass reads: all parameters but the table of input embeddings, of which it reads some rows."""
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is table
    read = [parameter for parameter in model.parameters() if tied or parameter is not table]
    return sum(parameter.nbytes for parameter in read)


_RECURRENT: Mapping[str, dict[str, Any]] = {
    "qwen3_next": {"num_experts": 0, "layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 64, "n_groups": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
"""Models of a kind of recurrent layer each, as far as they differ from small ones."""
_SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0}

# ── right ─────────────────────────────────────────────────────────────────────────────────────────


def check_recurrent(findings: Findings, device: torch.device) -> None:
    """Layers that keep a state, in chunks and after a rollback, against the models' own; random weights.

    Raises:
        ModelLoadError: one differs.
    """
    for kind, own in _RECURRENT.items():
        config = AutoConfig.for_model(kind, **_SMALL | own)
        self_check(AutoModelForCausalLM.from_config(config).to(device, torch.float32).eval())
        findings.facts[f"recurrent layers of {kind}"] = "as the model's own"


def check(findings: Findings, runner: ModelRunner, reference: Path, prompts: Sequence[Sequence[int]]) -> None:
    """The target through the engine against the small model it was widened from, in float32 by transformers.

    Raises:
        AssertionError: they are not the same function, so nothing else is worth measuring.
    """
    small = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval()
    small.to(runner.device)
    errors, agreeing, differences = [], [], []
    for prompt in prompts:
        wanted = _reference(small, prompt)
        got = _in_pieces(runner, prompt)
        errors.append(relative_error(got, wanted))
        differences.append(float((got.softmax(-1) - wanted.softmax(-1)).abs().max()))
        agreeing.append(float((got.argmax(-1) == wanted.argmax(-1)).float().mean()))
    findings.correctness |= {
        "largest error of a row of logits, over their spread": max(errors),
        "largest difference of a probability": max(differences),
        "share of positions with the same likeliest token": statistics.mean(agreeing),
    }
    # bfloat16 has three digits; an attention that is wrong gives errors near 1 and agrees rarely.
    assert max(errors) < 0.3, f"the logits are off by {max(errors):.2g} of their spread"
    assert statistics.mean(agreeing) > 0.9, f"only {statistics.mean(agreeing):.0%} of the choices agree"


@torch.inference_mode()
def _reference(model: Any, prompt: Sequence[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([list(prompt)], device=model.device)).logits[0]
    return logits.float()


def _in_pieces(runner: ModelRunner, prompt: Sequence[int]) -> Tensor:
    """Prefill, wrong guesses rolled back, verify and decode; the logits of every token."""
    rows, half = [], len(prompt) // 2
    with runner.new_sequence() as cache:
        rows.append(runner.forward([Feed(cache, prompt[:half], half)]))
        runner.forward([Feed(cache, list(prompt[:half])[-4:], 4)])
        cache.truncate(half)
        while cache.length < len(prompt):
            piece = prompt[cache.length :][: 1 + (cache.length + GAMMA) % (GAMMA + 1)]
            rows.append(runner.forward([Feed(cache, piece, len(piece))]))
    return torch.cat(rows)


def check_invariance(findings: Findings, runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> None:
    """Bitwise: a prompt's logits alone in one go, and in pieces beside all other prompts."""
    first, others = list(prompts[0]), prompts[1:]
    with runner.new_sequence() as cache:
        alone = runner.forward([Feed(cache, first, len(first))])
    rows = []
    with ExitStack() as stack:
        mine, *theirs = (stack.enter_context(runner.new_sequence()) for _ in prompts)
        while mine.length < len(first):
            piece = first[mine.length :][: GAMMA + 1]
            feeds = [Feed(mine, piece, len(piece))]
            for cache, prompt in zip(theirs, others, strict=True):
                if cache.length < len(prompt):
                    feeds.append(Feed(cache, prompt[cache.length :][:3], 0))
            rows.append(runner.forward(feeds))
    equal = (torch.cat(rows) == alone).all(dim=-1).float().mean()
    findings.correctness["--batch-invariant: share of rows that are bitwise the same in company"] = float(
        equal
    )


# ── how long ──────────────────────────────────────────────────────────────────────────────────────


def verify_passes(
    findings: Findings, runner: ModelRunner, sizes: Sequence[tuple[int, int]], num_passes: int
) -> None:
    """Passes of (streams, tokens a stream), one after another without waiting: the device's own time."""
    findings.weights_bytes = weights_bytes(runner.model)
    for num_streams, num_tokens in sizes:
        times_ms = pass_ms(runner, num_streams, num_tokens, num_passes)
        findings.verify_ms[f"{num_streams} × {num_tokens}"] = summarise(times_ms)


def pass_ms(
    runner: ModelRunner, num_streams: int, num_tokens: int, num_passes: int, adapters: Sequence[int] = ()
) -> list[float]:
    """Time of a pass, measured five times.

    Args:
        adapters: numbers of the streams' adapters; empty for none.
    """
    with ExitStack() as stack:
        caches = [stack.enter_context(runner.new_sequence()) for _ in range(num_streams)]
        for cache, adapter in zip(caches, adapters or [0] * num_streams, strict=True):
            cache.adapter = adapter
            runner.forward([Feed(cache, _tokens(_CACHED_TOKENS, 0), 0)])

        def run(repeat: int) -> None:
            for i in range(repeat):
                runner.forward(
                    [Feed(c, _tokens(num_tokens, i + n), num_tokens) for n, c in enumerate(caches)]
                )
                for cache in caches:
                    cache.truncate(_CACHED_TOKENS)

        run(3)
        return [timed_s(lambda: run(num_passes), runner.device) / num_passes * 1e3 for _ in range(5)]


def _tokens(num: int, seed: int) -> list[int]:
    return [(7 * i + 13 * seed) % 1500 + 300 for i in range(num)]


def draft_steps(findings: Findings, runner: ModelRunner, prompt: Sequence[int], num_steps: int) -> None:
    """Decoding on one stream: a token is drawn on the device and comes to the host before the next one."""
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1)
        times_ms = [_step_ms(runner, prompt, params, num_steps) for _ in range(5)]
        findings.draft_ms[f"{temperature:g}"] = summarise(times_ms)


def gap(findings: Findings, name: str, runner: ModelRunner, prompt: Sequence[int], num_steps: int) -> None:
    """A decoding step as the host sees it, less the same pass as the device sees it."""
    params = SamplingParams(temperature=0.0, seed=1)
    steps_ms = [_step_ms(runner, prompt, params, num_steps) for _ in range(5)]
    device_ms = statistics.median(_device_ms(runner, num_steps))
    findings.gap_ms[name] = summarise([step_ms - device_ms for step_ms in steps_ms])


def _device_ms(runner: ModelRunner, num_steps: int) -> list[float]:
    """The recorded decoding step replayed over and over."""
    assert runner._padded is not None
    with runner.new_sequence() as cache:
        runner.forward([Feed(cache, _tokens(_CACHED_TOKENS, 0), 0)])
        for token in (300, 301, 302):
            runner.forward([Feed(cache, [token])])
        steps = runner._padded
        bucket = next(b for b in reversed(steps.recorded) if b.num_tokens == 1)

        def run() -> None:
            for _ in range(num_steps):
                steps.recorded[bucket]()

        with torch.inference_mode():
            return [timed_s(run, runner.device) / num_steps * 1e3 for _ in range(5)]


def _step_ms(runner: ModelRunner, prompt: Sequence[int], params: SamplingParams, num_steps: int) -> float:
    with runner.new_sequence() as cache:
        runner.forward([Feed(cache, prompt[:-1], 0)])
        token = _decode(runner, cache, int(prompt[-1]), params, 4)
        wait(runner.device)
        started_s = time.perf_counter()
        _decode(runner, cache, token, params, num_steps)
        return (time.perf_counter() - started_s) / num_steps * 1e3


@torch.inference_mode()
def _decode(runner: ModelRunner, cache: Any, token: int, params: SamplingParams, num_steps: int) -> int:
    for _ in range(num_steps):
        logits = runner.forward([Feed(cache, [token])])
        token = int(_draw(logits, params, cache.length))
    return token


def _draw(logits: Tensor, params: SamplingParams, position: int) -> Tensor:
    """As the draft does: cut the distribution down, then draw from what is left. int64 [1]."""
    if params.greedy:
        return logits.argmax(dim=-1)
    row = Row(params, 0, (), position, 1)
    probs = sampling.apply_warps(logits, Rows.of([row])).exp()
    ids, support, _ = sampling.truncate_support(probs, 0.99, 1024)
    uniforms = random.uniforms([1], random.Purpose.DRAFT, [position])
    column = sampling.draw(
        support, torch.from_numpy(np.asarray(uniforms)).to(support.device, non_blocking=True)
    )
    return ids.gather(1, column[:, None])[:, 0]
