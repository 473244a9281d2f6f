from __future__ import annotations

from typing import Any

from tests.chaos import CHAOS, report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found = report.table()
    if CHAOS and found:
        terminalreporter.write("\n" + found)
        report.RESULTS.write_text(found)
