"""Configuration of the coordinator's clients: the command line, and the HTTP front."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specwire.config.fields import (
    SERVER_TLS,
    CertificateConfig,
    PlaintextConfig,
    ServerConfig,
    at_least,
    between,
    check_address,
    check_amount,
    check_duration,
    check_origins,
    check_plaintext,
    comma_separated,
    file_option,
    one_of,
    split_addresses,
)
from specwire.config.flags import CheckedConfig, option, secret
from specwire.config.security.tls import TLS, read_token

TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral")
"""Formats of `specwire.http.tools`."""


@dataclass(frozen=True, kw_only=True)
class ConnectionConfig(PlaintextConfig):
    """How a client connects to the coordinator."""

    server: str = option(
        "127.0.0.1:7070",
        "HOST:PORT of the coordinator, or dns:///NAME:PORT of several; further ones after commas",
        check=split_addresses,
    )
    tls: bool = option(
        False,
        "use TLS; implied by --tls-ca, --client-cert and --server-name",
        implied_by=("tls_ca", "client_cert", "server_name"),
    )
    tls_ca: str = file_option(
        "PEM certificates of the authorities that the server is verified against; empty for public ones"
    )
    client_cert: str = file_option("PEM certificate of the client, for mutual TLS", "client_key")
    client_key: str = file_option("PEM private key of --client-cert", "client_cert")
    server_name: str = option("", "name in the server's certificate; empty for its host")

    @property
    def server_tls(self) -> TLS | None:
        """TLS to the coordinator; None for plaintext."""
        named = (self.tls_ca, self.client_cert, self.server_name)
        tls = TLS(ca=self.tls_ca, cert=self.client_cert, key=self.client_key, server_name=self.server_name)
        return tls if self.tls or any(named) else None


@dataclass(frozen=True, kw_only=True)
class ClientConfig(ConnectionConfig):
    """How `specwire generate` reaches the coordinator."""

    timeout_s: float = option(120.0, "deadline of the whole generation, in seconds", check=check_duration)
    token: str = secret("bearer token for the server")
    token_file: str = file_option("file with the bearer token, instead of SPECWIRE_TOKEN")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(not (self.token and self.token_file), "token_file", "and SPECWIRE_TOKEN are both given")

    @property
    def credentials(self) -> dict[str, Any]:
        """Credentials and trust, as arguments of `Client`; ConfigError if the token file cannot be used."""
        token = read_token(self.token_file) if self.token_file else self.token
        return {"tls": self.server_tls, "token": token, "allow_plaintext": self.allow_plaintext}


OPENAI = "openai"
"""Sampling as OpenAI's API has it where a request does not say how, whatever the model's files ask for."""


@dataclass(frozen=True, kw_only=True)
class ApiConfig(CheckedConfig):
    """How OpenAI's API is served."""

    model_name: str = option(
        "", "name that clients ask for; empty is the target's own", alias="served_model_name"
    )
    allowed_hosts: str = option(
        "",
        "accepted Host names, separated by commas; * accepts any, the default beyond this machine",
        metavar="NAME,...",
    )
    cors_origin: str = option(
        "",
        "origins whose pages may use this server, as https://HOST[:PORT], separated by commas; * allows all",
        metavar="ORIGIN,...",
        check=check_origins,
    )
    lenient: bool = option(False, "ignore unknown parameters with a Warning header instead of refusing them")
    tool_call_parser: str = option(
        "",
        f"form of the model's tool calls: {', '.join(TOOL_CALL_PARSERS)}; empty detects it by its template",
        check=one_of("", *TOOL_CALL_PARSERS),
    )
    sampling_defaults: str = option(
        "model",
        f"where a request does not say it: temperature, top_k, top_p, min_p and repetition_penalty of the "
        f"model's generation config; {OPENAI}: none of them",
        check=one_of("model", OPENAI),
    )


@dataclass(frozen=True, kw_only=True)
class HttpConfig(ConnectionConfig, ApiConfig, CertificateConfig, ServerConfig):
    """`specwire http`: the OpenAI-compatible front of a coordinator."""

    address: str = option("127.0.0.1:8080", "HOST:PORT to listen on; port 0 picks a free one")
    workers: int = option(
        1,
        "processes that listen at the address and share nothing: limits hold for each",
        check=between(1, 64),
    )
    tokenizer: str = option("", "directory or hub id of the tokenizer; empty asks the coordinator")
    timeout_s: float = option(600.0, "deadline of a whole generation, in seconds", check=check_duration)
    patience_s: float = option(
        10.0, "longest search for a coordinator that is lost or shuts down, in seconds", check=check_amount
    )
    max_body_bytes: int = option(
        8 << 20, "largest request body, in bytes; prompts count once for each choice", check=at_least(1)
    )
    max_prompt_bytes: int = option(
        1 << 20, "most bytes of a prompt as text, or of its messages together", check=at_least(1)
    )
    idle_timeout_s: float = option(
        60.0, "longest time that a client may read nothing of a response, in seconds", check=check_duration
    )
    metrics_address: str = option(
        "",
        "HOST:PORT for Prometheus to scrape the front's own /metrics at; empty for none",
        check=check_address,
    )
    metrics_from: str = option(
        "",
        "HOST:PORT of the coordinator's --metrics-address, to serve its metrics at /metrics",
        metavar="HOST:PORT",
        check=check_address,
    )

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """Those of `cors_origin`, in lower case."""
        return comma_separated(self.cors_origin.lower())

    def __post_init__(self) -> None:
        super().__post_init__()
        # Bearer tokens travel over both connections.
        allowed = bool(self.tls_cert) or self.allow_plaintext
        check_plaintext("address", self.address, allowed=allowed, remedy=SERVER_TLS)
        allowed = self.server_tls is not None or self.allow_plaintext
        check_plaintext("server", self.server, allowed=allowed, remedy="give --tls or --tls-ca")
