"""Checks of config fields, and what several configs share.

Every function here raises ConfigError, naming the flag and its value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path
from typing import Any

from specwire.config.flags import Check, CheckedConfig, did_you_mean, flag_name, option
from specwire.config.security.tls import is_loopback
from specwire.errors import ConfigError
from specwire.text.tokenizer import read_chat_template

AUTO = "auto"
DNS = "dns:///"
LONGEST = 1e9
"""Of times, in any unit: a deadline after the year 2262 is a past one for gRPC."""


def check(ok: bool, name: str, value: object, problem: str) -> None:
    """Raise unless `ok`."""
    if not ok:
        raise ConfigError(f"{flag_name(name)} {value}: {problem}")


def one_of(*choices: str) -> Check:
    """Check for one of a few words."""
    known = ", ".join(choices)
    return lambda name, value: check(
        value in choices, name, value, f"is not one of {known}{did_you_mean(value, choices)}"
    )


def at_least(least: int) -> Check:
    return lambda name, value: check(value >= least, name, value, f"must be at least {least}")


def between(least: int, most: int) -> Check:
    return lambda name, value: check(least <= value <= most, name, value, f"must lie in [{least}, {most}]")


def count_or_auto(limit: int) -> Check:
    """Check for a number in [0, limit] or `auto`."""
    return lambda name, value: parse_count(name, value, limit)


def parse_count(name: str, value: str, limit: int) -> int | None:
    """A number in [0, limit]; None for `auto`."""
    if value == AUTO:
        return None
    check(re.fullmatch(r"-?[0-9]{1,9}", value) is not None, name, value, f"is neither a number nor {AUTO}")
    check(0 <= int(value) <= limit, name, value, f"must lie in [0, {limit}]")
    return int(value)


def check_duration(name: str, value: float) -> None:
    """A finite time over 0."""
    check(0 < value <= LONGEST, name, value, f"must be a number over 0, at most {LONGEST:g}")


def check_amount(name: str, value: float) -> None:
    """A finite amount, 0 included."""
    check(0 <= value <= LONGEST, name, value, f"must be a number in [0, {LONGEST:g}]")


def check_file(name: str, path: str) -> None:
    """An existing file, or none."""
    check(not path or Path(path).is_file(), name, path, "no such file")


def split_address(name: str, address: str) -> tuple[str, int]:
    """`HOST:PORT` to its parts; an IPv6 host is in brackets."""
    host, _, port = address.rpartition(":")
    ok = bool(host) and re.fullmatch("[0-9]{1,5}", port) is not None and int(port) < 65536
    check(ok, name, address, "is not HOST:PORT")
    are_labels = all(0 < len(label) < 64 for label in host.removesuffix(".").split("."))
    check(are_labels, name, address, "has a name with an empty label, or with one of over 63 characters")
    return host, int(port)


def check_host(name: str, host: str) -> None:
    """A host name, or an IP address without brackets."""
    try:
        ok = bool(re.fullmatch(r"[\w.-]+", host)) or bool(IPv6Address(host))
    except AddressValueError:
        ok = False
    check(ok, name, host, "is neither a host name nor an IP address; a port is given by --port")


def next_address(name: str, address: str, n: int) -> str:
    """`HOST:PORT`, n ports on; empty stays empty, and port 0, which lets the system choose, stays 0."""
    if not address:
        return ""
    host, port = split_address(name, address)
    return f"{host}:{port and port + n}"


def check_address(name: str, address: str) -> None:
    """`HOST:PORT`, or empty."""
    if address:
        split_address(name, address)


SERVER_TLS = "give --tls-cert and --tls-key"
FRONT_TLS = "start `specwire http` by itself, with --tls-cert"


def check_plaintext(name: str, addresses: str, *, allowed: bool, remedy: str) -> None:
    """Refuse plaintext beyond this machine, where it can be read and forged, unless it is allowed; the error
    names the remedy, which gives it TLS. Addresses as of `split_addresses`."""
    problem = f"would be plaintext beyond this machine; {remedy}, or --allow-plaintext"
    for address in split_addresses(name, addresses):
        host, _ = split_address(name, address.removeprefix(DNS))
        check(allowed or is_loopback(host), name, address, problem)


def split_addresses(name: str, addresses: str) -> tuple[str, ...]:
    """`HOST:PORT` or `dns:///NAME:PORT`, or several separated by commas, to the entries."""
    entries = tuple(entry.strip() for entry in addresses.split(","))
    for entry in entries:
        host, _ = split_address(name, entry.removeprefix(DNS))
        check("/" not in host, name, entry, f"is neither HOST:PORT nor {DNS}NAME:PORT")
        check(entries.count(entry) == 1, name, entry, "is named twice")
    return entries


def comma_separated(text: str) -> tuple[str, ...]:
    """The entries of a list, without empty ones."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def check_origins(name: str, origins: str) -> None:
    """Origins as a browser writes them (`https://HOST[:PORT]`), or `*`, separated by commas."""
    for origin in comma_separated(origins):
        ok = origin == "*" or re.fullmatch(r"https?://[^/\s?#@]+", origin, re.IGNORECASE) is not None
        check(ok, name, origin, "is not http://HOST[:PORT] or https://HOST[:PORT], without a path, or *")


def file_option(doc: str, *needs: str) -> Any:
    """A config field that names a file; empty for none."""
    return option("", doc, metavar="FILE", check=check_file, needs=needs)


def check_chat_template(name: str, path: str) -> None:
    """A file with a chat template, or none."""
    check_file(name, path)
    if not path:
        return
    try:
        read_chat_template(path)
    except ConfigError as error:
        raise ConfigError(f"{flag_name(name)} {error}") from None


@dataclass(frozen=True, kw_only=True)
class PlaintextConfig(CheckedConfig):
    """Whether a connection may do without TLS where others could read it."""

    allow_plaintext: bool = option(
        False, "allow plaintext beyond this machine, on a network that is secured otherwise"
    )


@dataclass(frozen=True, kw_only=True)
class CertificateConfig(PlaintextConfig):
    """The certificate of a server."""

    tls_cert: str = file_option(
        "PEM certificate of the server, with its chain; empty serves plaintext", "tls_key"
    )
    tls_key: str = file_option("PEM private key of the certificate, not encrypted", "tls_cert")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(CheckedConfig):
    """What everything has that serves."""

    grace_s: float = option(
        10.0, "seconds that running requests get to finish at shutdown", check=check_amount
    )
    log_level: str = option(
        "notice",
        "least severe log records written to standard error; notice says what starts",
        check=one_of("debug", "info", "notice", "warning", "error"),
    )
    log_format: str = option(
        "text", "form of the log records: text, or json, one object a line", check=one_of("text", "json")
    )
