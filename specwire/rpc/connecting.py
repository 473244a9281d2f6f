"""Why a connection is not made, by what gRPC says of it, and the setting that makes it."""

from __future__ import annotations

import re
from typing import NamedTuple


class SettingNames(NamedTuple):
    """What the settings of one end of a connection are called there.

    Attributes:
        ca: the authorities that the server is verified against; TLS is used with them.
        cert: this end's own certificate.
        server_name: name in the server's certificate.
    """

    ca: str
    cert: str
    server_name: str


PEER = SettingNames("--peer-ca", "--peer-cert", "--peer-server-name")
CLIENT = SettingNames(
    "--tls-ca or TLS(ca=...)", "--client-cert or TLS(cert=...)", "--server-name or TLS(server_name=...)"
)

_FAILED = "failed to connect"
_NOT_VERIFIED = re.compile("CERTIFICATE_VERIFY_FAILED: ([^:]+)")


def explain(text: str, server: str, settings: SettingNames) -> str:
    """What a failed call says, in terms of the end that made it; empty if its connection was made.

    Args:
        text: of gRPC's status.
        server: its address, or "this address".
    """
    if _FAILED not in text:
        return ""
    if "handshake failed" in text or "Verification" in text:
        return _tls_problem(text, server, settings)
    if text.endswith("Socket closed"):
        expected = f"it may expect TLS ({settings.ca}), or a certificate of this end ({settings.cert})"
        return f"{server} closes the connection; {expected}"
    if "http1.x" in text:
        return f"{server} speaks HTTP/1.1, and not gRPC"
    if "ping timeout" in text:
        return f"nothing serves at {server} (it accepts connections, and does not answer)"
    return f"nothing serves at {server} ({_last(text)})"


def _tls_problem(text: str, server: str, settings: SettingNames) -> str:
    if found := _NOT_VERIFIED.search(text):
        vouches = f"{settings.ca} names the authorities that it is verified against"
        return f"the certificate of {server} is not accepted ({found[1]}); {vouches}"
    if "Hostname Verification" in text:
        return f"the certificate of {server} is for other hosts; {settings.server_name} names one of them"
    if "WRONG_VERSION_NUMBER" in text:
        return f"{server} speaks plaintext, and this end TLS ({settings.ca})"
    return f"no TLS connection to {server} ({_last(text)})"


def _last(text: str) -> str:
    return text.removesuffix(": OK").rpartition(": ")[2]
