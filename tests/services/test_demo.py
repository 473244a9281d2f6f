"""What `specwire demo` prints."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from specwire import Rule, SamplingParams
from specwire.cli import main as cli
from specwire.cli.terminal import painted_chunk, passes, printable
from specwire.completion import Speculation
from specwire.config.flags import read_config
from specwire.config.stack import UpConfig
from tests.support.command_line import check_completion
from tests.support.harness import LocalStack
from tests.support.rounds import received_chunks
from tools import demo

PROMPT = "The quick brown"
GREEN, RED_STRUCK, BLUE, RESET = "\x1b[32m", "\x1b[31;9m", "\x1b[34m", "\x1b[0m"
GREY = "\x1b[90m"
UNDERLINE = "\x1b[4m"


pytestmark = pytest.mark.usefixtures("restored")


class Terminal(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class OnOurStack:
    """With the services of this process; `test_processes.py` runs the whole of it."""

    @pytest.fixture(autouse=True)
    def on_our_stack(self, stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
        class Ours:
            address = stack.address

            def __init__(self, config: UpConfig) -> None:
                self.config = config

            def __enter__(self) -> Ours:
                return self

            def __exit__(self, *_: object) -> None:
                pass

        monkeypatch.setattr(demo, "Stack", Ours)
        monkeypatch.delenv("NO_COLOR", raising=False)


class TestDemo(OnOurStack):
    """With speculation and without."""

    ARGV = (
        *("demo", PROMPT, "--max-tokens", "20", "--temperature", "1"),
        *("--seed", "7", "--rule", "rejection", "--num-draft-tokens", "4", "--ignore-eos"),
    )

    def expected(self, stack: LocalStack) -> Any:
        params = SamplingParams(max_tokens=20, seed=7, rule=Rule.REJECTION, ignore_eos=True)
        return stack.client.generate(PROMPT, params)

    def test_plain_unless_on_a_terminal(self, stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(list(self.ARGV)) == 0
        out, err = capsys.readouterr()
        assert "\x1b" not in out
        assert err == ""
        done = self.expected(stack)
        assert f"\nwith speculation:\n{PROMPT}{printable(done.text)}\n" in out
        assert out.index("\nwithout speculation:\n") < out.index("\nwith speculation:\n")
        spec = done.speculation
        for line in (
            f"passes  {passes(spec)}",
            f"acceptance rate  {spec.draft_acceptance_rate:.2f}, by position ",
            "text  another draw from the same distribution",
            "seed  7",
        ):
            assert line in out
        assert re.search(r"\nwithout speculation  \d+ tokens/s, 20 tokens in 20 passes, 1\.00 a pass\n", out)
        assert re.search(r" with speculation  \d+ tokens/s, \d+\.\d times as fast\n", out)
        check_stages(out)

    @pytest.mark.parametrize("flags", [[], ["--draft", "ngram,embedded", "--least-pass-ms", "0"]])
    def test_the_next_step_has_the_same_models_and_a_pace_that_shows_the_gain(
        self, flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whether this one is paced is said in one line."""
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
        assert cli.main([*self.ARGV, *flags]) == 0
        out = capsys.readouterr().out
        (line,) = [line for line in out.splitlines() if "paced" in line]
        paced = "paced: a pass of the target takes at least 30 ms, like a large model's on its own device"
        assert line.startswith("not paced: draft and target share this machine" if flags else paced)
        assert ("--least-pass-ms 0" in line) == (not flags)
        _, _, after = out.partition("next, a page that races both, and OpenAI's API:\n  ")
        called, *arguments = after.partition("\n")[0].split()
        up = read_config(UpConfig, cli._parser().parse_args(arguments), {})
        assert (called, up.least_pass_ms, up.http_address) == ("specwire", 30, "127.0.0.1:8080")
        assert up.draft == (flags[1] if flags else "embedded")

    def test_the_next_step_is_called_by_its_path_where_the_shell_would_not_find_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
        monkeypatch.chdir(tmp_path)
        assert demo._called() == f"{tmp_path}/.venv/bin/python -m specwire.cli"
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        (tmp_path / ".venv" / "bin" / "specwire").touch()
        assert demo._called() == ".venv/bin/specwire"

    def test_coloured_on_a_terminal(self, stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        assert cli.main(list(self.ARGV)) == 0
        plain, shown = terminal.getvalue().split(f"\x1b[1m{PROMPT}{RESET}")[1:]
        assert "\x1b" not in plain.partition("\n\n\x1b[2m")[0], "fates are those of speculation"
        shown = shown.partition("\n\n\x1b[2m")[0]
        green, red, blue = (coloured(shown, code) for code in (GREEN, RED_STRUCK, BLUE))
        spec = self.expected(stack).speculation
        assert 0 < len(green) <= spec.num_accepted_tokens
        assert 0 < len(blue) <= spec.num_rounds
        assert 0 < len(red) <= spec.num_rounds
        kept = re.sub(re.escape(RED_STRUCK) + r".*?" + re.escape(RESET), "", shown, flags=re.DOTALL)
        assert re.sub(r"\x1b\[[\d;]*m", "", kept) == printable(self.expected(stack).text)
        assert "\n" not in "".join(red)

    def test_no_color_is_respected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("NO_COLOR", "1")
        assert cli.main(list(self.ARGV)) == 0
        assert "\x1b" not in terminal.getvalue()
        assert "recovered" not in terminal.getvalue(), "no legend of colours where there are none"

    def test_json(self, stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([*self.ARGV, "--json"]) == 0
        got = json.loads(capsys.readouterr().out)
        check_completion(got, num_tokens=20)
        assert got["text"] == self.expected(stack).text
        assert got["without_speculation"]["speculation"]["num_draft_tokens"] == 0
        assert got["without_speculation"]["seed"] == got["seed"] == 7
        assert got["least_pass_ms"] == 30

    def test_greedy_and_gumbel_say_the_same_without_speculation(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for flags in (["--temperature", "0"], ["--rule", "gumbel"]):
            assert cli.main([*self.ARGV, *flags]) == 0
            assert "text  the same, token for token" in capsys.readouterr().out

    def test_control_characters_do_not_reach_the_terminal(self) -> None:
        assert printable("a\x1b[31m\r\b\x7f\x9b\tb\n") == "a␛[31m␍␈␡\ufffd\tb\n"

    def test_speculation_can_be_off(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([*self.ARGV, "--num-draft-tokens", "0"]) == 0
        out = capsys.readouterr().out
        assert "decoded plainly  the request asks for num_draft_tokens=0" in out
        assert "acceptance rate  0.00, by position -" in out


def check_stages(out: str) -> None:
    """They are rounded so that they add up."""
    _, _, table = out.partition("ms per token  with speculation  without\n")
    rows = [line.rsplit(maxsplit=2) for line in table.splitlines()]
    assert rows[-1][0].strip() == "sum"
    for column in (1, 2):
        *parts, total = [Decimal(row[column]) for row in rows]
        assert sum(parts) == total > 0
    assert all(any(map(float, row[1:])) for row in rows), "stages that took nothing are left out"


class TestCompare(OnOurStack):
    """Five generations of 12 tokens, each after a short one."""

    ARGV = (
        *("demo", PROMPT, "--compare", "--max-tokens", "12", "--ignore-eos"),
        *("--rule", "gumbel", "--num-draft-tokens", "4"),
    )

    def test_each_kind_is_a_row(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Plain is 1, and matched tokens are those of plain; what cannot be shown says why."""
        assert cli.main(list(self.ARGV)) == 0
        out = capsys.readouterr().out
        _, _, table = out.partition("tokens a pass  tokens/s  times plain  text\n")
        rows = dict(line.strip().split("  ", 1) for line in table.splitlines())
        assert list(rows) == ["plain", "chain", "block", "tree", "ngram"]
        assert re.fullmatch(r"\s*1\.00 +\d+ +1\.00", rows["plain"])
        for name in ("chain", "ngram"):
            assert rows[name].endswith("the same, token for token")
        assert rows["block"].endswith("another draw from the same distribution")
        for name in (name for name, row in rows.items() if "not available" not in row):
            assert f"\n{name}, " in out, "each has its text under its title"
        assert float(rows["chain"].split()[0]) > 1

    def test_as_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        """With the counts of each source, and one seed for all."""
        assert cli.main([*self.ARGV, "--json"]) == 0
        got = json.loads(capsys.readouterr().out)
        shown = {name: got[name] for name in ("plain", "chain", "block", "ngram")}
        assert {done["seed"] for done in shown.values()} == {7}
        assert shown["plain"]["speculation"]["num_rounds"] == 12
        assert {counts["source"] for counts in shown["ngram"]["speculation"]["by_source"]} <= {"ngram"}
        assert shown["block"]["rule"] == "block"
        assert "ngram" not in {counts["source"] for counts in shown["chain"]["speculation"]["by_source"]}

    def test_greedy_decoding_has_no_block(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([*self.ARGV, "--temperature", "0"]) == 0
        assert "block  not available: greedy decoding compares tokens" in capsys.readouterr().out


def test_tokens_from_the_text_are_underlined() -> None:
    """Accepted or rejected; the model's and the target's own are not. What the target says alone is grey."""
    _, from_text, plain = received_chunks(report_progress=False)
    assert painted_chunk(from_text) == (
        f"{GREEN}{UNDERLINE}def{RESET}{RED_STRUCK}{UNDERLINE} push{RESET}{BLUE} pop{RESET}"
    )
    assert painted_chunk(plain) == f"{GREY}({RESET}"


@pytest.mark.parametrize(
    ("num_plain", "words"),
    [
        (0, "8 tokens in 2 passes, 4.00 a pass"),
        (3, "11 tokens in 5 passes, 2.20 a pass: 2 with drafts, 4.00 each, 3 without"),
    ],
)
def test_tokens_are_those_of_passes_with_drafts_and_without(num_plain: int, words: str) -> None:
    counts = Speculation(
        num_rounds=2 + num_plain,
        num_tokens=8 + num_plain,
        num_draft_tokens=8,
        num_accepted_tokens=6,
        acceptance_histogram=(0, 0, 1, 0, 1),
    )
    assert passes(counts) == words


def coloured(shown: str, code: str) -> list[str]:
    return re.findall(re.escape(code) + "(.*?)" + re.escape(RESET), shown, flags=re.DOTALL)
