"""The life of a service's process: signals, exit status."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from specwire import parent
from specwire.errors import SpecwireError
from specwire.rpc import descriptors, private
from specwire.telemetry import logs, stacks


async def run_until_signal(serving: AbstractAsyncContextManager[str]) -> None:
    """Enter a service, print `ready HOST:PORT` on standard output, and leave it at SIGINT or SIGTERM.

    A second signal cancels what the first one lets finish.
    """
    descriptors.set_up()
    stopping, is_forced = asyncio.Event(), False
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        nonlocal is_forced
        if stopping.is_set():
            is_forced = True
            task.cancel()
        stopping.set()

    try:
        await _serve_until(serving, stopping, stop)
    except asyncio.CancelledError:
        if not is_forced:
            raise


async def _serve_until(
    serving: AbstractAsyncContextManager[str], stopping: asyncio.Event, stop: Callable[[], None]
) -> None:
    async with serving as address:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        # What is loaded lives as long as the process: traversing it in every full collection would stop the
        # service for over 100 ms.
        gc.collect()
        gc.freeze()
        print(f"ready {address}", flush=True)
        await stopping.wait()


def end_at_once_by_signals() -> None:
    """Have SIGINT and SIGTERM end the process at once, until it serves: nothing has to finish before.
    asyncio would defer SIGINT until a model is loaded."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def run_service(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a service to its end; a SpecwireError becomes one line in its log and exit status 2."""
    parent.end_with_it()
    stacks.show_on_signal()
    try:
        with asyncio.Runner(loop_factory=private.Loop) as runner:
            runner.run(main())
    except SpecwireError as error:
        logs.report(error)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
