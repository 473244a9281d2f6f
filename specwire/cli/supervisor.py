"""The three services of this machine as child processes: `specwire up`, `specwire demo`, tests, benchmarks.

Children end with their parent, even if it is killed (`specwire.parent`). They are stopped in an order in
which no process loses a service that it uses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from specwire.cli.kept import KeptService, pause_s
from specwire.cli.process import STOP_MARGIN_S, Service, wait_ready
from specwire.config import preflight
from specwire.config.flags import env_name, read_config
from specwire.config.link import ProxyConfig
from specwire.config.security.bearer import make_token, token_line
from specwire.config.serve import ServeConfig
from specwire.config.stack import StackConfig, UpConfig
from specwire.rpc import interrupts
from specwire.telemetry import logs

log = logging.getLogger(__name__)

_CANCEL_S = 1.0
"""For a service to cancel by itself what exceeds its grace period."""
_INTERRUPT_MARGIN_S = 0.75
"""After a grace period of 1 s, twice: Ctrl-C ends within 3 s."""
_POLL_S = 0.1
_MAX_FAILURES = 8
"""In a row, within about a minute: the next start would fail as well."""
_RESTART_MARGIN = 3.0
"""A restart may take so many times as long as the start: requests are served beside it."""


class Stack:
    """Draft, verify and coordinator together; a context manager that leaves no process behind."""

    def __init__(self, config: StackConfig, environ: Mapping[str, str] | None = None) -> None:
        """Start all three and wait until they serve. If one does not (ConfigError, ServiceUnavailableError),
        the others are stopped."""
        preflight.check(config)
        self.services: list[KeptService] = []
        """In the order of their starts."""
        self.verifies: list[KeptService] = []
        self.draft: KeptService | None = None
        self.http: KeptService | None = None
        self._grace_s = config.grace_s
        self._environ = environ
        try:
            self._start(config)
        except BaseException:
            self._kill()
            raise

    @property
    def address(self) -> str:
        """`HOST:PORT` of the coordinator."""
        return self.coordinator.address

    @property
    def verify(self) -> Service:
        """The verify service; with replicas, the first of them."""
        return self.verifies[0]

    def _start(self, config: StackConfig) -> None:
        began_s, environ = time.monotonic(), {**os.environ, **(self._environ or {})}
        self._files = _internal_tokens(config)
        required, shown = (
            {name: f"/dev/fd/{file.fileno()}" for name, file in each.items()} for each in self._files
        )
        # All that a variable may say wrong is known before anything starts.
        verifies = [config.verify(number, environ, **required) for number in range(config.replicas)]
        draft = config.draft_service(environ, **required)
        coordinator = config.coordinator(environ, **shown)
        front = config.front(environ) if config.http_address else None
        for number, verify in enumerate(verifies, 1):
            name = f"verify service {number}" if config.replicas > 1 else "the verify service"
            self.verifies.append(self._add(name, ["verify_service"], verify, {"model": "target"}))
        if draft:
            self.draft = self._add("the draft service", ["draft_service"], draft, {"model": "draft"})
        wait_ready(self.services, config.start_timeout_s)
        restart_s = _RESTART_MARGIN * (time.monotonic() - began_s)
        addresses = ",".join(each.address for each in self.verifies)
        draft_address = self.draft.address if self.draft else ""
        if draft_address and config.draft_rtt_ms:  # the coordinator finds it behind an emulated link
            given = argparse.Namespace(to=draft_address, rtt_ms=config.draft_rtt_ms)
            proxy = read_config(ProxyConfig, given, environ)
            link = self._add("the link to the draft", ["specwire.cli", "proxy"], proxy)
            draft_address = link.ready(config.start_timeout_s)
        coordinator = replace(coordinator, verify_address=addresses, draft_address=draft_address)
        if env_name("failover_timeout_s") not in environ:
            # Generations wait for a verify service that is restarted.
            most_s = max(coordinator.failover_timeout_s, pause_s(1) + restart_s)
            coordinator = replace(coordinator, failover_timeout_s=most_s)
        self.coordinator = self._add("the coordinator", ["coordinator"], coordinator)
        self.coordinator.ready(config.start_timeout_s)
        if front:
            front = replace(front, server=self.address)
            self.http = self._add("the HTTP front", ["specwire.cli", "http"], front)
            self.http.ready(config.start_timeout_s)
        log.log(logs.NOTICE, "gRPC at %s; try: %s", self.address, _example(config, self))

    def _add(
        self, name: str, command: Sequence[str], config: Any, aliases: Mapping[str, str] | None = None
    ) -> KeptService:
        """Start a service. Arguments as of `KeptService`."""
        with _uninterrupted():
            kept = KeptService(
                name, command, config, self._environ, aliases=aliases, max_failures=_MAX_FAILURES
            )
            self.services.append(kept)
        return kept

    def keep(self) -> NoReturn:
        """Restart services that end by themselves; raises as `KeptService.restart_if_due`."""
        while True:
            with _uninterrupted():
                for each in self.services:
                    each.restart_if_due(time.monotonic())
            time.sleep(_POLL_S)

    def stop(self, *, interrupted: bool = False) -> None:
        """Stop what clients use first: requests that finish within the grace period need the models.

        Args:
            interrupted: by someone who waits for the end: the grace period is short, and what is late then is
                ended by force without a word.
        """
        margin_s = _INTERRUPT_MARGIN_S if interrupted else STOP_MARGIN_S
        grace_s = interrupts.GRACE_S if interrupted else self._grace_s + _CANCEL_S
        used = [each for each in self.services if each is self.http or each.module == "coordinator"]
        models = [each for each in self.services if each not in used]
        try:
            # The front first: its clients are told that it ends, and not that it has lost its coordinator.
            for services, waits_s in ((used[::-1], (grace_s, margin_s)), (models, (margin_s,))):
                for wait_s in waits_s:
                    _ask_to_end(services, wait_s)
                for service in services:
                    service.kill() if interrupted else service.stop(0.0)
        finally:
            self._kill()

    def _kill(self) -> None:
        for service in self.services:
            service.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        if interrupted:
            log.warning(interrupts.SAID)
        self.stop(interrupted=interrupted)


def _ask_to_end(services: Sequence[Service], timeout_s: float) -> None:
    """Asked once more, they cancel what runs there."""
    for service in services:
        service.terminate()
    ends_s = time.monotonic() + timeout_s
    for service in services:
        service.wait(max(0.0, ends_s - time.monotonic()))


def _example(config: StackConfig, stack: Stack) -> str:
    """A command line that tries what serves; a secret is named, and not shown."""
    if stack.http is None:
        return generate_line(config, stack.address)
    model = config.front(os.environ).model_name
    model = model or (Path(config.target).name if Path(config.target).exists() else config.target)
    body = json.dumps({"model": model, "prompt": "def f(x):", "max_tokens": 32})
    token = ' -H "Authorization: Bearer $API_KEY"' if config.requires_tokens else ""
    url = f"http://{stack.http.address}/v1/completions"
    return f"curl {url} -H 'Content-Type: application/json'{token} -d '{body}'"


def generate_line(config: StackConfig, address: str) -> str:
    """A command line of a client that the coordinator admits; files of the client's own are capitals."""
    line = f"specwire generate 'def f(x):' --server {address}"
    if isinstance(config, UpConfig):
        line += " --tls-ca CA" if config.tls_cert else ""
        line += " --client-cert CERT --client-key KEY" if config.tls_client_ca else ""
        line += " --token-file TOKEN" if config.tokens else ""
    return line


def _unnamed_file(text: str) -> IO[bytes]:
    """A file without a name: only processes that inherit its descriptor can open it, and it is deleted with
    the last of them."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the stack
    file.write(text.encode())
    file.flush()
    return file


def _internal_tokens(config: StackConfig) -> tuple[dict[str, IO[bytes]], dict[str, IO[bytes]]]:
    """Flags of the model services and of the coordinator: where clients need a token, the model services
    require one as well, which only the coordinator has."""
    if not config.requires_tokens:
        return {}, {}
    token, line = make_token("coordinator")
    files = {"peer_token_file": _unnamed_file(token)}
    if isinstance(config, ServeConfig) and config.api_key:
        files["tokens"] = _unnamed_file(token_line("api-key", config.api_key))
    return {"tokens": _unnamed_file(line)}, files


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer SIGINT and SIGTERM: a process that is half started cannot be stopped, and its child would run the
    handler between fork and exec."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled elsewhere
        return
    arrived: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])
