"""Key figures of a timeline, for picture and page."""

from __future__ import annotations

from specwire.cli.timeline.layout import BarKind, Mark, Timeline

LEGEND = {
    BarKind.ACCEPT: "the rule",
    BarKind.DRAFT_FORWARD: "draft, on request",
    BarKind.DRAFT_PREPARE: "draft, prepared ahead",
    BarKind.VERIFY_FORWARD: "target",
    BarKind.DRAFT_QUEUE: "waiting for the draft",
    BarKind.VERIFY_QUEUE: "waiting for the target",
    BarKind.NETWORK: "on the way: network and gRPC",
    BarKind.UNKNOWN: "call without a span of the service",
}
MARKS = {
    Mark.HIT: "hit: prepared before it was requested",
    Mark.MISS: "miss: drafted on request",
    Mark.PLAIN: "plain: nothing drafted",
}
_MAX_TEXT = 200


def facts(timeline: Timeline) -> dict[str, str]:
    """The figures at the top, by name."""
    window_ns = timeline.end_ns - timeline.start_ns
    shares = timeline.shares
    found = {
        "model": printable(timeline.model) or "not named",
        "tokens": "not known" if timeline.num_tokens is None else str(timeline.num_tokens),
        "total time": f"{timeline.total_ns / 1e6:.1f} ms",
        "rounds": str(timeline.num_rounds),
        "hits": _hits(timeline),
        "target busy": f"{shares.target:.0%}",
        "draft busy": f"{shares.draft:.0%}",
        "both at once": f"{shares.both:.0%}",
        "only network": f"{shares.only_network:.0%}",
    }
    if timeline.is_part:
        shown = timeline.rounds
        part = f"rounds {shown[0].number} to {shown[-1].number}, {window_ns / 1e6:.1f} ms"
        found = {**dict(list(found.items())[:4]), "shown": part, **dict(list(found.items())[4:])}
    return found


def _hits(timeline: Timeline) -> str:
    num_drafted, num_hits = timeline.num_drafted_rounds, timeline.num_marked(Mark.HIT)
    if not num_drafted:
        return "no drafts"
    return f"{num_hits / num_drafted:.0%} ({num_hits} of {num_drafted})"


def printable(text: str) -> str:
    """Text from spans, shortened, with unprintable characters replaced."""
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text[:_MAX_TEXT])
    return shown if len(text) <= _MAX_TEXT else f"{shown}… ({len(text)} characters)"
