"""The three services of this machine as child processes: `specwire up`, `specwire demo`, tests, benchmarks.

Children end with their parent, even if it is killed (`specwire.parent`). They are stopped in an order in
which no process loses a service that it uses.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Self

from specwire import interrupts, parent, preflight
from specwire.config.environment import ALL_CONFIGS
from specwire.config.fields import next_address
from specwire.config.flags import env_name, flag_words, known_variables, unknown_variables
from specwire.config.models import EMBEDDED, NO_DRAFT
from specwire.config.serve import ServeConfig
from specwire.config.services import ListenConfig, VerifyConfig
from specwire.config.stack import StackConfig, UpConfig
from specwire.errors import ConfigError, ServiceUnavailableError
from specwire.security.bearer import make_token, token_line
from specwire.telemetry import logs, stacks

log = logging.getLogger(__name__)

READY = "ready "
METRICS_ROLES = ("coordinator", "draft", "verify")
"""Roles in the order of their ports."""
_STOP_MARGIN_S = 5.0
_CANCEL_S = 1.0
"""For a service to cancel by itself what exceeds its grace period."""
_INTERRUPT_MARGIN_S = 0.75
"""After a grace period of 1 s, twice: Ctrl-C ends within 3 s."""
_ANY_PORT = {env_name("address"): "127.0.0.1:0"}
"""Several services of a kind may run beside each other; a flag wins."""
_STACKS_S = 0.5
_POLL_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STABLE_S = 60.0
"""A process that ran for this long is restarted without a longer pause."""


class Service:
    """One service process. It ends with the thread that starts it."""

    def __init__(
        self,
        module: str,
        flags: Sequence[str],
        environ: Mapping[str, str] | None = None,
        *,
        model_flag: str = "--model",
        pass_fds: Sequence[int] = (),
        owner: type[StackConfig] = UpConfig,
    ) -> None:
        """Start `python -m module flags`; wait with `ready`.

        Args:
            module: draft_service, verify_service or coordinator.
            environ: added to this process's environment, without the variables of `owner`.
            model_flag: the user's name of the service's `--model`, for errors.
            pass_fds: descriptors that it inherits, under the same numbers.
            owner: the config of this process, whose variables are not the service's.
        """
        self.module = module
        self.address = ""
        self._model_flag = model_flag
        self._error = ""
        self._is_terminated = False
        variables = _inherited(owner) | parent.environment() | dict(environ or {})
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # a selector does not see buffered lines
            env=variables,
            pass_fds=pass_fds,
            start_new_session=True,  # Ctrl-C reaches this process only, which stops the services in order
        )
        self._forwarder = threading.Thread(target=self._forward_errors, daemon=True)
        self._forwarder.start()

    def ready(self, timeout_s: float) -> str:
        """Wait for the line `ready HOST:PORT`; returns the address. Errors as for `wait_ready`."""
        wait_ready([self], timeout_s)
        return self.address

    def read_address(self) -> bool:
        """Read one line of the process's standard output; True if it is the `ready` line.

        Raises:
            ConfigError: the process ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if not line:
            raise ConfigError(self._why_not_serving())
        if line.startswith(READY):
            self.address = line.removeprefix(READY).split()[0]
        return bool(self.address)

    def terminate(self) -> None:
        """Send SIGTERM; returns at once. A second one ends the requests that the first one lets finish."""
        self._is_terminated = True
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def stop(self, timeout_s: float = 10.0 + _STOP_MARGIN_S) -> int:
        """Stop gracefully, then by force, after printing its stacks; returns the exit status."""
        if not self._is_terminated:
            self.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("%s has not ended in time: ended by force", self.module)
            self._show_stacks()
            return self.kill()

    def _show_stacks(self) -> None:
        self.process.send_signal(stacks.SIGNAL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STACKS_S)

    def wait(self, timeout_s: float) -> None:
        """Wait until it ends, or for as long as the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)

    def kill(self) -> int:
        """Kill it, if it runs; returns the exit status."""
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()

    def _why_not_serving(self) -> str:
        status = self.process.wait()
        self._forwarder.join(1.0)
        error = self._error.replace("--model ", f"{self._model_flag} ", 1)
        return error or f"{self.module} ended with status {status} instead of serving"

    def _forward_errors(self) -> None:
        """Forward standard error, except for the error that ends a service that did not start: it is raised
        here instead."""
        assert self.process.stderr is not None
        for data in self.process.stderr:
            line = data.decode(errors="replace")
            if not self.address and (error := logs.reported(line)):
                self._error = error
            else:
                logs.forward(line, self.module)


def wait_ready(services: Sequence[Service], timeout_s: float = math.inf) -> None:
    """Wait until all of them serve; the first failure is raised while others still load.

    Raises:
        ConfigError: a process ended, with its own error if it printed one.
        ServiceUnavailableError: at the timeout.
    """
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for service in services:
            assert service.process.stdout is not None
            selector.register(service.process.stdout, selectors.EVENT_READ, service)
        while waiting := [key.data for key in selector.get_map().values()]:
            left_s = max(0.0, deadline - time.monotonic())
            events = selector.select(None if left_s == math.inf else left_s)
            if not events:
                names = " and ".join(service.module for service in waiting)
                raise ServiceUnavailableError(f"{names} not ready within {timeout_s:g} s")
            for key, _ in events:
                if key.data.read_address():
                    selector.unregister(key.fileobj)


class Stack:
    """Draft, verify and coordinator together; a context manager that leaves no process behind."""

    def __init__(self, config: StackConfig, environ: Mapping[str, str] | None = None) -> None:
        """Start all three and wait until they serve.

        Raises:
            ConfigError, ServiceUnavailableError: one of them did not start; the others are stopped.
        """
        preflight.check(config)
        self.services: list[Service] = []
        self.http: Service | None = None
        self._grace_s = config.grace_s
        self._front_options = config.front_options
        self._owner = UpConfig if not isinstance(config, UpConfig) else type(config)
        self._metrics_from = metrics_address(config, "coordinator")
        self._log_flags = _flags(log_level=config.log_level, log_format=config.log_format)
        self._environ = environ
        self._pauses = Pauses()
        self._front_due_s = math.inf
        self._required_tokens, self._peer_token = _internal_token(config)
        try:
            self._start(config, environ)
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

    def is_required(self, ended: Service) -> bool:
        """Remove a service that has ended; returns whether the others cannot run without it."""
        self.services.remove(ended)
        if ended is self.http:
            return False
        if ended in self.verifies:
            return not any(verify in self.services for verify in self.verifies)
        return ended is not self.draft

    def _start(self, config: StackConfig, environ: Mapping[str, str] | None) -> None:
        self.verifies = [
            self._service(
                "verify_service",
                _verify_flags(config, index),
                environ,
                "--target",
                files=self._required_tokens,
            )
            for index in range(config.replicas)
        ]
        self.draft = (
            self._service(
                "draft_service", _draft_flags(config), environ, "--draft", files=self._required_tokens
            )
            if config.draft_model != NO_DRAFT
            else None
        )
        wait_ready(self.services, config.start_timeout_s)
        draft_address = self.draft.address if self.draft else ""
        if self.draft and config.draft_rtt_ms:
            link = self._service("specwire.cli", _proxy_flags(config, draft_address), environ)
            draft_address = link.ready(config.start_timeout_s)
        verify_addresses = ",".join(verify.address for verify in self.verifies)
        flags = _coordinator_flags(config, verify_addresses, draft_address)
        self.coordinator = self._service("coordinator", flags, environ, files=self._peer_token)
        self.coordinator.ready(config.start_timeout_s)
        if config.http_address:
            self.http = self._front(config.http_address)
            self._front_address = self.http.ready(config.start_timeout_s)
        log.log(logs.NOTICE, "gRPC at %s; try: %s", self.address, _example(config, self))

    def _front(self, address: str) -> Service:
        """Start the HTTP front."""
        flags = _flags(
            address=address,
            server=self.address,
            metrics_from=self._metrics_from,
            grace_s=self._grace_s,
            **self._front_options,
        )
        return self._service("specwire.cli", ["http", *flags, *self._log_flags], self._environ)

    def restart_front(self) -> float:
        """Schedule a restart of the ended HTTP front by `wait`; returns the pause in seconds."""
        pause_s = self._pauses.next(time.monotonic())
        self._front_due_s = time.monotonic() + pause_s
        return pause_s

    def _restart_front_if_due(self) -> None:
        if time.monotonic() >= self._front_due_s:
            self._front_due_s = math.inf
            self.http = self._front(self._front_address)
            self.http.address = self._front_address  # now set, so its errors are forwarded

    def _service(
        self,
        module: str,
        flags: Sequence[str],
        environ: Mapping[str, str] | None,
        model_flag: str = "--model",
        *,
        files: Mapping[str, _UnnamedFile] = MappingProxyType({}),
    ) -> Service:
        """Start one; `files` are flags whose values are unnamed files."""
        flags = [*flags, *_flags(**{name: file.path for name, file in files.items()})]
        fds = [file.fd for file in files.values()]
        with _uninterrupted():
            service = Service(module, flags, environ, model_flag=model_flag, pass_fds=fds, owner=self._owner)
            self.services.append(service)
        return service

    def wait(self) -> Service:
        """Block until a service ends by itself; returns it."""
        while True:
            for service in self.services:
                if service.process.poll() is not None:
                    return service
            self._restart_front_if_due()
            time.sleep(_POLL_S)

    def stop(self, *, interrupted: bool = False) -> None:
        """Stop what clients use first: requests that finish within the grace period need the models.

        Args:
            interrupted: by someone who waits for the end: the grace period is short, and what is late then is
                ended by force without a word.
        """
        margin_s = _INTERRUPT_MARGIN_S if interrupted else _STOP_MARGIN_S
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
    body = json.dumps({"model": _model_name(config), "prompt": "def f(x):", "max_tokens": 32})
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


def _model_name(config: StackConfig) -> str:
    """What the front calls its model."""
    given = config.front_options.get("model_name") or os.environ.get(env_name("model_name"))
    return str(given or (Path(config.target).name if Path(config.target).exists() else config.target))


class Pauses:
    """Pauses before restarts of a process: longer each time, unless it ran for a minute."""

    def __init__(self) -> None:
        self._last_s = -math.inf
        self._pause_s = 0.0

    def next(self, now_s: float) -> float:
        """The pause in seconds, after an end at this time."""
        was_stable = now_s - self._last_s > self._pause_s + _STABLE_S
        self._last_s = now_s
        self._pause_s = _FIRST_PAUSE_S if was_stable else min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return self._pause_s


class _UnnamedFile:
    """A file without a name: only processes that inherit its descriptor can open it, and it is deleted with
    the last of them.

    Attributes:
        path: for a process with the descriptor.
    """

    def __init__(self, text: str) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this
        self._file.write(text.encode())
        self._file.flush()
        self.fd = self._file.fileno()
        self.path = f"/dev/fd/{self.fd}"


def _internal_token(config: StackConfig) -> tuple[dict[str, _UnnamedFile], dict[str, _UnnamedFile]]:
    """Flags of the model services and of the coordinator: where clients need a token, the model services
    require one as well, which only the coordinator has."""
    if not config.requires_tokens:
        return {}, {}
    token, line = make_token("coordinator")
    files = {"peer_token_file": _UnnamedFile(token)}
    if isinstance(config, ServeConfig) and config.api_key:
        files["tokens"] = _UnnamedFile(token_line("api-key", config.api_key))
    return {"tokens": _UnnamedFile(line)}, files


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


def _flags(**values: object) -> list[str]:
    return [text for name, value in values.items() for text in flag_words(name, value)]


def _verify_flags(config: StackConfig, index: int) -> list[str]:
    return _flags(
        model=config.target,
        dtype=config.dtype,
        device=device_of(config, index),
        num_threads=config.num_threads or _default_threads(config),
        tensor_parallel_size=config.tensor_parallel_size,
        ray_address=config.ray_address,
        least_pass_ms=config.least_pass_ms,
        **_own_flag(config),
        **config.verify_options,
        metrics_address=metrics_address(config, "verify"),
        **_shared(config),
    )


def _own_flag(config: StackConfig) -> dict[str, object]:
    source, argument = config.own
    return {source: argument or True} if source else {}


def device_of(config: StackConfig | VerifyConfig, index: int) -> str:
    """The device of a replica: on `cuda` one card each; Ray places those that span several."""
    spread = config.device == "cuda" and config.replicas > 1 and config.tensor_parallel_size == 1
    return f"cuda:{index}" if spread else config.device


def _default_threads(config: StackConfig) -> int:
    """One for the embedded target, whose matrices are small: a second thread made a pass 9 to 17 % slower."""
    return 1 if config.target == EMBEDDED else 0


def _draft_flags(config: StackConfig) -> list[str]:
    return _flags(
        model=config.draft_model,
        dtype=config.draft_dtype,
        device=config.draft_device,
        num_threads=config.draft_num_threads,
        target_tokenizer=config.target_tokenizer,
        inner=config.inner,
        learn=config.draft_learn,
        learn_share=config.draft_learn_share,
        metrics_address=metrics_address(config, "draft"),
        **_shared(config),
    )


def _proxy_flags(config: StackConfig, draft_address: str) -> list[str]:
    return ["proxy", *_flags(to=draft_address, rtt_ms=config.draft_rtt_ms)]


def _coordinator_flags(config: StackConfig, verify_address: str, draft_address: str) -> list[str]:
    return _flags(
        address=config.address,
        num_draft_tokens=config.num_draft_tokens,
        num_outcomes=config.num_outcomes,
        max_depth=config.max_depth,
        speculative_config=config.coordinator_speculation,
        suffix_shared=config.suffix_shared,
        verify_ahead=config.verify_ahead,
        chat_template=config.chat_template,
        rule=config.rule,
        grace_s=config.grace_s,
        log_level=config.log_level,
        trace_detail=config.trace_detail,
        log_format=config.log_format,
        metrics_address=metrics_address(config, "coordinator"),
        metrics_names=config.metrics_names,
        verify_address=verify_address,
        draft_address=draft_address,
        **_listen_settings(config),
        **config.coordinator_options,
    )


def _listen_settings(config: StackConfig) -> dict[str, object]:
    names = [field.name for field in fields(ListenConfig)] if isinstance(config, ListenConfig) else []
    return {name: getattr(config, name) for name in names if name != "address"}


def metrics_address(config: StackConfig, role: str) -> str:
    """Metrics address of a service of the stack, on consecutive ports; port 0 stays 0."""
    return next_address("metrics_address", config.metrics_address, METRICS_ROLES.index(role))


def _shared(config: StackConfig) -> dict[str, object]:
    return {
        "address": "127.0.0.1:0",
        "num_kv_tokens": config.num_kv_tokens,
        "prefix_sharing": config.prefix_sharing,
        "grace_s": config.grace_s,
        "log_level": config.log_level,
        "trace_detail": config.trace_detail,
        "log_format": config.log_format,
        "metrics_names": config.metrics_names,
    }


def _inherited(owner: type[StackConfig]) -> dict[str, str]:
    """The environment without the variables of our own flags: here `SPECWIRE_ADDRESS` is the coordinator's,
    not that of all three. Others (`SPECWIRE_PAGE_SIZE`) are passed to the services, but for those that no
    process knows, of which each would warn."""
    dropped = known_variables([owner]).union(unknown_variables(ALL_CONFIGS, os.environ))
    return {name: value for name, value in os.environ.items() if name not in dropped}
