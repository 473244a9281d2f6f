"""The driver and all ranks of a group in lock step: the driver speaks, all hear it, rank 0 answers."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_DRIVER, _FIRST = 0, 1
_FRAME_BYTES = 16384
_HEADER_BYTES = 8
_FOR_EVER = timedelta(days=3650)


# What torch does not declare, though it documents it.
_dist: Any = dist


def open_store(host: str) -> Any:
    """A store of this process, in which others meet; it has the attributes `host` and `port`.

    It has no lock, so it listens at this address alone; left to itself it would at all of the machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    return _dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def reach_store(host: str, port: int, timeout_s: float) -> Any:
    """The store of another process."""
    return _dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def part_of(store: Any, name: str) -> Any:
    """A store within a store."""
    return _dist.PrefixStore(name, store)


class ControlGroup:
    """A gloo group of its own, whatever the model's collectives run on; rank r of the model is r + 1 here.

    A message travels as one frame of fixed size, and a second one when it is longer. Every call raises
    RuntimeError when a member died, or when it takes too long.

    Args:
        store: where the members find each other.
        member: 0 for the driver, r + 1 for rank r.
        num_ranks: of the model.
        host: this machine's address, as the others reach it.
        timeout_s: longest wait for the others to join.
        answer_timeout_s: longest wait for an answer; None for as long.
    """

    def __init__(
        self,
        store: Any,
        member: int,
        num_ranks: int,
        *,
        host: str,
        timeout_s: float,
        answer_timeout_s: float | None = None,
    ) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = self._timeout
        self._group: Any = _dist.ProcessGroupGloo(store, member, num_ranks + 1, options)
        self._answer_timeout = timedelta(seconds=answer_timeout_s or timeout_s)
        self._frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)

    def say(self, message: bytes) -> None:
        """The driver to all ranks; returns as soon as it is on its way."""
        for part in self._parts(message):
            self._group.broadcast(part, _DRIVER, self._timeout).wait()

    def hear(self) -> bytes:
        """What the driver says next; waits for ever, since a driver may be idle."""
        self._group.broadcast(self._frame, _DRIVER, _FOR_EVER).wait(_FOR_EVER)
        rest = self._rest()
        if rest is not None:
            self._group.broadcast(rest, _DRIVER, self._timeout).wait()
        return self._joined(rest)

    def answer(self, message: bytes) -> None:
        """Rank 0 to the driver."""
        for part in self._parts(message):
            self._group.send([part], _DRIVER, 0).wait()

    def await_answer(self) -> bytes:
        """What rank 0 answers."""
        self._group.recv([self._frame], _FIRST, 0).wait(self._answer_timeout)
        rest = self._rest()
        if rest is not None:
            self._group.recv([rest], _FIRST, 0).wait(self._answer_timeout)
        return self._joined(rest)

    def abort(self) -> None:
        """Break every wait, now and later; from any thread."""
        self._group.abort()

    def _parts(self, message: bytes) -> list[Tensor]:
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        first = min(len(data), _FRAME_BYTES - _HEADER_BYTES)
        self._frame[:_HEADER_BYTES].view(torch.int64).fill_(len(data))
        self._frame[_HEADER_BYTES : _HEADER_BYTES + first] = data[:first]
        return [self._frame] if first == len(data) else [self._frame, data[first:]]

    def _rest(self) -> Tensor | None:
        """Room for what did not fit into the frame."""
        num_bytes = int(self._frame[:_HEADER_BYTES].view(torch.int64)) - (_FRAME_BYTES - _HEADER_BYTES)
        return torch.empty(num_bytes, dtype=torch.uint8) if num_bytes > 0 else None

    def _joined(self, rest: Tensor | None) -> bytes:
        num_bytes = int(self._frame[:_HEADER_BYTES].view(torch.int64))
        first: bytes = self._frame[_HEADER_BYTES : _HEADER_BYTES + num_bytes].numpy().tobytes()
        return first if rest is None else first + rest.numpy().tobytes()
