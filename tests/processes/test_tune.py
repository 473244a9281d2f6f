"""`specwire tune`: real services and models, and what they say of themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specwire.cli import main as cli
from tests.support.command_line import one_line_error

TEXT = Path(__file__).read_text() * 3


def test_it_measures_and_says_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the target's process, where the draft is by default: its choice is the one that is asked."""
    (tmp_path / "text").write_text(TEXT)
    picture = tmp_path / "choice.png"
    flags = ["--streams", "64,1", "--measured-streams", "1", "--turns", "2", "--max-tokens", "8"]
    given = ["tune", "--text", str(tmp_path / "text"), "--picture", str(picture), "--temperature", "0"]
    assert cli.main([*given, *flags]) == 0
    costs, accepted, choices = capsys.readouterr().out.split("\n\n")
    one, _, _, many = costs.splitlines()[1:5]
    assert float(one.split()[-1]) < float(many.split()[-1]), (
        "ms of a pass of 65 tokens, and of 64 times as many"
    )
    assert "a pass of the draft" in costs
    assert re.search(r"by place in the proposal: 0\.\d\d", accepted)
    head, first, last = choices.splitlines()
    assert head.split()[0] == "streams"
    assert re.match(r"1 +(plain|chains|trees).* \d\.\d\d +\d\.\d\d +\S+", first)
    assert re.match(r"64 +(plain|chains|trees).* \d\.\d\d +- +\S+", last)
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--streams", "1,0"], "--streams 1,0: must be numbers in [1, 65536], by commas"),
        (["--streams", "\u00b2"], "--streams \u00b2: must be numbers in"),
        (["--picture", "no/such/place.png"], "--picture no/such/place.png: cannot be written"),
        (["--picture", "x.bmp"], "--picture x.bmp: does not end in one of"),
        (["--text", "absent.txt"], "--text absent.txt: cannot be read"),
        (["--turns", "1"], "--turns 1: must be at least 2"),
    ],
)
def test_refusals(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert problem in one_line_error(2, ["tune", *flags], capsys)
