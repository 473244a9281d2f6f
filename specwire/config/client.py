"""Configuration of whoever speaks to a coordinator: the command line's clients, and the HTTP front."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specwire.config.fields import (
    ALLOW_PLAINTEXT_HELP,
    TLS_CERT_HELP,
    TLS_KEY_HELP,
    check,
    check_amount,
    check_duration,
    check_file,
    check_log_level,
    check_pair,
    check_plaintext,
    split_address,
)
from specwire.config.flags import option, secret
from specwire.security.tls import TLS, read_token


@dataclass(frozen=True, kw_only=True)
class ConnectionConfig:
    """How a client of the coordinator reaches it."""

    server: str = option("127.0.0.1:7070", "HOST:PORT of the coordinator, or of several with commas between")
    tls: bool = option(False, "speak TLS; --tls-ca, --client-cert and --server-name say so too")
    tls_ca: str = option(
        "", "PEM authorities that vouch for the server; empty for public ones", metavar="FILE"
    )
    client_cert: str = option("", "PEM certificate shown to the server", metavar="FILE")
    client_key: str = option("", "PEM private key of --client-cert", metavar="FILE")
    server_name: str = option("", "name in the server's certificate; empty for its host")
    allow_plaintext: bool = option(False, ALLOW_PLAINTEXT_HELP)

    def __post_init__(self) -> None:
        for address in self.server.split(","):
            split_address("server", address.strip())
        for name in ("tls_ca", "client_cert", "client_key"):
            check_file(name, getattr(self, name))
        check_pair("client_cert", self.client_cert, "client_key", self.client_key)

    @property
    def server_tls(self) -> TLS | None:
        """How to speak TLS to the coordinator; None for plaintext."""
        named = (self.tls_ca, self.client_cert, self.server_name)
        tls = TLS(ca=self.tls_ca, cert=self.client_cert, key=self.client_key, server_name=self.server_name)
        return tls if self.tls or any(named) else None


@dataclass(frozen=True, kw_only=True)
class ClientConfig(ConnectionConfig):
    """Where `specwire generate` finds the coordinator."""

    timeout_s: float = option(120.0, "deadline of the whole generation, in seconds")
    token: str = secret("bearer token shown to the server")
    token_file: str = option("", "file with the bearer token, instead of SPECWIRE_TOKEN", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_file("token_file", self.token_file)
        either = not (self.token and self.token_file)
        check(either, "token_file", self.token_file, "and SPECWIRE_TOKEN are both given")
        check_duration("timeout_s", self.timeout_s)

    @property
    def credentials(self) -> dict[str, Any]:
        """What is shown to the server and expected of it: arguments of `Client`.

        Raises:
            ConfigError: the token file cannot be used.
        """
        token = read_token(self.token_file) if self.token_file else self.token
        return {"tls": self.server_tls, "token": token, "allow_plaintext": self.allow_plaintext}


@dataclass(frozen=True, kw_only=True)
class HttpConfig(ConnectionConfig):
    """`specwire http`: the OpenAI-compatible front of a coordinator."""

    address: str = option("127.0.0.1:8080", "HOST:PORT to listen on; port 0 picks a free one")
    tls_cert: str = option("", TLS_CERT_HELP, metavar="FILE")
    tls_key: str = option("", TLS_KEY_HELP, metavar="FILE")
    model_name: str = option("", "name that clients ask for; empty is the target's own")
    tokenizer: str = option("", "directory or hub id of the tokenizer; empty asks the coordinator")
    timeout_s: float = option(600.0, "deadline of a whole generation, in seconds")
    max_body_bytes: int = option(8 << 20, "largest body of a request, its prompts counted once a choice")
    max_prompt_bytes: int = option(1 << 20, "most bytes of a prompt as text, or of its messages together")
    idle_timeout_s: float = option(60.0, "longest that a client may read nothing of a response, in seconds")
    allowed_hosts: str = option(
        "", "host names to be reached by, with commas; * for any, as beyond this machine", metavar="NAME,..."
    )
    grace_s: float = option(10.0, "seconds that running requests get to finish at shutdown")
    log_level: str = option("warning", "least severe log records shown on standard error")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tls_cert", "tls_key"):
            check_file(name, getattr(self, name))
        check_pair("tls_cert", self.tls_cert, "tls_key", self.tls_key)
        # Tokens pass through on both sides.
        check_plaintext("address", self.address, allowed=bool(self.tls_cert) or self.allow_plaintext)
        for address in self.server.split(","):
            allowed = self.server_tls is not None or self.allow_plaintext
            check_plaintext("server", address.strip(), allowed=allowed)
        check_duration("timeout_s", self.timeout_s)
        check_duration("idle_timeout_s", self.idle_timeout_s)
        for name in ("max_body_bytes", "max_prompt_bytes"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        check_amount("grace_s", self.grace_s)
        check_log_level(self.log_level)
