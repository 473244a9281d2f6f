"""The three services of this machine as child processes: `specwire up`, `specwire demo`, tests, benchmarks.

Children end with their parent, even if it is killed (`specwire.parent`). They are stopped in an order in
which no process loses a service that it uses.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from specwire.cli.kept import KeptService, KeptServices, pause_s
from specwire.cli.process import Service, wait_ready
from specwire.config import preflight
from specwire.config.flags import env_name, read_config
from specwire.config.link import ProxyConfig
from specwire.config.security.bearer import make_token, token_line
from specwire.config.serve import ServeConfig
from specwire.config.stack import StackConfig, UpConfig
from specwire.telemetry import logs

log = logging.getLogger(__name__)

_MAX_FAILURES = 8
"""In a row, within about a minute: the next start would fail as well."""
_RESTART_MARGIN = 3.0
"""A restart may take so many times as long as the start: requests are served beside it."""


class Stack(KeptServices):
    """Draft, verify and coordinator together; a context manager that leaves no process behind."""

    def __init__(self, config: StackConfig, environ: Mapping[str, str] | None = None) -> None:
        """Start all three and wait until they serve. If one does not (ConfigError, ServiceUnavailableError),
        the others are stopped."""
        preflight.check(config)
        super().__init__(config.grace_s, environ=environ, max_failures=_MAX_FAILURES)
        self.verifies: list[KeptService] = []
        self.draft: KeptService | None = None
        self.http: KeptService | None = None
        try:
            self._start(config, {**os.environ, **(environ or {})})
        except BaseException:
            self.kill()
            raise

    @property
    def address(self) -> str:
        """`HOST:PORT` of the coordinator."""
        return self.coordinator.address

    @property
    def verify(self) -> Service:
        """The verify service; with replicas, the first of them."""
        return self.verifies[0]

    def _start(self, config: StackConfig, environ: Mapping[str, str]) -> None:
        began_s = time.monotonic()
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
            self.verifies.append(self.add(name, ["verify_service"], verify, {"model": "target"}))
        if draft:
            self.draft = self.add("the draft service", ["draft_service"], draft, {"model": "draft"})
        wait_ready(self.services, config.start_timeout_s)
        restart_s = _RESTART_MARGIN * (time.monotonic() - began_s)
        addresses = ",".join(each.address for each in self.verifies)
        draft_address = self.draft.address if self.draft else ""
        if draft_address and config.draft_rtt_ms:  # the coordinator finds it behind an emulated link
            given = argparse.Namespace(to=draft_address, rtt_ms=config.draft_rtt_ms)
            proxy = read_config(ProxyConfig, given, environ)
            link = self.add("the link to the draft", ["specwire.cli", "proxy"], proxy)
            draft_address = link.ready(config.start_timeout_s)
        coordinator = replace(coordinator, verify_address=addresses, draft_address=draft_address)
        if env_name("failover_timeout_s") not in environ:
            # Generations wait for a verify service that is restarted.
            most_s = max(coordinator.failover_timeout_s, pause_s(1) + restart_s)
            coordinator = replace(coordinator, failover_timeout_s=most_s)
        self.coordinator = self.add("the coordinator", ["coordinator"], coordinator)
        self.coordinator.ready(config.start_timeout_s)
        if front:
            front = replace(front, server=self.address)
            self.http = self.add("the HTTP front", ["specwire.cli", "http"], front)
            self.http.ready(config.start_timeout_s)
        log.log(logs.NOTICE, "gRPC at %s; try: %s", self.address, _example(config, self))

    def _groups(self) -> Sequence[Sequence[Service]]:
        """What clients use first: requests that finish within the grace period need the models. The front
        before all: its clients are told that it ends, and not that it has lost its coordinator."""
        used = [each for each in self.services if each is self.http or each.module == "coordinator"]
        return used[::-1], [each for each in self.services if each not in used]


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
