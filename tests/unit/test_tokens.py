"""The tokens file, its principals, and the command that makes tokens."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from specwire import ConfigError, InvalidRequestError, SamplingParams, UnauthenticatedError
from specwire.cli import main as cli
from specwire.config.security.bearer import Principal, Tokens, add_line, bearer_token, make_token


def tokens_of(tmp_path: Path, *lines: str) -> Tokens:
    path = tmp_path / "tokens"
    new = tmp_path / "tokens.new"
    new.write_text("\n".join(lines))
    new.rename(path)
    return Tokens(str(path))


def test_only_the_hash_is_kept() -> None:
    token, line = make_token("alice", max_running=2)
    assert token not in line
    digest = hashlib.sha256(token.encode()).hexdigest()
    assert json.loads(line) == {"name": "alice", "sha256": digest, "max_running": 2}
    assert len({make_token("a")[0] for _ in range(100)}) == 100
    assert len(token) == 3 + 43  # 32 bytes in base 64


def test_principals(tmp_path: Path) -> None:
    made = {name: make_token(name, max_running=number) for number, name in enumerate(("a", "b"), start=1)}
    tokens = tokens_of(tmp_path, "# comment", "", *(line for _, line in made.values()))
    for number, (name, (token, _)) in enumerate(made.items(), start=1):
        assert tokens.check(token) == Principal(name=name, max_running=number)


@pytest.mark.parametrize("token", ["", "x", "sw_", "sw_" + "a" * 43, "x" * 100_000, "\ud800", "ä"])
def test_unknown(tmp_path: Path, token: str) -> None:
    with pytest.raises(UnauthenticatedError):
        tokens_of(tmp_path, make_token("a")[1]).check(token)


@pytest.mark.parametrize(
    ("expires", "is_over"),
    [
        (timedelta(seconds=-1), True),
        (timedelta(hours=1), False),
        ("2020-01-01", True),
        ("2999-01-01", False),
        ("2999-01-01T12:00Z", False),
    ],
)
def test_expiry(tmp_path: Path, expires: str | timedelta, is_over: bool) -> None:
    date = expires if isinstance(expires, str) else (datetime.now(UTC) + expires).isoformat()
    token, line = make_token("a", expires=date)
    tokens = tokens_of(tmp_path, line)
    if is_over:
        with pytest.raises(UnauthenticatedError, match="expired at 2"):
            tokens.check(token)
    else:
        assert tokens.check(token).name == "a"


def test_a_file_that_changes(tmp_path: Path) -> None:
    (old, old_line), (new, new_line) = make_token("a"), make_token("a")
    tokens = tokens_of(tmp_path, old_line)
    assert tokens.check(old)
    tokens_of(tmp_path, old_line, new_line)
    assert tokens.check(old) == tokens.check(new)
    tokens_of(tmp_path, new_line)
    with pytest.raises(UnauthenticatedError):
        tokens.check(old)
    (tmp_path / "tokens").unlink()
    assert tokens.check(new), "what was read last stays in force"


def test_a_file_that_may_be_read_only_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came with the mode of another user, which has been corrected since."""
    (old, old_line), (new, new_line) = make_token("a"), make_token("a")
    tokens = tokens_of(tmp_path, old_line)
    tokens_of(tmp_path, new_line).check(new)
    (tmp_path / "tokens").chmod(0)
    with monkeypatch.context() as refused:

        def read_bytes(_: Path) -> bytes:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        refused.setattr(Path, "read_bytes", read_bytes)
        assert tokens.check(old)
    (tmp_path / "tokens").chmod(0o600)
    assert tokens.check(new)


def test_a_line_that_a_full_disk_cuts_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens"
    path.write_text(make_token("a")[1])
    before = path.read_bytes()

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:9])

    monkeypatch.setattr("builtins.open", lambda *given: Full(*given[:2]))
    with pytest.raises(ConfigError, match="No space left"):
        add_line(str(path), make_token("b")[1])
    assert path.read_bytes() == before


DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("alice", "is not JSON"),
        ("[" * 3000, "is not JSON"),
        ('{"name": "a", "name": "b"}', "name: is given twice"),
        ("[]", "is not a JSON object"),
        ({"sha256": DIGEST}, "name must be"),
        ({"name": "a b", "sha256": DIGEST}, "name must be"),
        ({"name": "a"}, "sha256 must be"),
        ({"name": "a", "sha256": "sw_secret"}, "sha256 must be"),
        ({"name": "a", "sha256": DIGEST, "max_runing": 1}, "does not know max_runing"),
        ({"name": "a", "sha256": DIGEST, "max_running": 0}, "max_running must be"),
        ({"name": "a", "sha256": DIGEST, "max_tokens": True}, "max_tokens must be"),
        ({"name": "a", "sha256": DIGEST, "expires": "soon"}, "expires must be"),
        ({"name": "a", "sha256": DIGEST, "expires": 2030}, "expires must be"),
    ],
)
def test_a_line_that_cannot_be_used(tmp_path: Path, line: Any, problem: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    with pytest.raises(ConfigError, match=f"line 2: .*{problem}") as refused:
        tokens_of(tmp_path, "# first", text)
    assert "sw_secret" not in str(refused.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokens(str(tmp_path / "none"))


def test_a_principal_may_not_ask_for_more_than_it_may() -> None:
    principal = Principal(name="a", max_tokens=10)
    principal.check(SamplingParams(max_tokens=10))
    with pytest.raises(InvalidRequestError, match="max_tokens=11: is over the 10"):
        principal.check(SamplingParams(max_tokens=11))


def test_headers() -> None:
    headers = ["Bearer abc", "bearer abc", "BEARER  abc ", "Basic abc", "abc", "", "Bearer"]
    assert [bearer_token(header) for header in headers] == ["abc"] * 3 + [""] * 4


class TestCommand:
    def test_prints_token_and_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["token", "alice", "--max-waiting", "0", "--expires", "2999-01-01"]) == 0
        first, second = capsys.readouterr().out.splitlines()
        token, line = first.rpartition(" ")[2], second.partition(": ")[2]
        assert tokens_of(tmp_path, line).check(token).max_waiting == 0

    def test_adds_to_a_file_whose_last_line_is_open(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        token, line = make_token("alice")
        tokens_of(tmp_path, line)
        path = str(tmp_path / "tokens")
        assert cli.main(["token", "bob", "--tokens", path]) == 0
        tokens, added = Tokens(path), capsys.readouterr().out.strip()
        assert [tokens.check(each).name for each in (token, added)] == ["alice", "bob"]

    def test_makes_a_file_for_its_owner_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "tokens"
        assert cli.main(["token", "alice", "--tokens", str(path)]) == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    @pytest.mark.parametrize("words", [["a b"], ["a", "--max-running", "0"], ["a", "--expires", "soon"]])
    def test_refuses(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["token", *words]) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("limits", "capacity"),
    [
        ({}, 30),
        ({"max_running": 2, "max_waiting": 3}, 5),
        ({"max_running": 1}, 17),
        ({"max_running": 2}, 22),
        ({"max_waiting": 0}, 10),
        ({"max_running": 99, "max_waiting": 99}, 30),
    ],
)
def test_capacity(limits: dict[str, Any], capacity: int) -> None:
    """Where ten may run and twenty wait."""
    assert Principal(name="a", **limits).capacity((10, 20)) == capacity
