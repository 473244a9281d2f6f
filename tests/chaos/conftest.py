from __future__ import annotations

from typing import Any

from tests.chaos import CHAOS, report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if CHAOS:
        terminalreporter.write("\n" + report.keep())
