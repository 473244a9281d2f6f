"""What only real processes show: start, signals, sudden death, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire import Client, Completion, SamplingParams, ServiceUnavailableError
from specwire.telemetry import stacks
from tests.pairs import save_target

ROOT = Path(__file__).parent.parent
PROMPT = "The quick brown"
FIXED = ("--num-draft-tokens", "4")  # so that seeded text can be compared
START_S = 240.0  # on a machine that is busy with other things
END_S = 120.0


class Command:
    """A `specwire` command, and every process that it started."""

    def __init__(self, *argv: str, stdout: int = subprocess.PIPE) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SPECWIRE_")}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specwire.cli", *argv],
            cwd=ROOT,
            env=environ | {"SPECWIRE_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=self._stderr,
            start_new_session=True,
        )
        self._own = psutil.Process(self.process.pid)
        self._services: dict[int, psutil.Process] = {}

    @property
    def services(self) -> dict[str, psutil.Process]:
        """Running service processes by module name."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._services |= {child.pid: child for child in self._own.children(recursive=True)}
        found = {}
        for process in self._services.values():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                line = process.cmdline()
                if line[1:2] == ["-m"] and not gone(process):
                    found[line[2]] = process
        return found

    def ready_line(self) -> str:
        """The first line on standard output."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], START_S)[0], "not ready in time"
        line: bytes = self.process.stdout.readline()
        assert line, self.errors()
        _ = self.services
        return line.decode()

    def errors(self) -> str:
        """Standard error so far."""
        self._stderr.seek(0)
        return self._stderr.read().decode()

    def ended(self) -> int:
        """The exit status, when it has ended; what hangs says where."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            for process in (self._own, *self.services.values()):
                process.send_signal(stacks.SIGNAL)
            time.sleep(1.0)
            raise AssertionError(self.errors()) from None

    def assert_all_gone(self, seconds: float = END_S) -> None:
        assert self._services, "nothing was ever started"
        wait_until(lambda: all(gone(process) for process in self._services.values()), seconds)

    def close(self) -> None:
        """Whatever a failed test left."""
        for process in (self._own, *self.services.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._stderr.close()


def gone(process: psutil.Process) -> bool:
    """Ended; whoever inherited it may not have collected it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


@contextlib.contextmanager
def running(*argv: str) -> Iterator[Command]:
    command = Command(*argv)
    try:
        yield command
    finally:
        command.close()


class Reading:
    """A generation that another thread reads to its end."""

    def __init__(self, address: str, params: SamplingParams) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._going = threading.Event()
        self._done = self._pool.submit(self._read, address, params)
        assert self._going.wait(START_S)

    def _read(self, address: str, params: SamplingParams) -> Completion:
        with Client(address) as client, client.stream(PROMPT, params) as stream:
            for _ in stream:
                self._going.set()
            return stream.completion

    def result(self) -> Completion:
        try:
            return self._done.result(60)
        finally:
            self._pool.shutdown()


def up_argv(pair: tuple[Path, Path]) -> list[str]:
    target, draft = map(str, pair)
    models = ["--target", target, "--draft", draft]
    return ["up", "--address", "127.0.0.1:0", *models, "--dtype", "float32", *FIXED]


class TestUp:
    """One after the other on the same three processes."""

    @pytest.fixture(scope="class")
    @classmethod
    def up(cls, pair: tuple[Path, Path]) -> Iterator[Command]:
        with running(*up_argv(pair), "--grace-s", "60") as command:
            yield command

    @pytest.fixture(scope="class")
    @classmethod
    def address(cls, up: Command) -> str:
        line = up.ready_line()
        assert re.fullmatch(r"ready 127\.0\.0\.1:[1-9]\d*\n", line)
        return line.split()[1]

    def test_three_services_of_their_own(self, up: Command, address: str) -> None:
        assert up.services.keys() == {"draft_service", "verify_service", "coordinator"}
        assert up.errors() == "", "no progress bars, no warnings"
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    def test_serves(self, address: str) -> None:
        with Client(address) as client:
            done = client.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
            assert done.usage.completion_tokens == 40
            assert done.speculation.num_accepted_tokens > 0
            assert done.speculation.draft_unavailable == ""
            assert client.get_model_info()[0].dtype == "float32"

    def test_the_draft_is_killed_and_decoding_goes_on(self, up: Command, address: str) -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0)
        with Client(address) as client:
            undisturbed = client.generate(PROMPT, params)
        reading = Reading(address, params)
        up.services["draft_service"].kill()
        done = reading.result()
        assert done.token_ids == undisturbed.token_ids
        assert done.speculation.draft_unavailable != ""
        wait_until(lambda: "draft service ended; decoding goes on" in up.errors(), 10)
        assert up.process.poll() is None

    def test_sigterm_lets_a_generation_finish_and_leaves_nothing(self, up: Command, address: str) -> None:
        params = SamplingParams(max_tokens=800, ignore_eos=True, num_draft_tokens=0)
        reading = Reading(address, params)
        up.process.terminate()
        assert reading.result().usage.completion_tokens == 800
        assert up.ended() == 0
        assert up.process.stdout is not None
        assert up.process.stdout.read() == b"", "the ready line is all there is"
        assert "Traceback" not in up.errors()
        assert "by force" not in up.errors()
        up.assert_all_gone(1.0)


def test_up_killed_takes_its_services_along(pair: tuple[Path, Path]) -> None:
    with running(*up_argv(pair)[:5], "--draft", "none") as up:
        up.ready_line()
        assert len(up.services) == 2
        up.process.kill()
        up.process.wait()
        up.assert_all_gone()


def test_the_target_killed_is_a_typed_error_and_the_end_of_up(pair: tuple[Path, Path]) -> None:
    with running(*up_argv(pair)[:5], "--draft", "none") as up:
        address = up.ready_line().split()[1]
        reading = Reading(address, SamplingParams(max_tokens=4000, ignore_eos=True))
        started = time.monotonic()
        up.services["verify_service"].kill()
        with pytest.raises(ServiceUnavailableError, match="verify service"):
            reading.result()
        assert time.monotonic() - started < 15.0
        assert up.ended() == 1
        assert "error: verify_service ended with status -9\n" in up.errors()
        up.assert_all_gone(1.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_interrupted_before_it_is_ready(pair: tuple[Path, Path], number: signal.Signals) -> None:
    with running(*up_argv(pair)) as up:
        wait_until(lambda: len(up.services) == 2, START_S)
        os.killpg(up.process.pid, number)
        assert up.ended() == 0
        assert up.errors() == ""
        up.assert_all_gone(1.0)


def test_a_service_that_cannot_start_is_one_line_and_the_end(pair: tuple[Path, Path], tmp_path: Path) -> None:
    broken = save_target(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    with running(*up_argv(pair)[:5], "--draft", str(broken)) as up:
        wait_until(lambda: len(up.services) == 2, START_S)
        assert up.process.wait(START_S) == 2
        assert re.fullmatch(rf"error: --draft {re.escape(str(broken))}: .+\n", up.errors())
        up.assert_all_gone(1.0)


class TestDemo:
    """On a terminal."""

    @staticmethod
    @contextlib.contextmanager
    def on_terminal(pair: tuple[Path, Path], max_tokens: int) -> Iterator[tuple[Command, int]]:
        ours, theirs = pty.openpty()
        target, draft = map(str, pair)
        flags = ["--target", target, "--draft", draft, "--ignore-eos", "--max-tokens", str(max_tokens)]
        flags += ["--seed", "1", "--rule", "rejection"]  # accepts, rejects and adds
        flags += ["--least-pass-ms", "0"]
        command = Command("demo", PROMPT, *flags, stdout=theirs)
        os.close(theirs)
        try:
            yield command, ours
        finally:
            command.close()
            os.close(ours)

    @staticmethod
    def read(command: Command, terminal: int, until: str | None = None) -> str:
        """Up to where `until` is shown, or all of it."""
        shown = b""
        while until is None or until.encode() not in shown:
            assert select.select([terminal], [], [], START_S)[0], command.errors()
            try:
                data = os.read(terminal, 4096)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            shown += data
            _ = command.services
        return shown.decode(errors="replace")

    def test_shows_fates_in_colour_and_cleans_up(self, pair: tuple[Path, Path]) -> None:
        with self.on_terminal(pair, max_tokens=60) as (command, terminal):
            shown = self.read(command, terminal)
            assert command.ended() == 0
            assert command.errors() == ""
            text = shown.split(f"\x1b[1m{PROMPT}\x1b[0m")[2]  # the first one is without speculation
            for code in ("32", "31;9", "34"):
                assert f"\x1b[{code}m" in text
            assert "60 tokens in " in text
            assert "tokens/s" in text
            command.assert_all_gone(1.0)

    def test_ctrl_c_in_the_middle_leaves_nothing(self, pair: tuple[Path, Path]) -> None:
        with self.on_terminal(pair, max_tokens=4000) as (command, terminal):
            self.read(command, terminal, until=f"\x1b[1m{PROMPT}\x1b[0m")
            assert os.read(terminal, 1), "the first token"
            assert len(command.services) == 3
            os.killpg(command.process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
            drained = threading.Thread(target=self.read, args=(command, terminal), daemon=True)
            drained.start()
            assert command.ended() == 130
            drained.join(END_S)
            assert command.errors() == ""
            command.assert_all_gone(1.0)
