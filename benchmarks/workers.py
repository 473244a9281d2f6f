"""`python -m benchmarks.workers`: rounds a second of a coordinator with two workers over one with one.

Real coordinators (`--workers N`), with draft and verify that cost next to nothing (`cheap_models`) and
clients that read and drop (`readers`), so that the coordinator is what limits. Both still run on the same
two cores: what they take there, the second worker does not get, and the report says how much that is. Left
out: the models' own work, text, supports of rejection sampling, proposals ahead, opening and closing streams.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen
from typing import Self

import psutil

from benchmarks import cheap_models, stats
from benchmarks.bars import Bar, Report, machine
from benchmarks.processes import Usage, ask, difference, end, read_line, start_module
from specwire.cli.process import Service
from specwire.config.flags import flag_words

LEAST_RATIO = 1.6
COUNTS = (1, 2)
"""Workers of the coordinators that are compared."""
NUM_DRAFT_TOKENS = 4
COORDINATOR, MODELS, READERS, OTHERS = KINDS = ("coordinator", "models", "readers", "others")
"""Of processes."""
_START_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        num_streams: at once, whatever the number of workers.
        num_connections: that carry them.
        settle_s: between the first rounds and the window.
        window_s: for which rounds are counted.
    """

    num_streams: int = 256
    num_connections: int = 8
    settle_s: float = 1.0
    window_s: float = 6.0
    num_repetitions: int = 7


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One window.

    Attributes:
        cores: busy on average, by kind of process; `others` are no processes of this benchmark.
    """

    rounds_per_s: float
    cores: Mapping[str, float]


class Coordinator:
    """A coordinator of so many workers; a context manager that ends it."""

    def __init__(self, num_workers: int, models: Popen[str], models_address: str, plan: Plan) -> None:
        self._num_workers, self._models, self._plan = num_workers, models, plan
        flags = {
            "address": "127.0.0.1:0",
            "verify_address": models_address,
            "draft_address": models_address,
            "num_draft_tokens": NUM_DRAFT_TOKENS,
            "num_outcomes": 0,
            "max_running": 2 * plan.num_streams,
            "workers": num_workers,
        }
        words = [word for name, value in flags.items() for word in flag_words(name, value)]
        self._service = Service("coordinator", words)

    def __enter__(self) -> Self:
        try:
            self._service.ready(_START_S)
        except BaseException:
            self._service.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._service.stop()

    def measure(self) -> Sample:
        """One window, in which all streams run."""
        with self._readers() as readers:
            usage = self._usage(readers)
            time.sleep(self._plan.settle_s)
            num_before, before = ask(self._models, "rounds"), usage.cpu_s()
            busy_before_s, started_s = _busy_s(), time.perf_counter()
            time.sleep(self._plan.window_s)
            num_rounds = ask(self._models, "rounds") - num_before
            elapsed_s, spent_s = time.perf_counter() - started_s, difference(usage.cpu_s(), before)
            busy_s = _busy_s() - busy_before_s
        spent_s[OTHERS] = max(0.0, busy_s - sum(spent_s.values()))
        cores = dict.fromkeys(KINDS, 0.0)
        for name, cpu_s in spent_s.items():
            cores[name.split()[0]] += cpu_s / elapsed_s
        return Sample(rounds_per_s=num_rounds / elapsed_s, cores=cores)

    @contextmanager
    def _readers(self) -> Iterator[Popen[str]]:
        counts = self._num_workers, self._plan.num_connections, self._plan.num_streams
        readers = start_module("benchmarks.readers", self._service.address, *map(str, counts))
        try:
            read_line(readers)
            yield readers
            if readers.poll() is not None:
                raise RuntimeError("the readers have ended")
        finally:
            end(readers)

    def _usage(self, readers: Popen[str]) -> Usage:
        parent = psutil.Process(self._service.process.pid)
        processes = {f"{COORDINATOR} {each.pid}": each.pid for each in (parent, *parent.children())}
        return Usage(processes | {MODELS: self._models.pid, READERS: readers.pid})


def _busy_s() -> float:
    """Processor time that all processes of this machine have had, in seconds."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def measure(plan: Plan) -> dict[int, list[Sample]]:
    """Windows by number of workers; the coordinators take turns."""
    samples: dict[int, list[Sample]] = {num: [] for num in COUNTS}
    with ExitStack() as stack:
        models = start_module("benchmarks.cheap_models")
        stack.callback(end, models)
        address = read_line(models)
        coordinators = {num: stack.enter_context(Coordinator(num, models, address, plan)) for num in COUNTS}
        for coordinator in coordinators.values():  # allocators, caches, and what is learnt
            coordinator.measure()
        for repetition in range(plan.num_repetitions):
            for num in COUNTS[::-1] if repetition % 2 else COUNTS:
                samples[num].append(coordinators[num].measure())
                _say(f"--workers {num}: {samples[num][-1].rounds_per_s:,.0f} rounds/s")
    return samples


