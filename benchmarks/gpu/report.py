"""The findings as Markdown, JSON and two pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.findings import Findings, to_json, write_atomically
from benchmarks.names import ASSISTED, ASSISTED_CONSTANT, LOCKSTEP, NO_SPECULATION, PLAIN, PREPARED
from benchmarks.stats import Summary, summarise

_COLOURS = {
    PLAIN: "#9aa5b1",
    ASSISTED: "#f0b775",
    ASSISTED_CONSTANT: "#d98324",
    NO_SPECULATION: "#9cc3e6",
    LOCKSTEP: "#4f8fc9",
    PREPARED: "#1f5f99",
}


def write(findings: Findings, out: Path) -> str:
    """`gpu.md`, `gpu.json`, `gpu.svg`; returns the Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(findings)
    found = findings.data() | {
        "bars": [
            dict(zip(("bar", "measured", "limit", "verdict"), bar, strict=True)) for bar in bars(findings)
        ]
    }
    write_atomically(out / "gpu.json", to_json(found))
    write_atomically(out / "gpu.md", text)
    write_atomically(out / "gpu.svg", svg(findings))
    return text


def bars(findings: Findings) -> list[tuple[str, str, str, str]]:
    """What was promised: (bar, measured, limit, verdict)."""
    rows = [
        _bar(f"specwire × plain generate, temperature {t:g}", _speedup(findings, t), least, at_least=True)
        for t, least in ((0.0, 3.4), (1.0, 2.6))
    ]
    verify, bound = findings.verify_ms.get("1 × 6"), findings.bound_ms
    ratio = verify.median / bound if verify and bound else None
    rows.append(_bar("verify pass of 6 tokens × (weights ÷ bandwidth)", ratio, 1.15))
    slowest = max((step.median for step in findings.draft_ms.values()), default=None)
    rows.append(_bar("draft step (ms)", slowest, 1.0))
    widest = max((gap.median for gap in findings.gap_ms.values()), default=None)
    rows.append(_bar("gap between steps (ms)", widest, 0.3))
    return rows


def _speedup(findings: Findings, temperature: float) -> float | None:
    """Of specwire's faster way, against plain generate."""
    plain = findings.rate(temperature, PLAIN)
    ours = [rate for name in (LOCKSTEP, PREPARED) if (rate := findings.rate(temperature, name))]
    return max(ours) / plain if ours and plain else None


def _bar(
    what: str, measured: float | None, limit: float, *, at_least: bool = False
) -> tuple[str, str, str, str]:
    sign = "≥" if at_least else "≤"
    if measured is None:
        return what, "–", f"{sign} {limit:g}", "not measured"
    passed = measured >= limit if at_least else measured <= limit
    return what, f"{measured:.3g}", f"{sign} {limit:g}", "pass" if passed else "MISS"


def markdown(findings: Findings) -> str:
    """The report, as far as there is something to report."""
    parts = ["# One GPU", _facts(findings), _table(("bar", "measured", "limit", ""), bars(findings))]
    if findings.correctness:
        checks = [(what, f"{value:.4g}") for what, value in findings.correctness.items()]
        parts += ["## Right first", _table(("against the same function in float32", ""), checks)]
    if findings.verify_ms:
        parts += ["## Passes", _passes(findings)]
    if findings.rates:
        parts += ["## One stream", _streams(findings), "![Tokens per second, and passes](gpu.svg)"]
    if findings.problems:
        parts += ["## Not measured", "\n".join(f"- {problem}" for problem in findings.problems)]
    seconds = [f"{n} {value:g}" for n, value in findings.seconds.items() if not n.startswith("warm up")]
    parts.append(f"Seconds: {', '.join(seconds)}.")
    return "\n\n".join(parts) + "\n"


