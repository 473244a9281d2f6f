"""Configuration of `specwire serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from specwire.config import cuda, extras, ports
from specwire.config.client import ApiConfig
from specwire.config.fields import AUTO, between, check, check_address, check_host
from specwire.config.flags import option, same, secret
from specwire.config.models import EMBEDDED, NO_DRAFT, check_model
from specwire.config.parts import EngineConfig
from specwire.config.services import CoordinatorConfig
from specwire.config.speculative import NGRAM
from specwire.config.stack import DRAFT_HELP, UP_METRICS_HELP, UpConfig

_DEVICES = "cpu, cuda or cuda:N; auto is cuda where torch finds one"
_METRICS_HOST, _METRICS_PORTS = "127.0.0.1", range(9464, 9564, 10)
_METRICS_EXTRA = "prometheus_client"


def _check_metrics(name: str, address: str) -> None:
    if address != AUTO:
        check_address(name, address)


def _free_metrics_address(num_ports: int) -> str:
    """With so many free ports from there on; empty without one, or without the extra."""
    if not extras.is_installed(_METRICS_EXTRA):
        return ""
    starts = (s for s in _METRICS_PORTS if ports.are_free(_METRICS_HOST, range(s, s + num_ports)))
    start = next(starts, 0)
    return f"{_METRICS_HOST}:{start}" if start else ""


def _check_target(name: str, source: str) -> None:
    check(source != "", name, "missing", f"give a directory or hub id of a model, or {EMBEDDED}")
    check_model(name, source)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(UpConfig, ApiConfig, EngineConfig):
    """`specwire serve`: the services and OpenAI's API, with vLLM's names where it has them. `names_draft`
    says whether what drafts was given, and not left to the default."""

    http_flags: ClassVar = ("host", "port")
    target: str = option(
        "",
        f"directory or hub id of the model, or {EMBEDDED}",
        metavar="MODEL",
        check=_check_target,
        alias="model",
        is_positional=True,
    )
    draft: str = option(AUTO, f"{DRAFT_HELP}; auto is the embedded target's own draft, else {NGRAM}")
    device: str = option(AUTO, f"device of the target: {_DEVICES}")
    draft_device: str = option(AUTO, f"device of the draft: {_DEVICES}")
    host: str = option("127.0.0.1", "host that OpenAI's API listens on", check=check_host)
    port: int = option(8000, "port of OpenAI's API; 0 picks a free one", check=between(0, 65535))
    http_address: str = field(init=False, default="")
    names_draft: bool = field(init=False, default=True)
    tls_cert: str = field(init=False, default="")
    tls_key: str = field(init=False, default="")
    tls_client_ca: str = field(init=False, default="")
    api_key: str = secret("bearer token that clients must send; --tokens is for several", has_flag=True)
    metrics_address: str = option(
        AUTO,
        f"{UP_METRICS_HELP}; the API has the coordinator's, too; auto takes free ports where the extra "
        "metrics is installed",
        check=_check_metrics,
    )
    max_running: int = same(CoordinatorConfig, "max_running")
    seed: int = same(CoordinatorConfig, "seed")

    def __post_init__(self) -> None:
        host = f"[{self.host}]" if ":" in self.host else self.host
        self._set("http_address", f"{host}:{self.port}")
        for name in ("device", "draft_device"):
            if getattr(self, name) == AUTO:
                self._set(name, "cuda" if cuda.is_usable() else "cpu")
        if self.metrics_address == AUTO:
            num_ports = self.replicas + 3  # coordinator, draft and front
            self._set("metrics_address", _free_metrics_address(num_ports))
        if self.draft == AUTO:
            self._set("names_draft", self.speculative_config != "")
            otherwise = NO_DRAFT if self.names_draft else NGRAM
            self._set("draft", EMBEDDED if self.target == EMBEDDED else otherwise)
        super().__post_init__()
        problem = "--tokens does not go together with it; add a line to that file with specwire token"
        check(not (self.api_key and self.tokens), "api_key", "(not shown)", problem)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def requires_tokens(self) -> bool:
        return bool(self.api_key) or super().requires_tokens
