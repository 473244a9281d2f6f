"""W3C trace context and baggage: what a call's headers say about the trace that it belongs to.

`OTEL_PROPAGATORS` names what is read and sent: `tracecontext`, `baggage`, both (the default), or `none`. It
holds whether or not this process records spans: what it does not understand it passes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from specwire.errors import ConfigError

_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)
_MAX_TRACEPARENT_LEN = 256
_MAX_TRACESTATE_LEN = 512
"""W3C asks for 512 characters and 32 members at least."""
_MAX_TRACESTATE_MEMBERS = 32
_KEY = r"[a-z0-9][a-z0-9_*/@-]{0,255}"
_TRACESTATE_MEMBER = re.compile(
    rf"{_KEY}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MAX_BAGGAGE_LEN = 8192
"""W3C asks for 8,192 characters and 64 members at least."""
_MAX_BAGGAGE_MEMBERS = 64
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_VALUE = r"[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]*"
_PROPERTY = rf"[ \t]*;[ \t]*{_TOKEN}(?:[ \t]*=[ \t]*{_VALUE})?"
_BAGGAGE_MEMBER = re.compile(rf"{_TOKEN}[ \t]*=[ \t]*{_VALUE}(?:{_PROPERTY})*")
_KNOWN = ("tracecontext", "baggage")
REQUEST_ID = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
"""What an `x-request-id` may be, which travels beside the trace."""


class TraceContext(NamedTuple):
    """The trace of a caller; each field is a header of W3C, valid or empty.

    Attributes:
        traceparent: `00-<trace>-<span>-<flags>`.
        tracestate: what tracing systems on the way have added; empty without `traceparent`.
        baggage: the application's own, passed on as it is.
    """

    traceparent: str = ""
    tracestate: str = ""
    baggage: str = ""


NO_CONTEXT = TraceContext()


@dataclass(frozen=True, slots=True)
class Propagators:
    """Reads and writes the headers that `OTEL_PROPAGATORS` names."""

    names: frozenset[str] = frozenset(_KNOWN)

    @classmethod
    def from_environment(cls) -> Propagators:
        """As the variable says; `ConfigError` if it names an unknown one."""
        text = os.environ.get("OTEL_PROPAGATORS", "").strip() or ",".join(_KNOWN)
        names = {name.strip() for name in text.split(",")}
        if unknown := names - {*_KNOWN, "none"}:
            first, known = min(unknown), ", ".join(_KNOWN)
            raise ConfigError(f"OTEL_PROPAGATORS={text}: {first!r} is not one of {known}, none")
        return cls(frozenset() if "none" in names else frozenset(names))

    def read(self, headers: Iterable[tuple[str, str]]) -> TraceContext:
        """The trace of a call; of a malformed header nothing is left, and a trace begins here.

        Args:
            headers: names in lower case; of HTTP, or gRPC metadata.
        """
        found: dict[str, list[str]] = {"traceparent": [], "tracestate": [], "baggage": []}
        for name, value in headers:
            if name in found:
                found[name].append(value)
        traceparent, tracestate, baggage = (",".join(values) for values in found.values())
        match = _TRACEPARENT.fullmatch(traceparent) if len(traceparent) <= _MAX_TRACEPARENT_LEN else None
        # A later version's may be longer.
        is_valid = match is not None and not (match[1] == "00" and match[2])
        if not (is_valid and "tracecontext" in self.names):
            traceparent = tracestate = ""
        if "baggage" not in self.names:
            baggage = ""
        return TraceContext(
            traceparent,
            _checked_list(tracestate, _MAX_TRACESTATE_LEN, _MAX_TRACESTATE_MEMBERS, _TRACESTATE_MEMBER),
            _checked_list(baggage, _MAX_BAGGAGE_LEN, _MAX_BAGGAGE_MEMBERS, _BAGGAGE_MEMBER),
        )

    def headers(self, context: TraceContext) -> list[tuple[str, str]]:
        """What to send with a call."""
        sent = []
        if "tracecontext" in self.names and context.traceparent:
            sent = [("traceparent", context.traceparent), ("tracestate", context.tracestate)]
        if "baggage" in self.names:
            sent.append(("baggage", context.baggage))
        return [(name, value) for name, value in sent if value]


W3C = Propagators()
"""Both."""


def _checked_list(value: str, max_len: int, max_members: int, member: re.Pattern[str]) -> str:
    """The value, or empty if it is too long or one of its members is malformed; members may be empty."""
    if len(value) > max_len:
        return ""
    members = [stripped for each in value.split(",") if (stripped := each.strip(" \t"))]
    valid = len(members) <= max_members and all(member.fullmatch(each) for each in members)
    return ",".join(members) if valid else ""
