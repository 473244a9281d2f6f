"""The life of a service's process: signals, exit status."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from specwire import parent
from specwire.config import environment, extras
from specwire.config.flags import as_given, read_config
from specwire.config.parser import Parser, add_config_file, add_flags
from specwire.config.services import ServiceConfig
from specwire.errors import SpecwireError
from specwire.rpc import descriptors, interrupts, listening, private
from specwire.telemetry import logs

log = logging.getLogger(__name__)

Command = TypeVar("Command", bound=ServiceConfig)

_LIFE_S = 1.0


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


async def run_until_signal(serving: AbstractAsyncContextManager[str], *, shows_life: bool = False) -> None:
    """Enter a service, print `ready HOST:PORT` on standard output, and leave it at SIGINT or SIGTERM.

    A second signal cancels what the first one lets finish, and so does a second after SIGINT.

    Args:
        shows_life: print an empty line each second for as long as it serves or ends, for a parent that ends
            what hangs (`cli.kept`).

    Raises:
        KeyboardInterrupt: it was SIGINT.
    """
    descriptors.set_up()
    ending = _Ending()
    life = asyncio.create_task(_show_life()) if shows_life else None
    try:
        async with serving as address:
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, ending.handle, number)
            # What is loaded lives as long as the process: traversing it in every full collection would stop
            # the service for over 100 ms.
            gc.collect()
            gc.freeze()
            print(f"ready {address}", flush=True)
            await ending.begun.wait()
    except asyncio.CancelledError:
        if not ending.is_forced:
            raise
    finally:
        if life is not None:
            life.cancel()
    if ending.number == signal.SIGINT:
        raise KeyboardInterrupt


async def _show_life() -> None:
    """On the event loop that serves: what keeps the loop from serving keeps it from this, too."""
    stdout = sys.stdout.fileno()
    os.set_blocking(stdout, False)
    while True:
        with contextlib.suppress(BlockingIOError):  # the parent hangs itself, and the pipe is full
            os.write(stdout, b"\n")
        await asyncio.sleep(_LIFE_S)


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


def run_service(
    name: str,
    about: str,
    kind: type[Command],
    prepare: Callable[[Command], AbstractAsyncContextManager[str]],
    argv: Sequence[str] | None,
    *,
    shows_life: bool = False,
) -> int:
    """Read flags and variables and run a service to its end; returns its exit status. A SpecwireError becomes
    one line in its log and status 2.

    Args:
        prepare: checks the flags, imports, and makes what `run_until_signal` enters; a parent of services
            keeps them instead, and does not return.
        shows_life: as of `run_until_signal`.
    """
    parser = Parser(prog=f"specwire {name}", description=about)
    add_config_file(parser)
    add_flags(parser, kind)
    args = parser.parse_args(argv)
    end_at_once_by_signals(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # see specwire.cli.main
    parent.end_with_it()
    logs.show_stacks_on_signal()
    try:
        config = read_config(kind, args, os.environ)
        logs.set_up(config.log_level, config.log_format, name)
        environment.check_environment(os.environ)
        listening.check(config)
        extras.require(f"specwire {name}", "coordinator" if name == "coordinator" else "serve")
        serving = prepare(config)
        with asyncio.Runner(loop_factory=private.Loop) as runner:
            runner.run(run_until_signal(serving, shows_life=shows_life))
    except SpecwireError as error:
        logs.report(as_given(error, args))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
