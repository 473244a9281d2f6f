"""Machines of a network: namespaces whose addresses are on one bridge. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest


class Machines:
    """Namespaces by address; `prefix(address)` starts a command there.

    Faults last as long as their context. Each of them is the network's: no process is told.
    """

    def __init__(self, stack: contextlib.ExitStack, addresses: Sequence[str]) -> None:
        self._name = f"specwire{os.getpid()}-"
        self._hub = self._made(stack, "hub")
        self._ports = {address: f"port{number}" for number, address in enumerate(addresses)}
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for address, port in self._ports.items():
            inside = self._made(stack, address)
            _ip("-n", self._hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", inside)
            _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
            _ip("-n", inside, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", inside, "link", "set", device, "up")
            # Packets as on a wire: larger ones, for a card to cut, would pass whatever the MTU is.
            _ip("-n", inside, "link", "set", "eth0", "gso_max_segs", "1")

    def prefix(self, address: str) -> list[str]:
        """What starts a command on the machine with this address."""
        return ["ip", "netns", "exec", self._name + address]

    def pids(self, address: str) -> list[int]:
        """Of all processes on the machine."""
        listed = ["ip", "netns", "pids", self._name + address]
        found = subprocess.run(listed, check=True, capture_output=True, text=True, timeout=10).stdout
        return [int(pid) for pid in found.split()]

    def call(self, names: Mapping[str, str]) -> None:
        """Write what each name stands for into every machine's hosts file, also of processes that run."""
        text = "".join(f"{address} {name}\n" for name, address in names.items())
        for machine in self._ports:
            self._hosts(machine).write_text(f"127.0.0.1 localhost\n{text}")

    def move(self, machine: str, old: str, new: str) -> None:
        """Give a machine another address; the old one is gone, with what is connected to it."""
        for verb, address in (("delete", old), ("add", new)):
            _ip("-n", self._name + machine, "address", verb, f"{address}/24", "dev", "eth0")

    @contextlib.contextmanager
    def cut(self, machine: str) -> Iterator[None]:
        """Its cable is out."""
        port = ("-n", self._hub, "link", "set", self._ports[machine])
        _ip(*port, "down")
        try:
            yield
        finally:
            _ip(*port, "up")

    @contextlib.contextmanager
    def deaf(self, machine: str, towards: str) -> Iterator[None]:
        """What another machine sends is dropped without a word; the other way is open."""
        chain = f"chain in {{\ntype filter hook input priority 0\nip saddr {towards} drop\n}}"
        nft = [*self.prefix(machine), "nft"]
        _run([*nft, "-f", "-"], given=f"table ip deaf {{\n{chain}\n}}\n")
        try:
            yield
        finally:
            _run([*nft, "delete", "table", "ip", "deaf"])

    @contextlib.contextmanager
    def narrowed(self, machine: str, rate: str, *, to: bool = True, of: bool = True) -> Iterator[None]:
        """What goes to a machine, and what it sends, share so much; packets wait for 300 ms at most."""
        ends = [(self._hub, self._ports[machine])] * to + [(self._name + machine, "eth0")] * of
        bucket = ("tbf", "rate", rate, "burst", "4kb", "latency", "300ms")
        for namespace, device in ends:
            _run(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket])
        try:
            yield
        finally:
            for namespace, device in ends:
                _run(["tc", "-n", namespace, "qdisc", "delete", "dev", device, "root"])

    @contextlib.contextmanager
    def small_packets(self, machine: str, mtu: int) -> Iterator[None]:
        """Neither end of its cable takes larger packets, which are dropped without a word."""
        ends = ((self._hub, self._ports[machine]), (self._name + machine, "eth0"))

        def sized(size: int) -> None:
            for namespace, device in ends:
                _ip("-n", namespace, "link", "set", device, "mtu", str(size))

        sized(mtu)
        try:
            yield
        finally:
            sized(1500)

    def _made(self, stack: contextlib.ExitStack, name: str) -> str:
        self._hosts(name).parent.mkdir(parents=True)
        stack.callback(shutil.rmtree, self._hosts(name).parent)
        self._hosts(name).write_text("127.0.0.1 localhost\n")
        name = self._name + name
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "delete", name)
        return name

    def _hosts(self, name: str) -> Path:
        """`ip netns exec` mounts it over /etc/hosts."""
        return Path("/etc/netns", self._name + name, "hosts")


@contextlib.contextmanager
def machines(addresses: Sequence[str]) -> Iterator[Machines]:
    """Such a network while the body runs; skips the test where namespaces are not permitted."""
    if shutil.which("ip") is None:
        pytest.skip("ip (iproute2) is not installed")
    with contextlib.ExitStack() as stack:
        try:
            made = Machines(stack, addresses)
        except (subprocess.CalledProcessError, PermissionError) as error:
            pytest.skip(
                f"network namespaces are not permitted here: {getattr(error, 'stderr', error)}".strip()
            )
        yield made


def _ip(*argv: str) -> None:
    _run(["ip", *argv])


def _run(argv: Sequence[str], given: str | None = None) -> None:
    subprocess.run(argv, input=given, check=True, capture_output=True, text=True, timeout=10)