def _facts(findings: Findings) -> str:
    facts = "; ".join(f"{name}: {value}" for name, value in findings.facts.items())
    return f"Made by `python -m benchmarks.gpu`. {facts}."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _passes(findings: Findings) -> str:
    bound = findings.bound_ms
    rows = [
        (f"verify, {size}", summary.text(3), f"{summary.median / bound:.2f}" if bound else "–")
        for size, summary in findings.verify_ms.items()
    ]
    rows += [(f"draft step, temperature {t}", s.text(3), "") for t, s in findings.draft_ms.items()]
    rows += [(f"gap between steps, {name}", s.text(3), "") for name, s in findings.gap_ms.items()]
    table = _table(("streams × tokens", "ms, median (low to high)", "× bound"), rows)
    if bound is None or findings.weights_bytes is None or findings.bandwidth_gb_s is None:
        return table
    size, speed = findings.weights_bytes / 1e9, findings.bandwidth_gb_s
    return f"Bound: {size:.2f} GB of weights ÷ {speed:.0f} GB/s = {bound:.3f} ms.\n\n{table}"


def _streams(findings: Findings) -> str:
    lines = []
    for temperature, rates in findings.rates.items():
        plain = rates.get(PLAIN)
        for name, found in rates.items():
            ratio = f"{summarise(found).median / summarise(plain).median:.2f}" if plain else "–"
            passes = findings.notes.get(temperature, {}).get(name, "")
            same = findings.same_text.get(name, "") if temperature == "0" else ""
            lines.append((temperature, name, summarise(found).text(1), ratio, passes, same))
    head = ("temperature", "system", "tokens/s", "× plain", "tokens a pass", "prompts with plain's text")
    return _table(head, lines)


# ── pictures ──────────────────────────────────────────────────────────────────────────────────────


def svg(findings: Findings) -> str:
    """Rates on the left, passes against the bound on the right; drawn by hand, since nothing else is sure to
    be there."""
    shapes = [*_rate_bars(findings), *_pass_points(findings)]
    frame = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 360" font-size="11">'
    return "\n".join([frame, '<rect width="920" height="360" fill="white"/>', *shapes, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _rate_bars(findings: Findings) -> list[str]:
    found = [(t, n, summarise(r)) for t, rates in findings.rates.items() for n, r in rates.items()]
    if not found:
        return []
    top, width = max(s.high for *_, s in found), 400 / len(found)
    shapes = [_text(235, 22, "tokens/s, one stream")]
    for i, (temperature, name, summary) in enumerate(found):
        x, height = 30 + i * width, 220 * summary.median / top
        colour = _COLOURS.get(name, "#666666")
        place = f'x="{x:.1f}" y="{260 - height:.1f}" width="{width * 0.85:.1f}" height="{height:.1f}"'
        shapes.append(f'<rect {place} fill="{colour}"/>')
        shapes.append(_text(x + width * 0.42, 255 - height, f"{summary.median:.0f}"))
        shapes.append(_text(x + width * 0.42, 274, f"T={temperature}"))
    for i, name in enumerate(dict.fromkeys(name for _, name, _ in found)):
        x, y = 30 + 210 * (i % 2), 296 + 18 * (i // 2)
        shapes.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_COLOURS.get(name, "#666666")}"/>'
        )
        shapes.append(_text(x + 15, y, name, "start"))
    return shapes


def _pass_points(findings: Findings) -> list[str]:
    found = list(findings.verify_ms.items())
    if not found:
        return []
    top = max([s.high for _, s in found] + [findings.bound_ms or 0])
    step = 420 / len(found)
    shapes = [_text(690, 22, "verify pass, ms, by streams × tokens; the line is weights ÷ bandwidth")]
    for i, (size, summary) in enumerate(found):
        x = 490 + i * step
        shapes.append(_whisker(x, summary, top))
        shapes.append(_text(x, 274 + 13 * (i % 2), size))
    if findings.bound_ms:
        y = 260 - 220 * findings.bound_ms / top
        shapes.append(
            f'<line x1="470" x2="905" y1="{y:.1f}" y2="{y:.1f}" stroke="#c0392b" stroke-dasharray="4"/>'
        )
    return shapes


def _whisker(x: float, summary: Summary, top: float) -> str:
    low, middle, high = (260 - 220 * value / top for value in (summary.low, summary.median, summary.high))
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="#333333"/>'
    return line + f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="4" fill="#1f5f99"/>'
