"""What a round costs, as bars and tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.checkouts import SERVICES, Load
from benchmarks.processes import GRPC, LOOP, THREADS, Devices
from benchmarks.report import Bar, ratios, summarise, table

THIS, OTHER = "this version", "the other"
ONE, SOME, MANY = 1, 64, 256
DEVICES = Devices(target_ms=15.0, num_outcomes="0")
HIT_DEVICES = Devices(target_ms=30.0, num_outcomes="32", runner_up=0.55)
MAX_HIT = {0.0: 1.03, 5.0: 1.04}
"""Round over pass where the proposal was prepared, by the round trip between coordinator and verify in ms."""


@dataclass
class Measured:
    """One entry a repetition in every list.

    Attributes:
        bare_ms: processor time of a bare exchange, by the number of streams.
        loads: by version, then by the number of streams.
        hits: by version, then by the round trip between coordinator and verify in milliseconds.
    """

    bare_ms: dict[int, list[float]]
    loads: dict[str, dict[int, list[Load]]]
    hits: dict[str, dict[float, list[Load]]]

    @classmethod
    def empty(cls, versions: Iterable[str], num_streams: Iterable[int], *, hits: bool) -> Measured:
        """Nothing yet, of all that is to come."""
        counts = list(num_streams)
        return cls(
            bare_ms={count: [] for count in counts},
            loads={name: {count: [] for count in counts} for name in versions},
            hits={name: {rtt_ms: [] for rtt_ms in MAX_HIT} for name in versions} if hits else {},
        )

    def over_bare(self, version: str, num_streams: int) -> list[float]:
        """Processor time a round of the three services over bare on as many streams."""
        services_ms = [load.services_ms for load in self.loads[version][num_streams]]
        return ratios(services_ms, self.bare_ms[num_streams])

    def over_other(self, num_streams: int, figure: Callable[[Load], float]) -> list[float]:
        """A figure of this version over the same of the other one."""
        ours, theirs = ([figure(load) for load in self.loads[name][num_streams]] for name in (THIS, OTHER))
        return ratios(ours, theirs)

    def hit_over_pass(self, version: str, rtt_ms: float) -> list[float]:
        """The usual round of one stream, a hit, over a pass."""
        return [load.usual_round_ms / HIT_DEVICES.target_ms for load in self.hits[version][rtt_ms]]


# --- bars and tables ------------------------------------------------------------------------------


def bars(measured: Measured) -> list[Bar]:
    """The promises about a round; not to be worse than another version, if there is one, but for noise."""
    found = [
        Bar(
            what=f"{num_streams} streams: three services over bare",
            measured=statistics.median(measured.over_bare(THIS, num_streams)),
            limit=limit,
        )
        for num_streams, limit in ((MANY, 1.5), (SOME, 2.0))
    ]
    if OTHER in measured.loads:
        cost = statistics.median(measured.over_other(ONE, lambda load: load.services_ms))
        rate = statistics.median(measured.over_other(MANY, lambda load: load.tokens_per_s))
        found += [
            Bar(what="1 stream: three services over the other version", measured=cost, limit=1.1),
            Bar(what=f"{MANY} streams: tokens/s over the other", measured=rate, limit=0.9, at_least=True),
        ]
    return found + [
        Bar(
            what=f"1 stream, hits, {_where(rtt_ms)}: round over pass",
            measured=statistics.median(measured.hit_over_pass(THIS, rtt_ms)),
            limit=limit,
        )
        for rtt_ms, limit in MAX_HIT.items()
        if measured.hits
    ]


def details(measured: Measured) -> str:
    """All tables."""
    parts = []
    for name in measured.loads:
        parts += [f"## Processor time a round (ms): {name}", _costs(measured, name), _threads(measured, name)]
    if OTHER in measured.loads:
        parts += ["## This version over the other", _ratios(measured)]
    if measured.hits:
        parts += ["## Hits of one stream", _hits(measured)]
    return "\n\n".join(parts)


def _costs(measured: Measured, version: str) -> str:
    loads = measured.loads[version]
    rows = [
        *(_row(name, loads, _cpu_ms_of(name), 3) for name in SERVICES),
        _row("the three together", loads, lambda load: load.services_ms, 3),
        ["bare", *(summarise(bare_ms).text(3) for bare_ms in measured.bare_ms.values())],
        ["the three over bare", *(summarise(measured.over_bare(version, n)).text(2) for n in loads)],
        _row("client", loads, _cpu_ms_of("client"), 3),
        _row("rounds/s", loads, lambda load: load.rounds_per_s, 0),
        _row("tokens/s", loads, lambda load: load.tokens_per_s, 0),
        ["tokens/s of the devices alone", *(f"{_of_devices(n, of_one):.0f}" for n, of_one in loads.items())],
    ]
    return table(["streams at once", *loads], rows)


def _threads(measured: Measured, version: str) -> str:
    loads = measured.loads[version]
    kinds = {name: THREADS if name in ("verify", "draft") else (LOOP, GRPC) for name in SERVICES}
    rows = [
        _row(f"{name}, {kind}", loads, _cpu_ms_of(name, kind), 3) for name in SERVICES for kind in kinds[name]
    ]
    return table(["threads", *loads], rows)


def _ratios(measured: Measured) -> str:
    figures: dict[str, Callable[[Load], float]] = {
        **{name: _cpu_ms_of(name) for name in SERVICES},
        "the three together": lambda load: load.services_ms,
        "client": _cpu_ms_of("client"),
        "tokens/s": lambda load: load.tokens_per_s,
    }
    rows = [
        [name, *(summarise(measured.over_other(n, figure)).text(2) for n in measured.bare_ms)]
        for name, figure in figures.items()
    ]
    return table(["streams at once", *measured.bare_ms], rows)


def _row(
    name: str, loads: Mapping[int, Sequence[Load]], figure: Callable[[Load], float], digits: int
) -> list[str]:
    """One figure for every number of streams."""
    return [name, *(summarise([figure(load) for load in of_one]).text(digits) for of_one in loads.values())]


def _cpu_ms_of(process: str, kind: str = "") -> Callable[[Load], float]:
    """Of a process, or of its threads of one kind."""
    return lambda load: load.thread_cpu_ms[process][kind] if kind else load.cpu_ms[process]


def _of_devices(num_streams: int, loads: Sequence[Load]) -> float:
    """Tokens a second if nothing but the devices took time."""
    round_ms = DEVICES.target_ms + DEVICES.num_draft_tokens * DEVICES.draft_ms
    return num_streams * statistics.median(load.tokens_per_round for load in loads) / round_ms * 1e3


def _hits(measured: Measured) -> str:
    rows = [
        [
            _where(rtt_ms),
            name,
            summarise(measured.hit_over_pass(name, rtt_ms)).text(3),
            f"{statistics.median(load.hit_rate for load in loads):.0%}",
        ]
        for name, of_one in measured.hits.items()
        for rtt_ms, loads in of_one.items()
    ]
    return table(["coordinator", "version", "round over pass", "hits"], rows)


def _where(rtt_ms: float) -> str:
    return f"coordinator {rtt_ms:g} ms from verify" if rtt_ms else "neighbours"
