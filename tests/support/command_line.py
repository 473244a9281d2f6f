"""What the command line says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from specwire.cli import main as cli


def usage_error(
    argv: list[str], capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int] = cli.main
) -> str:
    """The reason, and where the usage is: nothing else is said."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: .+\nsee specwire[a-z -]* --help\n", err)
    return err


def one_line_error(status: int, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(argv) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: .+\n", err)
    return err


def check_completion(got: dict[str, Any], num_tokens: int) -> None:
    """The documented form of a completion as JSON."""
    assert {"text", "token_ids", "finish_reason", "stop_reason", "seed", "model"} <= got.keys()
    assert len(got["token_ids"]) == num_tokens == got["usage"]["completion_tokens"]
    assert got["finish_reason"] in ("stop", "length")
    assert got["usage"].keys() == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    speculation = got["speculation"]
    assert speculation.keys() >= {
        "num_rounds",
        "num_draft_tokens",
        "num_accepted_tokens",
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
    }
    assert speculation["num_accepted_tokens"] == sum(
        k * n for k, n in enumerate(speculation["acceptance_histogram"])
    )
    assert 1 <= speculation["mean_acceptance_length"] <= 6
    assert 0 <= speculation["draft_acceptance_rate"] <= 1
    assert got["timing"]["total_ms"] >= got["timing"]["time_to_first_token_ms"] > 0
