"""What each end of a connection shows and trusts, read from PEM files and token files. Knows no grpc."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from typing import NamedTuple

from specwire.errors import ConfigError, InvalidRequestError
from specwire.security.reloading import ReloadingFile, read_file


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host, or received at this address, stays on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, kw_only=True)
class TLS:
    """How a client speaks TLS. The files are PEM, and read again when they change.

    Attributes:
        ca: certificates of the authorities that vouch for the server; empty for the public ones.
        cert: the client's own certificate with its chain, for a server that asks for one.
        key: the private key of `cert`, not encrypted.
        server_name: the name that the server's certificate must have; empty for the host of the address.

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
    """What a client shows and trusts now: PEM, and the token."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None
    token: str


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What opens the other end's door; without anything, connections are plaintext.

    Attributes:
        tls: how to speak TLS; None for plaintext.
        token: shown with every request.
        token_file: holds the token instead, and is read again when it changes.
        allow_plaintext: send the token without TLS beyond this machine.
    """

    tls: TLS | None = None
    token: str = field(default="", repr=False)
    token_file: str = ""
    allow_plaintext: bool = False

    @property
    def none(self) -> bool:
        """True when there is nothing to show and nothing to check."""
        return not (self.tls or self.token or self.token_file)

    def check(self, address: str) -> None:
        """Keep a token from whoever listens on the way to HOST:PORT.

        Raises:
            InvalidRequestError: it would travel in plaintext.
        """
        exposed = (self.token or self.token_file) and self.tls is None and not self.allow_plaintext
        if exposed and not is_loopback(address.rpartition(":")[0]):
            problem = f"is not sent to {address} in plaintext; use TLS, or allow plaintext explicitly"
            raise InvalidRequestError("token", "set", problem)

    def reloading(self) -> ReloadingFile[CredentialBundle]:
        """The contents of the files, read again when they change.

        Raises:
            ConfigError: a file that cannot be used.
        """
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
    """The token that is all of a file, space around it apart.

    Raises:
        ConfigError: naming the file.
    """
    token = read_file("token file", path).decode("ascii", "replace").strip()
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        raise ConfigError(f"token file {path}: does not hold one token")
    return token


def read_pair(cert_name: str, cert: str, key_name: str, key: str) -> tuple[bytes, bytes]:
    """A certificate with its chain, and its private key.

    Raises:
        ConfigError: unreadable, encrypted, or not of each other.
    """
    pair = read_file(cert_name, cert), read_file(key_name, key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError):
        problem = "are not a PEM certificate and its private key, unencrypted"
        raise ConfigError(f"{cert_name} {cert} and {key_name} {key}: {problem}") from None
    return pair


def _no_password() -> str:
    """Instead of a question on the terminal."""
    raise ValueError("encrypted")


def read_authorities(name: str, path: str) -> bytes:
    """Certificates of authorities.

    Raises:
        ConfigError: naming the file.
    """
    data = read_file(name, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError):
        raise ConfigError(f"{name} {path}: holds no PEM certificates") from None
    return data