def details(samples: Mapping[int, Sequence[Sample]]) -> str:
    """Rounds and cores by number of workers."""
    lines = [
        f"| workers | rounds/s | coordinator (ms a round) | {' | '.join(f'{k} (cores)' for k in KINDS)} |",
        "|---|---|---|" + "---|" * len(KINDS),
    ]
    for num, of_one in samples.items():
        rates = stats.summarise([each.rounds_per_s for each in of_one])
        costs_ms = stats.summarise([each.cores[COORDINATOR] / each.rounds_per_s * 1e3 for each in of_one])
        cores = [stats.summarise([each.cores[kind] for each in of_one]).text(2) for kind in KINDS]
        lines.append(f"| {num} | {rates.text(0)} | {costs_ms.text(3)} | {' | '.join(cores)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, write the files; 1 when the bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.workers", description=__doc__)
    parser.add_argument("--streams", type=int, default=Plan.num_streams, help="at once (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=Plan.num_repetitions, help="(default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args(argv)
    facts = machine()
    plan = Plan(num_streams=args.streams, num_repetitions=args.repetitions)
    samples = measure(plan)
    one, two = ([each.rounds_per_s for each in samples[num]] for num in COUNTS)
    ratios = stats.ratios(two, one)
    found = Report(
        name="workers",
        title="Two workers of a coordinator over one",
        machine=facts,
        about=_about(plan),
        bars=[
            Bar(
                what="rounds a second, 2 workers over 1, median",
                measured=statistics.median(ratios),
                limit=LEAST_RATIO,
                at_least=True,
            )
        ],
        details=f"Ratio within a repetition: {stats.summarise(ratios).text(2)}.\n\n{details(samples)}",
        data={
            "plan": asdict(plan),
            "samples": {num: [asdict(each) for each in of_one] for num, of_one in samples.items()},
        },
    )
    print(found.write(args.out))
    return int(not all(bar.passed for bar in found.bars))


def _about(plan: Plan) -> str:
    draft_ms, target_ms = cheap_models.DRAFT_S * 1e3, cheap_models.TARGET_S * 1e3
    return (
        f"Two coordinators, of one worker and of two (`--workers`), as processes of one machine; "
        f"{plan.num_streams} greedy streams at once on {plan.num_connections} connections, as many at each "
        f"worker, {NUM_DRAFT_TOKENS} draft tokens a round, nothing prepared ahead, no text. Draft and verify "
        f"are one process that answers in numpy what has arrived, every {draft_ms:g} and {target_ms:g} ms; "
        f"the clients are one process that counts HTTP/2 frames and drops them. Verify counts the rounds of "
        f"{plan.window_s:g} s in which all streams run; {plan.num_repetitions} repetitions, in turns, after "
        f"a warm-up; medians (least to greatest), ratios within a repetition. *Others*: processes of this "
        f"machine that are not part of it."
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
