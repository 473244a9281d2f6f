"""Machines of a network: namespaces whose addresses are on one bridge. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import pytest


class Machines:
    """Namespaces by address; `prefix(address)` starts a command there."""

    def __init__(self, stack: contextlib.ExitStack, addresses: Sequence[str]) -> None:
        self._name = f"specwire{os.getpid()}-"
        hub = self._made(stack, "hub")
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for number, address in enumerate(addresses):
            inside, port = self._made(stack, address), f"port{number}"
            _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", inside)
            _ip("-n", hub, "link", "set", port, "master", "bridge", "up")
            _ip("-n", inside, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", inside, "link", "set", device, "up")

    def prefix(self, address: str) -> list[str]:
        """What starts a command on the machine with this address."""
        return ["ip", "netns", "exec", self._name + address]

    def _made(self, stack: contextlib.ExitStack, name: str) -> str:
        name = self._name + name
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "delete", name)
        return name


@contextlib.contextmanager
def machines(addresses: Sequence[str]) -> Iterator[Machines]:
    """Such a network while the body runs; skips the test where namespaces are not permitted."""
    if shutil.which("ip") is None:
        pytest.skip("ip (iproute2) is not installed")
    with contextlib.ExitStack() as stack:
        try:
            made = Machines(stack, addresses)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield made


def _ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, capture_output=True, text=True, timeout=10)
