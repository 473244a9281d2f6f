"""Whole generations of one stream: transformers in a process of its own, and specwire's services."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.findings import Findings
from benchmarks.names import LOCKSTEP, NO_SPECULATION, PLAIN, PREPARED, SPECWIRE
from benchmarks.peers import Peer
from benchmarks.systems import Sample, SpecwireSystem, System, Work, transformers_systems
from specwire import Client
from specwire.cli.process import Service
from specwire.cli.supervisor import Stack
from specwire.config.flags import flag_words
from specwire.config.stack import UpConfig

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is generated.

    Attributes:
        deadline_s: no repetition begins after it, on the clock of `time.perf_counter`.
    """

    target: Path
    draft: Path
    device: str
    dtype: str
    num_tokens: int
    num_repetitions: int
    prompts: Sequence[Sequence[int]]
    deadline_s: float
    num_kv_tokens: int = 65536

    @property
    def num_threads(self) -> int:
        """CPU threads of a target; 0 leaves it to torch."""
        return 1 if self.device == "cpu" else 0


def measure(findings: Findings, plan: Plan, save: Callable[[], None], say: Callable[[str], None]) -> None:
    """Everything on both temperatures, repetition by repetition, saved after each."""
    with contextlib.ExitStack() as stack:
        systems: list[System] = []
        peer = findings.phase("start transformers", lambda: stack.enter_context(_peer(plan)), say)
        if peer is not None:
            systems += transformers_systems(peer)
        ours = findings.phase("start specwire", lambda: stack.enter_context(_specwire(plan)), say)
        systems += ours or []
        for temperature in TEMPERATURES:
            systems = [system for system in systems if _warm_up(findings, system, plan, temperature, say)]
        texts: dict[str, list[Sequence[int]]] = {}
        for repetition in range(plan.num_repetitions):
            for temperature in TEMPERATURES:
                if time.perf_counter() > plan.deadline_s:
                    findings.problems.append(f"time was over after {repetition} repetitions")
                    return
                samples = {
                    system.name: _repetition(system, plan, temperature, repetition) for system in systems
                }
                _note(findings, temperature, samples)
                if temperature == 0:
                    texts = {name: [s.token_ids for s in of_one] for name, of_one in samples.items()}
                    _compare_texts(findings, texts)
                save()
                rates = findings.rates[f"{temperature:g}"]
                say(
                    f"temperature {temperature:g}: " + ", ".join(f"{n} {r[-1]:.1f}" for n, r in rates.items())
                )


def _peer(plan: Plan) -> Peer:
    return Peer(plan.target, plan.draft, plan.dtype, plan.dtype, plan.num_threads, plan.device)


@contextlib.contextmanager
def _specwire(plan: Plan) -> Iterator[list[System]]:
    """As `specwire up` starts it, and with the draft in a process of its own on the same device, where one
    coordinator has outcomes prepared and another one does not."""
    config = UpConfig(
        target=str(plan.target),
        draft=str(plan.draft),
        dtype=plan.dtype,
        draft_dtype=plan.dtype,
        device=plan.device,
        draft_device=plan.device,
        address="127.0.0.1:0",
        num_kv_tokens=plan.num_kv_tokens,
        num_threads=plan.num_threads,
        grace_s=1.0,
    )
    apart = replace(config, draft_placement="service", num_outcomes="0")
    with contextlib.ExitStack() as open_until_the_end:
        default, lockstep = (open_until_the_end.enter_context(Stack(each)) for each in (config, apart))
        assert lockstep.draft is not None
        words = flag_words(
            address="127.0.0.1:0",
            verify_address=lockstep.verify.address,
            draft_address=lockstep.draft.address,
            grace_s=1.0,
        )
        ahead = Service("coordinator", words)
        open_until_the_end.callback(ahead.stop)
        ahead.ready(60.0)
        client, client_lockstep, client_ahead = (
            open_until_the_end.enter_context(Client(each.address)) for each in (default, lockstep, ahead)
        )
        yield [
            SpecwireSystem(NO_SPECULATION, client, 0),
            SpecwireSystem(SPECWIRE, client, None),
            SpecwireSystem(LOCKSTEP, client_lockstep, None),
            SpecwireSystem(PREPARED, client_ahead, None),
        ]


def _warm_up(
    findings: Findings, system: System, plan: Plan, temperature: float, say: Callable[[str], None]
) -> bool:
    """Whether the system works; libraries, graphs and what is learnt belong in no measurement."""

    def run() -> Sample:
        system.generate(_work(plan, plan.prompts[0], temperature, 1000))
        return system.generate(_work(plan, plan.prompts[-1], temperature, 1001))

    return findings.phase(f"warm up {system.name}, temperature {temperature:g}", run, say) is not None


def _work(plan: Plan, prompt: Sequence[int], temperature: float, seed: int) -> Work:
    return Work(prompt_token_ids=prompt, num_tokens=plan.num_tokens, temperature=temperature, seed=seed)


def _repetition(system: System, plan: Plan, temperature: float, repetition: int) -> list[Sample]:
    samples = [system.generate(_work(plan, prompt, temperature, repetition)) for prompt in plan.prompts]
    assert all(len(sample.token_ids) == plan.num_tokens for sample in samples), system.name
    return samples


def _note(findings: Findings, temperature: float, samples: dict[str, list[Sample]]) -> None:
    rates = findings.rates.setdefault(f"{temperature:g}", {})
    notes = findings.notes.setdefault(f"{temperature:g}", {})
    for name, of_one in samples.items():
        num_tokens = sum(len(sample.token_ids) for sample in of_one)
        rates.setdefault(name, []).append(num_tokens / sum(sample.elapsed_s for sample in of_one))
        num_passes = sum(sample.num_passes for sample in of_one)
        notes[name] = f"{num_tokens / num_passes:.2f}"
        if of_one[0].stages_ms:
            findings.stages_ms.setdefault(f"{temperature:g}", {})[name] = {
                stage: round(sum(sample.stages_ms[stage] for sample in of_one) / num_passes, 3)
                for stage in of_one[0].stages_ms
            }


def _compare_texts(findings: Findings, texts: dict[str, list[Sequence[int]]]) -> None:
    plain = texts.get(PLAIN)
    for name, of_one in texts.items():
        if plain is not None and name != PLAIN:
            equal = sum(list(ours) == list(theirs) for ours, theirs in zip(of_one, plain, strict=True))
            findings.same_text[name] = f"{equal} of {len(plain)}"
