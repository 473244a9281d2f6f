"""Certificates for tests: an authority, and what it vouches for, as files."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import trustme


class Pair(NamedTuple):
    """Paths of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """An authority that puts what it makes into a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._ca = trustme.CA()
        self.path = str(directory / "ca.pem")
        self._ca.cert_pem.write_to_path(self.path)

    def pair(self, name: str, host: str = "127.0.0.1", *, expired: bool = False) -> Pair:
        """A certificate for a host, valid now or until yesterday."""
        until = datetime.now(UTC) - timedelta(days=1) if expired else None
        made = self._ca.issue_cert(host, not_after=until)
        pair = Pair(str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key"))
        self._replace(pair.cert, b"".join(blob.bytes() for blob in made.cert_chain_pems))
        self._replace(pair.key, made.private_key_pem.bytes())
        return pair

    def _replace(self, path: str, data: bytes) -> None:
        """As files should be replaced: the old one or the new one is there, never a part of one."""
        written = Path(path + ".new")
        written.write_bytes(data)
        written.rename(path)
