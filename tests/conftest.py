"""What several test files use: three services on a small text pair, for the tests of a file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specwire import Client
from tests.support import report, sample
from tests.support.effort import CHAOS

if TYPE_CHECKING:  # these import torch, which takes seconds: fixtures that need them import them
    from specwire.text.tokenizer import Tokenizer
    from tests.support.harness import LocalStack

# A thread for each model: several processes compute at a time, and threads that wait for each other spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that runs us in the background has us ignore Ctrl-C, and all that we start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from tests.support import texts

    return texts.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def stack(pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    from tests.support.harness import local_stack

    with local_stack(*pair) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: LocalStack) -> Client:
    return stack.client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from specwire.text.tokenizer import Tokenizer
    from tests.support import texts

    return Tokenizer(texts.build_tokenizer())


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signal handlers and environment as they were."""
    for name in [name for name in os.environ if name.startswith("SPECWIRE_")]:
        monkeypatch.delenv(name)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """No OpenTelemetry settings and no proxies in the environment."""
    for name in os.environ:
        if name.startswith("OTEL_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sample.mark_slow(items)


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip slow tests from a time on, in seconds since 1970: CI ends a run that takes too long."""
    if item.get_closest_marker("slow") and time.time() > float(os.environ.get("SLOW_UNTIL_S", "inf")):
        pytest.skip("SLOW_UNTIL_S has passed")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if CHAOS:
        terminalreporter.write("\n" + report.keep())
