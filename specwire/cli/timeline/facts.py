"""Key figures of a timeline, for picture and page."""

from __future__ import annotations

from specwire.cli.timeline.layout import BarKind, Mark, Timeline

LEGEND = {
    BarKind.ADMISSION: "waiting for a slot",
    BarKind.OUTSIDE: "outside of rounds: emit, client_credit, coordinator",
    BarKind.ACCEPT: "the rule",
    BarKind.DRAFT_FORWARD: "draft, on request",
    BarKind.DRAFT_PREPARE: "draft, prepared ahead (→ round that used it)",
    BarKind.VERIFY_FORWARD: "target",
    BarKind.DRAFT_QUEUE: "waiting for the draft",
    BarKind.VERIFY_QUEUE: "waiting for the target",
    BarKind.DRAFT_HANDLING: "handling in the draft service",
    BarKind.VERIFY_HANDLING: "handling in the verify service",
    BarKind.DRAFT_UNANSWERED: "in the draft service, not answered",
    BarKind.VERIFY_UNANSWERED: "in the verify service, not answered",
    BarKind.NETWORK: "on the way: network and gRPC",
    BarKind.UNKNOWN: "call without a span of the service",
    BarKind.FAILED: "call that failed or was too late",
    BarKind.EVENT: "event",
}
MARKS = {
    Mark.HIT: "hit: prepared before it was requested",
    Mark.BEGUN: "begun before it was requested",
    Mark.MISS: "miss: drafted on request",
    Mark.LOST: "lost: no draft there, or too late",
    Mark.PLAIN: "plain: nothing drafted",
}
_MAX_TEXT = 200


def facts(timeline: Timeline) -> dict[str, str]:
    """The figures at the top, by name, without the stages."""
    window_ns = timeline.end_ns - timeline.start_ns
    found = {
        "model": printable(timeline.model) or "not named",
        "tokens": "not known" if timeline.num_tokens is None else str(timeline.num_tokens),
        "total time": f"{timeline.total_ns / 1e6:.1f} ms",
        "rounds": str(timeline.num_rounds),
    }
    if timeline.is_part:
        shown = timeline.rounds
        found["shown"] = f"rounds {shown[0].number} to {shown[-1].number}, {window_ns / 1e6:.1f} ms"
    return found | {"hits": _hits(timeline), "both at once": f"{timeline.overlap_share:.0%}"}


def stage_facts(timeline: Timeline) -> dict[str, str]:
    """What the ledger says of the whole generation: stages in its order, and what is beside them."""
    total_ms = sum(timeline.stages_ms.values())
    found = {
        stage.replace("_", " "): f"{spent_ms:.1f} ms ({spent_ms / total_ms:.0%})"
        for stage, spent_ms in timeline.stages_ms.items()
    }
    if timeline.ahead_ms is not None:
        found["ahead"] = f"{timeline.ahead_ms:.1f} ms, beside the others"
    return found


def _hits(timeline: Timeline) -> str:
    num_drafted, num_hits = timeline.num_drafted_rounds, timeline.num_marked(Mark.HIT)
    if not num_drafted:
        return "no drafts"
    begun = f", {num_begun} begun" if (num_begun := timeline.num_marked(Mark.BEGUN)) else ""
    return f"{num_hits / num_drafted:.0%} ({num_hits} of {num_drafted}{begun})"


def printable(text: str) -> str:
    """Text from spans, shortened, with unprintable characters replaced."""
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text[:_MAX_TEXT])
    return shown if len(text) <= _MAX_TEXT else f"{shown}… ({len(text)} characters)"
