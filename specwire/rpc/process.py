"""The life of a service's process: signals, exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from specwire import parent
from specwire.config.flags import as_given
from specwire.errors import SpecwireError
from specwire.rpc import descriptors, interrupts, private
from specwire.telemetry import logs, stacks

log = logging.getLogger(__name__)


class _Ending:
    """What signals have said so far.

    Attributes:
        begun: set by the first.
        number: of the first.
        is_forced: whether what the first lets finish was cancelled.
    """

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.number: signal.Signals | None = None
        self.is_forced = False
        task = asyncio.current_task()
        assert task is not None
        self._task = task

    def handle(self, number: signal.Signals) -> None:
        """A signal came."""
        if self.begun.is_set():
            self._force()
            return
        self.number = number
        self.begun.set()
        if number == signal.SIGINT:
            log.warning(interrupts.SAID)
            asyncio.get_running_loop().call_later(interrupts.GRACE_S, self._force)

    def _force(self) -> None:
        self.is_forced = True
        self._task.cancel()


async def run_until_signal(serving: AbstractAsyncContextManager[str]) -> None:
    """Enter a service, print `ready HOST:PORT` on standard output, and leave it at SIGINT or SIGTERM.

    A second signal cancels what the first one lets finish, and so does a second after SIGINT.

    Raises:
        KeyboardInterrupt: it was SIGINT.
    """
    descriptors.set_up()
    ending = _Ending()
    try:
        await _serve_until(serving, ending)
    except asyncio.CancelledError:
        if not ending.is_forced:
            raise
    if ending.number == signal.SIGINT:
        raise KeyboardInterrupt


async def _serve_until(serving: AbstractAsyncContextManager[str], ending: _Ending) -> None:
    async with serving as address:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ending.handle, number)
        # What is loaded lives as long as the process: traversing it in every full collection would stop the
        # service for over 100 ms.
        gc.collect()
        gc.freeze()
        print(f"ready {address}", flush=True)
        await ending.begun.wait()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection: what modules define stays, and traversing it again and again takes a
    seventh of the time that torch and transformers need."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def end_at_once_by_signals(*numbers: signal.Signals) -> None:
    """Have signals end the process at once, until it serves: nothing has to finish before. asyncio would
    defer SIGINT until a model is loaded. The first process of a container has no default for them: they are
    ignored there unless something handles them."""
    for number in numbers:
        signal.signal(number, _end if os.getpid() == 1 else signal.SIG_DFL)


def _end(number: int, _: object) -> None:
    os._exit(128 + number)


def run_service(main: Callable[[], Coroutine[Any, Any, None]], args: argparse.Namespace | None = None) -> int:
    """Run a service to its end; a SpecwireError becomes one line in its log and exit status 2.

    Args:
        args: the flags that its config is read from, by whose names errors are told.
    """
    end_at_once_by_signals(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # see specwire.cli.main
    parent.end_with_it()
    stacks.show_on_signal()
    try:
        with asyncio.Runner(loop_factory=private.Loop) as runner:
            runner.run(main())
    except SpecwireError as error:
        logs.report(as_given(error, args))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
