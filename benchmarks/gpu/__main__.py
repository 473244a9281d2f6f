"""`python -m benchmarks.gpu --out DIR`: the engine on one GPU, against bandwidth and against transformers.

The target is the embedded one widened to eight billion parameters without changing its function: real costs,
real text, real acceptance, no download. Needs torch, transformers, numpy and grpcio with its health,
reflection and status packages; without those, what needs the services is reported as not measured.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import widen
from benchmarks.gpu import adapters, own, passes, quantised, report
from benchmarks.gpu.findings import Findings
from benchmarks.prompts import PROMPTS, own_tokenizer
from benchmarks.report import say
from specwire import embedded
from specwire.engine.model.memory import select_device

SHAPE_TINY = widen.Shape(hidden_size=256, num_layers=7, num_heads=8, num_kv_heads=4, intermediate_size=704)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is."""

    shape: widen.Shape
    copied_bytes: int
    sizes: tuple[tuple[int, int], ...]
    num_passes: int
    num_tokens: int
    num_repetitions: int
    num_prompts: int
    prompt_len: int


SCALES = {
    "8b": Scale(
        shape=widen.SHAPE_8B,
        copied_bytes=4 << 30,
        sizes=tuple([(1, n) for n in (1, 2, 4, 6, 8, 16, 32, 64)] + [(n, 6) for n in (2, 4, 8, 16, 32, 64)]),
        num_passes=20,
        num_tokens=96,
        num_repetitions=3,
        num_prompts=4,
        prompt_len=256,
    ),
    "tiny": Scale(
        shape=SHAPE_TINY,
        copied_bytes=1 << 22,
        sizes=((1, 1), (1, 6), (2, 6)),
        num_passes=1,
        num_tokens=8,
        num_repetitions=1,
        num_prompts=2,
        prompt_len=32,
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Measure, write after every phase, print the table; 1 when a phase could not be measured."""
    started_s = time.perf_counter()
    args = _arguments(argv)
    device, scale = select_device(args.device), SCALES[args.shape]
    if device.type == "cpu":
        torch.set_num_threads(1)  # a dry run is small
    findings = Findings(facts=_facts(device))

    def save() -> None:
        report.write(findings, args.out)

    def phase(name: str, run: Any) -> Any:
        result = findings.phase(name, run, say)
        save()
        return result

    save()
    findings.bandwidth_gb_s = phase("bandwidth", lambda: passes.bandwidth_gb_s(device, scale.copied_bytes))
    target = phase("widen", lambda: _widened(scale, args.cache, device))
    if target is not None:
        _engine(findings, scale, target, device, phase)
        deadline_s = started_s + args.budget_s - 60
        _release()
        phase("one stream", lambda: _streams(findings, scale, target, device, deadline_s, save))
    print(report.write(findings, args.out))
    return 1 if findings.problems else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.md and gpu.json")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shape", choices=SCALES, default="8b", help="of the target; tiny is a dry run")
    parser.add_argument("--cache", type=Path, default=Path("build/benchmarks"), help="folder for the target")
    parser.add_argument("--budget-s", type=float, default=500.0, help="seconds after which nothing is begun")
    return parser.parse_args(argv)


def _facts(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def _widened(scale: Scale, cache: Path, device: torch.device) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    made = widen.cached(embedded.TARGET_DIR, scale.shape, torch.bfloat16, cache, str(device))
    _release()
    return made


def _engine(findings: Findings, scale: Scale, target: Path, device: torch.device, phase: Any) -> None:
    """Right first, then passes and steps; the models are gone when this returns."""
    _target_phases(findings, scale, target, device, phase)
    _draft(findings, scale, device, phase)
    _release()
    phase(
        "adapters", lambda: adapters.measure(findings, target, device, scale.sizes[1:8:3], scale.num_passes)
    )
    phase("recurrent layers", lambda: passes.check_recurrent(findings, device))
    phase("quantised weights", lambda: quantised.check(findings, device))


def _target_phases(findings: Findings, scale: Scale, target: Path, device: torch.device, phase: Any) -> None:
    """Those of one load of the target."""
    model = _target(findings, scale, target, device, phase)
    _release()
    if model is not None:
        phase("batch invariance", lambda: _invariance(findings, model, _prompts(scale)))
        for name, run in own.phases(findings, model, _prompts(scale)[0], scale.num_passes):
            phase(name, run)


def _target(findings: Findings, scale: Scale, target: Path, device: torch.device, phase: Any) -> Any:
    """Returns the model, None where it could not be loaded."""
    prompts = _prompts(scale)
    runner = phase("load the target", lambda: passes.make_runner(target, device, "bfloat16"))
    if runner is None:
        return None
    findings.facts["attention"] = runner.attention_path
    num_parameters = sum(parameter.numel() for parameter in runner.model.parameters())
    findings.facts["target"] = f"{num_parameters / 1e9:.3g} B parameters, bfloat16"
    phase("correctness", lambda: passes.check(findings, runner, embedded.TARGET_DIR, prompts))
    phase("verify passes", lambda: passes.verify_passes(findings, runner, scale.sizes, scale.num_passes))
    phase("gap, target", lambda: passes.gap(findings, "target", runner, prompts[0], 2 * scale.num_passes))
    findings.facts["CUDA graphs"] = str(runner.num_graphs if device.type == "cuda" else 0)
    return runner.model


def _draft(findings: Findings, scale: Scale, device: torch.device, phase: Any) -> None:
    prompt, num_steps = _prompts(scale)[0], 5 * scale.num_passes
    runner = phase("load the draft", lambda: passes.make_runner(embedded.DRAFT_DIR, device, "bfloat16"))
    if runner is not None:
        phase("draft steps", lambda: passes.draft_steps(findings, runner, prompt, num_steps))
        phase("gap, draft", lambda: passes.gap(findings, "draft", runner, prompt, num_steps))


def _invariance(findings: Findings, model: Any, prompts: list[list[int]]) -> None:
    from specwire.engine.model.runner import ModelRunner
    from specwire.rule.captured import EagerReplay

    # On a CPU all keys there could be are copied in every pass: no more than there are.
    page_len = passes.PAGE_LEN if model.device.type == "cuda" else 16
    num_pages = sum(-(-len(prompt) // page_len) for prompt in prompts)
    runner = ModelRunner(
        model, num_pages=num_pages, page_size=page_len, replay=EagerReplay(), batch_invariant=True
    )
    passes.check_invariance(findings, runner, prompts)


def _streams(
    findings: Findings, scale: Scale, target: Path, device: torch.device, deadline_s: float, save: Any
) -> None:
    from benchmarks.gpu import streams  # needs grpc and what belongs to it

    plan = streams.Plan(
        target=target,
        draft=embedded.DRAFT_DIR,
        device=str(device),
        dtype="bfloat16",
        num_tokens=scale.num_tokens,
        num_repetitions=scale.num_repetitions,
        prompts=_prompts(scale),
        deadline_s=deadline_s,
        num_kv_tokens=32768 if device.type == "cuda" else 4096,
    )
    streams.measure(findings, plan, save, say)


def _prompts(scale: Scale) -> list[list[int]]:
    tokenizer = own_tokenizer()
    return [list(tokenizer.encode(prompt))[: scale.prompt_len] for prompt in PROMPTS[: scale.num_prompts]]


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
