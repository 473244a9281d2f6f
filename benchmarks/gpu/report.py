"""The findings as Markdown and JSON, as far as there is something to report."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.findings import Findings
from benchmarks.names import PLAIN, SPECWIRE
from benchmarks.report import Bar, Report, summarise, table


def write(findings: Findings, out: Path) -> str:
    """`gpu.md` and `gpu.json`; returns the Markdown."""
    return report(findings).write(out)


def report(findings: Findings) -> Report:
    """Of what was measured so far."""
    parts = []
    if findings.correctness:
        checks = [(what, f"{value:.4g}") for what, value in findings.correctness.items()]
        parts += ["## Right first", table(("against the same function in float32", ""), checks)]
    if findings.verify_ms:
        parts += ["## Passes", _passes(findings)]
    if findings.rates:
        parts += ["## One stream", _streams(findings)]
    if findings.stages_ms:
        parts += ["## Milliseconds of a round", _stages(findings)]
    if findings.problems:
        parts += ["## Not measured", "\n".join(f"- {problem}" for problem in findings.problems)]
    seconds = [f"{n} {value:g}" for n, value in findings.seconds.items() if not n.startswith("warm up")]
    parts.append(f"Seconds: {', '.join(seconds)}.")
    return Report(
        name="gpu",
        title="One GPU",
        machine=findings.facts,
        bars=bars(findings),
        details="\n\n".join(parts),
        data=findings.data(),
    )


def bars(findings: Findings) -> list[Bar]:
    """What was promised."""
    found = [
        Bar(
            what=f"specwire × plain generate, temperature {temperature:g}",
            measured=_speedup(findings, temperature),
            limit=limit,
            at_least=True,
        )
        for temperature, limit in ((0.0, 3.4), (1.0, 2.6))
    ]
    verify, bound = findings.verify_ms.get("1 × 6"), findings.bound_ms
    ratio = verify.median / bound if verify and bound else None
    slowest = max((step.median for step in findings.draft_ms.values()), default=None)
    widest = max((gap.median for gap in findings.gap_ms.values()), default=None)
    return [
        *found,
        Bar(what="verify pass of 6 tokens × (weights ÷ bandwidth)", measured=ratio, limit=1.15),
        Bar(what="draft step", measured=slowest, limit=1.0, unit="ms"),
        Bar(what="gap between steps", measured=widest, limit=0.3, unit="ms"),
    ]


def _speedup(findings: Findings, temperature: float) -> float | None:
    """Of specwire as it is by default, against plain generate."""
    plain, ours = findings.rate(temperature, PLAIN), findings.rate(temperature, SPECWIRE)
    return ours / plain if ours and plain else None


def _passes(findings: Findings) -> str:
    bound = findings.bound_ms
    rows = [
        (f"verify, {size}", summary.text(3), f"{summary.median / bound:.2f}" if bound else "–")
        for size, summary in findings.verify_ms.items()
    ]
    rows += [(f"draft step, temperature {t}", s.text(3), "") for t, s in findings.draft_ms.items()]
    rows += [(f"draft pass of the target's own {name}", s.text(3), "") for name, s in findings.own_ms.items()]
    rows += [(f"verify, {size} adapters", s.text(3), "") for size, s in findings.adapters_ms.items()]
    rows += [(f"gap between steps, {name}", s.text(3), "") for name, s in findings.gap_ms.items()]
    shown = table(("streams × tokens", "ms, median (low to high)", "× bound"), rows)
    if bound is None or findings.weights_bytes is None or findings.bandwidth_gb_s is None:
        return shown
    size, speed = findings.weights_bytes / 1e9, findings.bandwidth_gb_s
    return f"Bound: {size:.2f} GB of weights ÷ {speed:.0f} GB/s = {bound:.3f} ms.\n\n{shown}"


def _streams(findings: Findings) -> str:
    rows = []
    for temperature, rates in findings.rates.items():
        plain = rates.get(PLAIN)
        for name, found in rates.items():
            ratio = f"{summarise(found).median / summarise(plain).median:.2f}" if plain else "–"
            passes = findings.notes.get(temperature, {}).get(name, "")
            same = findings.same_text.get(name, "") if temperature == "0" else ""
            rows.append((temperature, name, summarise(found).text(1), ratio, passes, same))
    head = ("temperature", "system", "tokens/s", "× plain", "tokens a pass", "prompts with plain's text")
    return table(head, rows)


def _stages(findings: Findings) -> str:
    rows = []
    for temperature, by_system in findings.stages_ms.items():
        for name, stages in by_system.items():
            spent = ", ".join(f"{stage} {ms:.2f}" for stage, ms in stages.items() if ms >= 0.005)
            rows.append((temperature, name, f"{sum(stages.values()):.2f}", spent))
    return table(("temperature", "system", "ms", "of which"), rows)
