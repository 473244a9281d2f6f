"""Credentials and trust of both ends of a connection, from PEM files and token files. Knows no grpc."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from typing import NamedTuple

from specwire.config.security.reloading import ReloadingFile, read_file
from specwire.errors import ConfigError, InvalidRequestError


def is_loopback(host: str) -> bool:
    """Whether traffic to this host or address stays on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, kw_only=True)
class TLS:
    """TLS settings of a client. The files are PEM, and reloaded when they change.

    Attributes:
        ca: certificates of the authorities that the server is verified against; empty for the public ones.
        cert: the client's own certificate with its chain, for a server that requires one.
        key: the private key of `cert`, not encrypted.
        server_name: expected in the server's certificate; empty for the host of the address.

    Raises:
        ConfigError: on construction, when only one of `cert` and `key` is given.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise ConfigError("tls: cert and key are of use together only")


class CredentialBundle(NamedTuple):
    """A client's current credentials and trust: PEM data, and the token."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None
    token: str


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Credentials of a client, and how it verifies the server; the default is plaintext without a token.

    Attributes:
        tls: None for plaintext.
        token: bearer token, sent with every request.
        token_file: file with the token instead, reloaded when it changes.
        allow_plaintext: send the token without TLS beyond this machine.
    """

    tls: TLS | None = None
    token: str = field(default="", repr=False)
    token_file: str = ""
    allow_plaintext: bool = False

    @property
    def none(self) -> bool:
        """Whether there are neither credentials nor TLS."""
        return not (self.tls or self.token or self.token_file)

    def check(self, address: str) -> None:
        """Refuse a token that no header can carry, and to send one to `address` in plaintext beyond this
        machine: InvalidRequestError."""
        if not (self.token.isascii() and self.token.isprintable()):
            raise InvalidRequestError("token", "(not shown)", "is not printable ASCII text")
        exposed = (self.token or self.token_file) and self.tls is None and not self.allow_plaintext
        if exposed and not is_loopback(address.removeprefix("dns:///").rpartition(":")[0]):
            problem = f"is not sent to {address} in plaintext; use TLS, or allow plaintext explicitly"
            raise InvalidRequestError("token", "set", problem)

    def reloading(self) -> ReloadingFile[CredentialBundle]:
        """The contents of the files, read again when they change; raises ConfigError."""
        tls = self.tls or TLS()
        paths = [path for path in (tls.ca, tls.cert, tls.key, self.token_file) if path]
        return ReloadingFile(paths, self._read)

    def _read(self) -> CredentialBundle:
        tls = self.tls or TLS()
        ca = read_authorities("ca", tls.ca) if tls.ca else None
        cert, key = read_pair("cert", tls.cert, "key", tls.key) if tls.cert else (None, None)
        return CredentialBundle(ca, cert, key, read_token(self.token_file) if self.token_file else self.token)


PLAINTEXT = Credentials()


def read_token(path: str) -> str:
    """The token in a file, or ConfigError, which names that; white space around it is ignored."""
    token = read_file("token file", path).decode("ascii", "replace").strip()
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        raise ConfigError(f"token file {path}: does not hold one token")
    return token


def read_pair(cert_name: str, cert: str, key_name: str, key: str) -> tuple[bytes, bytes]:
    """A certificate with its chain, and its private key. Raises ConfigError if they cannot be read, are
    encrypted, or do not match."""
    pair = read_file(cert_name, cert), read_file(key_name, key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError):
        problem = "are not a PEM certificate and its private key, unencrypted"
        raise ConfigError(f"{cert_name} {cert} and {key_name} {key}: {problem}") from None
    return pair


def _no_password() -> str:
    """Called instead of a prompt on the terminal."""
    raise ValueError("encrypted")


def read_authorities(name: str, path: str) -> bytes:
    """Certificates of authorities, or ConfigError, which names the file."""
    data = read_file(name, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError):
        raise ConfigError(f"{name} {path}: holds no PEM certificates") from None
    return data
