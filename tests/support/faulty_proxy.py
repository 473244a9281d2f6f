"""The delay proxy with faults of a network: stalls, resets, ends that come unasked or late, of one direction
or of both."""

from __future__ import annotations

import asyncio
import enum

from specwire.config.link import Link
from tools.proxy.delay_proxy import DelayProxy, Signal, _Connection, _End


class Direction(enum.IntEnum):
    """One way of a link: from the client to the service, or back."""

    THERE = 0
    BACK = 1


class FaultyProxy(DelayProxy):
    """Its methods are for the thread of the event loop that it was entered on."""

    @property
    def link(self) -> Link:
        """The settings. New ones apply to bytes that arrive from then on, their seed to new connections."""
        return self._link

    @link.setter
    def link(self, link: Link) -> None:
        self._link = link
        for direction in Direction:
            self.degrade(direction, link)

    def degrade(self, direction: Direction, link: Link) -> None:
        """Use this link's settings for one direction, with half of its round trip."""
        self._lanes[direction].change(link)

    @property
    def num_connections(self) -> int:
        """Connections with an open end."""
        return len(self._connections)

    @property
    def num_held_bytes(self) -> int:
        """Bytes in flight, in both directions of all connections."""
        return sum(line.num_held_bytes for each in self._connections for line in each.lines)

    def stall(self, *directions: Direction) -> None:
        """Hold all bytes, like a network partition; connections stay open.

        Args:
            directions: default both; likewise below.
        """
        for direction in directions or Direction:
            self._lanes[direction].is_stalled = True

    def resume(self, *directions: Direction) -> None:
        """End a stall: overdue bytes arrive now."""
        for direction in directions or Direction:
            self._lanes[direction].is_stalled = False
            for connection in list(self._connections):
                connection.lines[direction].deliver()

    def reset(self, *directions: Direction) -> None:
        """Reset the ends that these directions lead to. With one direction, the other end is not told, as
        when a router drops the state of a connection."""
        for connection in list(self._connections):
            for direction in directions or Direction:
                end = _ends(connection, direction)[1]
                end.outgoing.close()
                end.reset()

    def half_close(self, *directions: Direction) -> None:
        """Half-close these directions, after the bytes in flight."""
        for connection in list(self._connections):
            for direction in directions or Direction:
                connection.lines[direction].put(Signal.END)

    def close_slowly(self, direction: Direction, delay_s: float) -> None:
        """Close the ends that this direction comes from now, and the other ends after the delay; what those
        send until then is lost."""
        for connection in list(self._connections):
            end = _ends(connection, direction)[0]
            end.incoming.close()
            end._has_read_all = True  # or its end would be passed on at once, as a reset
            if end._transport is not None:
                end._transport.close()
            asyncio.get_running_loop().call_later(delay_s, end.outgoing.put, Signal.END)


def _ends(connection: _Connection, direction: Direction) -> tuple[_End, _End]:
    """Where a direction comes from, and where it leads to."""
    ends = connection.client, connection.service
    return ends if direction is Direction.THERE else ends[::-1]
