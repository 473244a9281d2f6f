"""What only real processes show: start, signals, sudden death, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest

from specwire import Client, RetryPolicy, SamplingParams
from specwire.completion import Stage
from tests.support.harness import is_serving
from tests.support.processes import START_S, Command, running, wait_until

PROMPT = "The quick brown"
FIXED = ("--num-draft-tokens", "4")  # so that seeded text can be compared


def up_argv(pair: tuple[Path, Path]) -> list[str]:
    target, draft = map(str, pair)
    models = ["--target", target, "--draft", draft, "--draft-placement", "service"]
    return ["up", "--address", "127.0.0.1:0", "--log-level", "warning", *models, "--dtype", "float32", *FIXED]


class TestUp:
    """One after the other on the same processes."""

    @pytest.fixture(scope="class")
    @classmethod
    def up(cls, pair: tuple[Path, Path]) -> Iterator[Command]:
        with running(*up_argv(pair), "--grace-s", "60", "--http-address", "127.0.0.1:0") as command:
            yield command

    @pytest.fixture(scope="class")
    @classmethod
    def address(cls, up: Command) -> str:
        line = up.ready_line()
        assert re.fullmatch(r"ready 127\.0\.0\.1:[1-9]\d*\n", line)
        return line.split()[1]

    @pytest.fixture(scope="class")
    @classmethod
    def page(cls, up: Command, address: str) -> str:
        line = up.line()
        assert re.fullmatch(r"page http://127\.0\.0\.1:[1-9]\d*/\n", line)
        return line.split()[1]

    def test_services_of_their_own(self, up: Command, address: str, page: str) -> None:
        assert up.services.keys() == {"draft_service", "verify_service", "coordinator", "specwire.cli"}
        assert up.errors() == "", "no progress bars, no warnings"
        assert is_serving(address)

    def test_serves(self, address: str) -> None:
        with Client(address) as client:
            done = client.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
            assert done.usage.completion_tokens == 40
            assert done.speculation.num_accepted_tokens > 0
            assert done.speculation.draft_unavailable == ""
            assert client.get_model_info()[0].dtype == "float32"

    def test_services_that_are_killed_are_started_again_under_a_running_generation(
        self, up: Command, address: str, page: str
    ) -> None:
        """The draft service is killed in `test_logs.py`."""
        params = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True, num_draft_tokens=2)
        front = up.services["specwire.cli"]
        front.kill()
        with Client(address, retry=RetryPolicy(patience_s=60.0)) as client:
            whole = client.generate(PROMPT, params)
            doomed, tokens = ["verify_service", "coordinator"], []
            with client.stream(PROMPT, params) as stream:
                for chunk in stream:
                    tokens += [token.token_id for token in chunk.tokens]
                    if doomed and len(tokens) > 60 * (3 - len(doomed)):
                        up.services[doomed.pop(0)].kill()
            assert not doomed
            assert tuple(tokens) == whole.token_ids
            assert stream.completion.num_resumes == 1, "the coordinator's loss is the client's, and no other"
            drafts = partial(client.generate, PROMPT, replace(params, max_tokens=8))
            wait_until(lambda: drafts().speculation.num_draft_tokens > 0, 60)
        wait_until(lambda: not front.is_running() and answers(f"{page}v1/models"), 60)

    def test_sigterm_lets_a_generation_finish_and_leaves_nothing(self, up: Command, address: str) -> None:
        params = SamplingParams(max_tokens=300, ignore_eos=True, num_draft_tokens=0)
        with Client(address) as client, client.stream(PROMPT, params) as stream:
            next(iter(stream))
            up.process.terminate()
            list(stream)
            assert stream.completion.usage.completion_tokens == 300
        assert up.ended() == 0
        assert up.line() == "", "these lines are all there is"
        assert "Traceback" not in up.errors()
        assert "by force" not in up.errors()
        up.assert_all_gone(1.0)


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=20):
        return True
    return False


@pytest.mark.slow
def test_up_killed_takes_its_services_along(pair: tuple[Path, Path]) -> None:
    with running(*up_argv(pair)[:7], "--draft", "none") as up:
        up.ready_line()
        assert len(up.services) == 2
        up.process.kill()
        up.process.wait()
        up.assert_all_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_interrupted_before_it_is_ready(pair: tuple[Path, Path], number: signal.Signals) -> None:
    with running(*up_argv(pair)) as up:
        wait_until(lambda: len(up.services) == 2, START_S)
        os.killpg(up.process.pid, number)
        assert up.ended() == (130 if number == signal.SIGINT else 0)
        assert up.errors() == ""
        up.assert_all_gone(1.0)


def check_stages(shown: str) -> None:
    """The last lines of a demo: milliseconds of a token by stage, which add up to what its speed says."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown).replace("\r", "")
    _, _, table = plain.partition("ms per token  with speculation  without\n")
    *stages, total = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    named = [row[0] for row in stages]
    assert named == [name for name in (stage.replace("_", " ") for stage in Stage) if name in named]
    assert {"verify", "coordinator"} <= set(named), "the draft is in the target's process"
    assert total[0] == "sum"
    speeds = re.findall(r"with(?:out)? speculation  (\d+) tokens/s", plain)
    for column, speed in ((1, speeds[1]), (2, speeds[0])):
        assert sum(Decimal(row[column]) for row in stages) == Decimal(total[column])
        assert 1e3 / float(total[column]) == pytest.approx(float(speed), abs=0.6, rel=0.01)


@pytest.mark.slow
def test_a_demo_on_a_terminal_shows_fates_in_colour_and_cleans_up(pair: tuple[Path, Path]) -> None:
    ours, theirs = pty.openpty()
    target, draft = map(str, pair)
    flags = ["--target", target, "--draft", draft, "--ignore-eos", "--max-tokens", "60", "--seed", "1"]
    flags += ["--rule", "rejection", "--least-pass-ms", "0", "--num-draft-tokens", "6"]
    with running("demo", PROMPT, *flags, stdout=theirs) as command:  # it accepts, rejects and adds
        os.close(theirs)
        shown = shown_on(command, ours)
        assert command.ended() == 0
        assert command.errors() == ""
        text = shown.split(f"\x1b[1m{PROMPT}\x1b[0m")[2]  # the first one is without speculation
        for code in ("32", "31;9", "34"):
            assert f"\x1b[{code}m" in text
        assert "60 tokens in " in text
        assert "tokens/s" in text
        check_stages(text)
        command.assert_all_gone(1.0)
    os.close(ours)


def shown_on(command: Command, terminal: int) -> str:
    """All that a command shows until its end."""
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while select.select([terminal], [], [], START_S)[0]:
            shown += os.read(terminal, 4096)
            _ = command.services
    return shown.decode(errors="replace")
