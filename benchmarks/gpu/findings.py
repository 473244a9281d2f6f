"""What was measured so far. It is written after every phase: a run that is killed leaves what it has."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.report import Summary, summarise


@dataclass
class Findings:
    """Everything one run measured; times in milliseconds unless a name says otherwise.

    Attributes:
        facts: machine, versions, models.
        bandwidth_gb_s: of the device's memory, bytes read and written together.
        weights_bytes: of the target that a pass reads.
        correctness: by what was compared.
        verify_ms: a target pass by (streams, tokens a stream): medians over repetitions, low and high.
        draft_ms: a draft step with its sampling, by temperature.
        own_ms: the first pass of a proposal of what the target drafts with by itself, by method.
        adapters_ms: a target pass by (streams, tokens a stream), and by which adapters the streams have.
        gap_ms: what a step takes longer than the device's work, by model.
        rates: tokens/s by temperature and system, one entry a repetition.
        same_text: greedy, prompts with plain generate's very tokens, by system.
        notes: of the systems (tokens a pass, share of prepared rounds), by temperature and system.
        stages_ms: what a round spent its time on, by temperature, system and stage; of the last repetition.
        problems: what could not be measured, and why.
        seconds: how long each phase took.
    """

    facts: dict[str, str] = field(default_factory=dict)
    bandwidth_gb_s: float | None = None
    weights_bytes: int | None = None
    correctness: dict[str, float] = field(default_factory=dict)
    verify_ms: dict[str, Summary] = field(default_factory=dict)
    draft_ms: dict[str, Summary] = field(default_factory=dict)
    own_ms: dict[str, Summary] = field(default_factory=dict)
    adapters_ms: dict[str, Summary] = field(default_factory=dict)
    gap_ms: dict[str, Summary] = field(default_factory=dict)
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    same_text: dict[str, str] = field(default_factory=dict)
    notes: dict[str, dict[str, str]] = field(default_factory=dict)
    stages_ms: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def bound_ms(self) -> float | None:
        """The time in which the weights can be read once."""
        if self.bandwidth_gb_s is None or self.weights_bytes is None:
            return None
        return self.weights_bytes / self.bandwidth_gb_s / 1e6

    def rate(self, temperature: float, system: str) -> float | None:
        """Median tokens/s, None where it was not measured."""
        found = self.rates.get(f"{temperature:g}", {}).get(system)
        return summarise(found).median if found else None

    def phase(self, name: str, run: Callable[[], Any], say: Callable[[str], None]) -> Any:
        """Run one part; what it raises becomes a problem, and the others go on.

        Returns:
            What `run` returns, None when it raised.
        """
        started_s = time.perf_counter()
        say(f"{name} ...")
        try:
            return run()
        except Exception as error:
            self.problems.append(f"{name}: {type(error).__name__}: {error}")
            say(traceback.format_exc())
            return None
        finally:
            self.seconds[name] = round(time.perf_counter() - started_s, 1)

    def data(self) -> dict[str, Any]:
        """For the JSON."""
        return asdict(self) | {"bound_ms": self.bound_ms}
