"""Bearer tokens: authentication of callers, and their limits. Knows no grpc.

A tokens file has a JSON object on each line; empty lines and lines that begin with # are skipped:

    {"name": "alice", "sha256": "5e88...", "max_running": 4, "max_waiting": 16, "expires": "2027-01-31"}

Only hashes are stored. A token is 32 random bytes, so a slow hash would add nothing to SHA-256. Several lines
may have the same name, to replace a token: they are one principal.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from specwire.config.pairs import without_repeats
from specwire.config.security.reloading import ReloadingFile, read_file
from specwire.core import SamplingParams
from specwire.errors import ConfigError, InvalidRequestError, UnauthenticatedError

_PREFIX = "sw_"
_NUM_RANDOM_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_WAITING_FOR_EACH_RUNNING = 16
_LIMITS = ("max_running", "max_waiting", "max_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Principal:
    """An authenticated client; where no token is required, a client by its address.

    Attributes:
        name: generations of one name share the limits.
        max_running: most running generations; more wait. None for no limit of its own.
        max_waiting: most waiting generations; more are refused, with the time of a retry.
        max_tokens: largest `max_tokens` of a generation.
        expires: when the token expires.
    """

    name: str
    max_running: int | None = None
    max_waiting: int | None = None
    max_tokens: int | None = None
    expires: datetime | None = None

    def capacity(self, most: tuple[int, int]) -> int:
        """How many streams it may have open.

        With a limit on running generations alone, 16 may wait for each that runs.

        Args:
            most: running and waiting generations of all principals.
        """
        most_running, most_waiting = most
        running = most_running if self.max_running is None else min(self.max_running, most_running)
        waiting = self.max_waiting
        if waiting is None:
            waiting = most_waiting if self.max_running is None else running * _WAITING_FOR_EACH_RUNNING
        return running + min(waiting, most_waiting)

    def check(self, params: SamplingParams) -> None:
        """Check a request against its limits; raises InvalidRequestError."""
        most = self.max_tokens
        if most is not None and params.max_tokens is not None and params.max_tokens > most:
            problem = f"is over the {most} that the bearer token allows"
            raise InvalidRequestError("max_tokens", params.max_tokens, problem)


class Tokens:
    """The tokens of a file, which is reloaded when it changes."""

    def __init__(self, path: str) -> None:
        """Read the file; ConfigError names file and line."""
        self._file = ReloadingFile([path], lambda: _read(path))

    def check(self, token: str) -> Principal:
        """The principal of a token, which is compared with all in constant time; it is empty where none was
        sent. UnauthenticatedError if it is empty, unknown, or expired."""
        if not token:
            raise UnauthenticatedError("a bearer token is required")
        self._file.refresh()
        digest = _digest(token)
        found = None
        for known, principal in self._file.value:
            if hmac.compare_digest(known, digest):
                found = principal
        if found is None:
            raise UnauthenticatedError("the bearer token is not known")
        if found.expires is not None and found.expires <= datetime.now(UTC):
            raise UnauthenticatedError(f"the bearer token expired at {found.expires.isoformat()}")
        return found


def bearer_token(header: str) -> str:
    """The token in the value of an `authorization` header; empty for another scheme."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def make_token(name: str, **limits: Any) -> tuple[str, str]:
    """A new token, and its line for a tokens file. Raises ConfigError of an invalid name or limit.

    Args:
        limits: `max_running`, `max_waiting`, `max_tokens`, `expires`; None for none.
    """
    token = _PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)
    return token, token_line(name, token, **limits)


def token_line(name: str, token: str, **limits: Any) -> str:
    """The line of a token for a tokens file. Arguments and errors as for `make_token`."""
    given = {key: value for key, value in limits.items() if value is not None}
    line = {"name": name, "sha256": _digest(token).hex(), **given}
    _parse(line)
    return json.dumps(line)


def add_line(path: str, line: str) -> None:
    """Append a line to a tokens file, or raise ConfigError; a new file is readable by its owner only."""
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b", 0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            is_whole = file.read() in (b"", b"\n")  # an editor may have left the last line open
            added = f"{'' if is_whole else chr(10)}{line}\n".encode()
            if file.write(added) < len(added):  # a full disk; services refuse a file that ends within a line
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise ConfigError(f"--tokens {path}: cannot be written ({error.strerror})") from None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _read(path: str) -> list[tuple[bytes, Principal]]:
    try:
        lines = read_file("tokens file", path).decode().splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"tokens file {path}: is not text") from None
    known = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            try:
                known.append(_parse(json.loads(line, object_pairs_hook=without_repeats)))
            except ConfigError as error:
                raise ConfigError(f"tokens file {path}, line {number}: {error}") from None
            except (ValueError, RecursionError):  # the former of a number of thousands of digits, too
                raise ConfigError(f"tokens file {path}, line {number}: is not JSON") from None
    return known


def _parse(line: Any) -> tuple[bytes, Principal]:
    """The hash and principal of a line. Errors never repeat a hash, or a token in its place."""
    if not isinstance(line, dict):
        raise ConfigError("is not a JSON object")
    unknown = set(line) - {"name", "sha256", "expires", *_LIMITS}
    if unknown:
        raise ConfigError(f"does not know {', '.join(sorted(unknown))}")
    name, digest = line.get("name"), line.get("sha256")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError("name must be 1 to 64 letters, digits or ._@-")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ConfigError("sha256 must be 64 hexadecimal digits; make a line with `specwire token`")
    limits = {key: _limit(key, line[key]) for key in _LIMITS if key in line}
    return bytes.fromhex(digest), Principal(name=name, expires=_expiry(line.get("expires")), **limits)


def _limit(key: str, value: object) -> int:
    least = 0 if key == "max_waiting" else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key} must be a whole number, at least {least}")
    return value


def _expiry(text: object) -> datetime | None:
    """A date stands for its first moment; a time without an offset is UTC."""
    if text is None:
        return None
    try:
        parsed = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        parsed = None
    if parsed is None:
        raise ConfigError("expires must be a date or time, as 2027-01-31 or 2027-01-31T18:00Z")
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
