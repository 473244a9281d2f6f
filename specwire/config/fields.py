"""What the values of flags may be, and the words that several configs have for one flag.

Every function here raises ConfigError, naming the flag and its value.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from specwire.config.flags import flag_name
from specwire.errors import ConfigError
from specwire.security.tls import is_loopback

AUTO = "auto"
DNS = "dns:///"
TLS_CERT_HELP = "PEM certificate, with its chain, that clients are shown; empty serves plaintext"
TLS_KEY_HELP = "PEM private key of the certificate, not encrypted"
ALLOW_PLAINTEXT_HELP = "go without TLS beyond this machine, where the network itself is locked"
_LOG_LEVELS = ("debug", "info", "warning", "error")


def check(ok: bool, name: str, value: object, problem: str) -> None:
    """Whether it is as it must be; `problem` says how else."""
    if not ok:
        raise ConfigError(f"{flag_name(name)} {value}: {problem}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    check(value in choices, name, value, f"is not one of {', '.join(choices)}")


def check_log_level(value: str) -> None:
    """A level of `--log-level`."""
    check_choice("log_level", value, _LOG_LEVELS)


def parse_count(name: str, value: str, limit: int) -> int | None:
    """A number up to a limit; None for `auto`."""
    if value == AUTO:
        return None
    check(re.fullmatch(r"-?[0-9]+", value) is not None, name, value, f"is neither a number nor {AUTO}")
    check(0 <= int(value) <= limit, name, value, f"must lie in [0, {limit}]")
    return int(value)


def check_duration(name: str, value: float) -> None:
    """A time that something may take."""
    check(0 < value < math.inf, name, value, "must be a finite number over 0")


def check_amount(name: str, value: float) -> None:
    """An amount, which may be nothing."""
    check(0 <= value < math.inf, name, value, "must be a finite number, at least 0")


def check_file(name: str, path: str) -> None:
    """A file, if one is named."""
    check(not path or Path(path).is_file(), name, path, "no such file")


def check_pair(name: str, path: str, other_name: str, other_path: str) -> None:
    """Two files that are of use together: both are named, or none is."""
    problem = f"is of use together with {flag_name(other_name)} only"
    check(bool(path) == bool(other_path), name, path, problem)


def split_address(name: str, address: str) -> tuple[str, int]:
    """`HOST:PORT` to its parts; `[::1]:7070` works too."""
    host, _, port = address.rpartition(":")
    ok = bool(host) and port.isascii() and port.isdecimal() and int(port) < 65536
    check(ok, name, address, "is not HOST:PORT")
    return host, int(port)


def check_plaintext(name: str, address: str, *, allowed: bool) -> None:
    """Whoever is on the way reads plaintext, and can be whoever he wants to be."""
    host, _ = split_address(name, address)
    problem = "would be plaintext beyond this machine; give TLS files, or --allow-plaintext"
    check(allowed or is_loopback(host), name, address, problem)


def split_addresses(name: str, addresses: str) -> tuple[str, ...]:
    """`HOST:PORT` or `dns:///NAME:PORT`, one or several with commas, to its entries."""
    entries = tuple(entry.strip() for entry in addresses.split(","))
    for entry in entries:
        host, _ = split_address(name, entry.removeprefix(DNS))
        check("/" not in host, name, entry, f"is neither HOST:PORT nor {DNS}NAME:PORT")
        check(entries.count(entry) == 1, name, entry, "is named twice")
    return entries
