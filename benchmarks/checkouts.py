"""The services of one version of this repository, and a client of the same version, as processes.

Two versions run side by side, so one run compares them on equal terms. Flags are only those that every
version knows.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.pipes import ask, end, read_line, start_python
from benchmarks.processes import THREADS, Devices, Usage, difference
from specwire.cli.process import Service
from specwire.config.flags import flag_words

HERE = Path(__file__).resolve().parents[1]
SERVICES = ("verify", "draft", "coordinator")
PROCESSES = (*SERVICES, "client")
_START_TIMEOUT_S = 60.0
_MAX_PROMPT_LEN = 32


@contextmanager
def version(name: str) -> Iterator[Path]:
    """The root of a checkout. `name` is its path, or a commit of this repository, laid out for as long.

    Raises:
        CalledProcessError: there is no such commit.
    """
    if (Path(name) / "coordinator/__main__.py").exists():
        yield Path(name).resolve()
        return
    packed = subprocess.run(["git", "archive", name], cwd=HERE, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as tree:
        tree.extractall(folder, filter="data")
        yield Path(folder)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one order to the client brought, and cost.

    Attributes:
        usual_round_ms: median time between two chunks of a stream.
        hit_rate: share of the rounds whose proposal was prepared.
        cpu_ms: processor time a round by process, in milliseconds; see `PROCESSES`.
        thread_cpu_ms: the same by process, then by kind of thread; see `Usage.thread_cpu_s`.
    """

    tokens_per_s: float
    rounds_per_s: float
    tokens_per_round: float
    usual_round_ms: float
    hit_rate: float
    cpu_ms: Mapping[str, float]
    thread_cpu_ms: Mapping[str, Mapping[str, float]]

    @property
    def services_ms(self) -> float:
        """Processor time a round of the three services together, in milliseconds."""
        return sum(self.cpu_ms[name] for name in SERVICES)


class Checkout:
    """Verify, draft, coordinator and a client; a context manager that ends them."""

    def __init__(
        self,
        root: Path,
        devices: Devices,
        *,
        max_streams: int,
        num_kv_tokens: int,
        verify_rtt_ms: float = 0.0,
    ) -> None:
        """Start them, with room for `max_streams`; `verify_rtt_ms` is a delay in front of verify.

        Raises:
            ConfigError, ServiceUnavailableError: one of them did not start; the others are ended.
        """
        # Without the last, `python -m` finds the modules of the current directory first.
        self._environ = {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
        with ExitStack() as started:
            self._started = started
            engine = {
                "num_kv_tokens": num_kv_tokens,
                "max_sequences": max_streams + 24,
                "max_num_tokens": max(2048, max_streams * _MAX_PROMPT_LEN),
                "max_prefill_tokens": max(2048, max_streams * _MAX_PROMPT_LEN),  # all begin at once
            }
            address = "127.0.0.1:0"
            verify = self._start("verify_service", address=address, model=devices.target, **engine)
            draft = self._start("draft_service", address=address, model=devices.draft, **engine)
            link = (
                self._start("specwire.cli", "proxy", to=verify.address, rtt_ms=verify_rtt_ms)
                if verify_rtt_ms
                else verify
            )
            coordinator = self._start(
                "coordinator",
                address=address,
                verify_address=link.address,
                draft_address=draft.address,
                num_draft_tokens=devices.num_draft_tokens,
                num_outcomes=devices.num_outcomes,
                max_running=max_streams,
            )
            program = str(HERE / "benchmarks/load.py")
            self._client = start_python(program, coordinator.address, environ=self._environ)
            started.callback(end, self._client)
            self._usage = Usage(
                {
                    "verify": verify.process.pid,
                    "draft": draft.process.pid,
                    "coordinator": coordinator.process.pid,
                    "client": self._client.pid,
                }
            )
            self._started = started.pop_all()

    def run(self, num_streams: int, num_tokens: int) -> Load:
        """So many greedy streams of so many tokens at once; opening and closing them is not counted."""
        ask(self._client, {"num_streams": num_streams, "num_tokens": num_tokens})
        before, threads_before = self._usage.cpu_s(), self._usage.thread_cpu_s()
        read_line(self._client)
        spent_s = difference(self._usage.cpu_s(), before)
        by_thread_s = difference(self._usage.thread_cpu_s(), threads_before)
        found = json.loads(read_line(self._client))
        num_rounds = found["num_tokens"] / found["tokens_per_round"]
        return Load(
            tokens_per_s=found["num_tokens"] / found["elapsed_s"],
            rounds_per_s=num_rounds / found["elapsed_s"],
            tokens_per_round=found["tokens_per_round"],
            usual_round_ms=found["usual_round_ms"],
            hit_rate=found["hit_rate"],
            cpu_ms={name: cpu_s / num_rounds * 1e3 for name, cpu_s in spent_s.items()},
            thread_cpu_ms={
                name: {kind: by_thread_s.get((name, kind), 0.0) / num_rounds * 1e3 for kind in THREADS}
                for name in spent_s
            },
        )

    def _start(self, module: str, *words: str, **flags: object) -> Service:
        service = Service(module, [*words, *flag_words(**flags)], self._environ)
        self._started.callback(service.stop)
        service.ready(_START_TIMEOUT_S)
        return service

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()
