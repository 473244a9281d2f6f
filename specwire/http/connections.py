"""Limits on client connections, which uvicorn serves.

Bounded are the number of connections, the wait for a request, and the wait for a client that does not read
its response. And a client that half-closes its connection, or sends more behind its request, still gets its
response.

A client that sends a request over a connection while this end closes it cannot know whether the request was
served. So clients close them: this end waits for longer than they keep one, and before it shuts down it asks
them to, by `Connection: close` in every response.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specwire.rpc import descriptors

log = logging.getLogger(__name__)

_REQUEST_S = 10.0
"""Longest wait for a request, and for the rest of one that is answered before its end."""
KEEP_ALIVE_S = 75.0
"""Longest wait for a further request. Clients and balancers wait for 60 s or less by default (httpx: 5)."""
_CLOSING_S = 6.0
"""Longest wait, before a shutdown, for clients to close idle connections: httpx does so after 5 s."""
_POLL_S = 0.05
_MAX_CONNECTIONS = 4096
"""Over three times the default capacity of a coordinator (256 running, 1,024 waiting generations)."""
_MAX_ACCEPTED = 32
"""Accepted in one turn of the event loop."""
_QUIET_S = 10.0
"""Between two log records about the same condition."""
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\n"
_FIRST_PROBE_S, _LONGEST_PROBE_S = 0.05, 5.0


class ListeningSocket(socket.socket):
    """Accepts connections while descriptors are left, and closes further ones at once.

    asyncio logs a traceback for each connection that it cannot accept, hundreds at a time.
    """

    greeted: Connections | None = None
    """Told of what is accepted, where TLS precedes a connection."""
    _num_accepted = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """See `socket.socket.accept`; every 32nd time it reports none, to let other tasks run."""
        while True:
            self._num_accepted += 1
            if self._num_accepted % _MAX_ACCEPTED == 0:
                raise BlockingIOError
            connection, address = super().accept()
            if connection.fileno() < descriptors.max_accepted():
                if self.greeted is not None:
                    self.greeted.accepted(connection)
                return connection, address
            connection.close()


class Connections:
    """The open connections. Over the limit, those without a request are closed first.

    Attributes:
        idle_timeout_s: how long a client may read nothing of a response.
        is_closing: whether responses are to ask clients to close their connections.
    """

    def __init__(self, idle_timeout_s: float) -> None:
        self.is_closing = False
        self.idle_timeout_s = idle_timeout_s
        self._limit = min(_MAX_CONNECTIONS, descriptors.max_connections() - descriptors.num_open())
        self._idle: dict[Connection, None] = {}  # in the order in which they became idle
        self._greeting: dict[int, socket.socket] = {}  # by descriptor, in the order of arrival
        self._num_open = 0
        self._warned_s = -_QUIET_S

    async def closed_by_clients(self) -> None:
        """Ask clients to close their connections, and wait until all without a request are closed, or for as
        long as clients may keep one. New connections are served meanwhile."""
        self.is_closing = True
        ends_s = time.monotonic() + _CLOSING_S
        while self._idle and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def accepted(self, accepted: socket.socket) -> None:
        """Bound the wait for a TLS handshake, during which uvicorn knows of no connection, and how many are
        waited for: the oldest end first."""
        number = accepted.fileno()
        self._greeting.pop(number, None)  # of one that has ended
        self._greeting[number] = accepted
        asyncio.get_running_loop().call_later(_REQUEST_S, self._end_greeting, number, accepted)
        if len(self._greeting) > max(self._limit - self._num_open, self._limit // 8):
            self._end_greeting(*next(iter(self._greeting.items())))

    def _end_greeting(self, number: int, accepted: socket.socket) -> None:
        if self._greeting.get(number) is accepted:
            del self._greeting[number]
            with contextlib.suppress(OSError):  # it has ended by itself
                accepted.shutdown(socket.SHUT_RDWR)

    def opened(self, connection: Connection) -> None:
        """Add a connection without a request; over the limit, close the one that is idle for longest."""
        self._num_open += 1
        self._greeting.pop(connection.transport.get_extra_info("socket").fileno(), None)
        self.mark_idle(connection)
        if self._num_open > self._limit:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.close()
            if time.monotonic() - self._warned_s > _QUIET_S:
                self._warned_s = time.monotonic()
                log.warning(
                    "%d connections are open: closing those that are idle for longest", self._num_open
                )

    def closed(self, connection: Connection) -> None:
        self._num_open -= 1
        self.mark_busy(connection)

    def mark_idle(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._idle[connection] = None

    def mark_busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)


class Connection(H11Protocol):
    """One connection."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._half_closed = False
        self._waiting: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # --- called by asyncio and uvicorn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1)  # so that any unread data is noticed
        self._connections.opened(self)
        self._await_request()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._connections.closed(self)
        for timer in (self._waiting, self._writing, self._probing):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._has_request and self.conn.their_state is h11.MUST_CLOSE:
            return  # behind the last request, such as a further line end
        super().data_received(data)  # ends uvicorn's wait for a further request
        if not self._has_request:
            self._await_rest()
        self._see_request()
        is_behind = self._has_request and self.conn.their_state is h11.DONE and self.conn.trailing_data[0]
        if is_behind and self._probing is None:  # nor is read then that the client disconnects
            self._probe(_FIRST_PROBE_S)

    def handle_events(self) -> None:
        """Line ends before a request are ignored (RFC 9112, section 2.2); h11 ignores none. HTTP/2 is refused
        at once: h11 takes its preface for two requests."""
        if self.conn.their_state is h11.IDLE:
            data, _ = self.conn.trailing_data
            self.conn._receive_buffer.maybe_extract_at_most(len(data) - len(data.lstrip(b"\r\n")))
            if data.lstrip(b"\r\n").startswith(_HTTP2):
                self.send_400_response("HTTP/2 is not served here.")
                return
        super().handle_events()

    def _unsupported_upgrade_warning(self) -> None:
        """An offer of another protocol, which a server may ignore (RFC 9110, section 7.8). uvicorn logs two
        warnings, and advises to install what would not be used."""

    def on_response_complete(self) -> None:
        """A response is complete; the next request may have arrived already, or uvicorn waits for it."""
        super().on_response_complete()
        self._connections.mark_idle(self)
        self._see_request()

    def send_400_response(self, msg: str) -> None:
        """What cannot be read; it may follow what is refused before its end, which has its response."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    # --- connections without a request

    def _await_request(self) -> None:
        self._waiting = self.loop.call_later(_REQUEST_S, self.transport.close)  # after all data is sent

    def _await_rest(self) -> None:
        """Of a request, or of one that was answered before its end: behind that, a further one."""
        is_between = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if self._waiting is None and not is_between:
            self._await_request()
        elif is_between and not self.transport.is_closing():
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _see_request(self) -> None:
        if self._has_request:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None
            self._connections.mark_busy(self)
        elif self._half_closed and not self._has_request:
            self.transport.close()

    # --- responses that are not read

    def pause_writing(self) -> None:
        """The socket buffer is full; see `asyncio.Protocol`."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """All data is written; see `asyncio.Protocol`."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def _watch_writing(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self._connections.idle_timeout_s, self._check_written, left)

    def _check_written(self, num_before: int) -> None:
        if self.transport.get_write_buffer_size() < num_before:  # some of a long response was read
            self._watch_writing()
        else:
            log.info("a client has read nothing for %g s: disconnected", self._connections.idle_timeout_s)
            self.transport.abort()  # `close` would wait for the unread data

    # --- half-closed connections

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for the response.

        A client that has disconnected looks the same until something is sent to it, so interim responses are
        sent until the response begins; and where what follows a request is not read yet. TLS does not have
        half-closed connections.
        """
        is_tls = self.transport.get_extra_info("sslcontext") is not None
        if is_tls or not self._has_request or self.cycle.more_body:
            return False
        self._half_closed = True
        self._probe(_FIRST_PROBE_S)
        return True

    def _probe(self, pause_s: float) -> None:
        is_awaited = self._has_request and not self.cycle.response_started
        if is_awaited and self.scope["http_version"] == "1.1" and not self.transport.is_closing():
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim))
        longer_s = min(2 * pause_s, _LONGEST_PROBE_S)
        goes_on = self._half_closed or self.flow.read_paused
        self._probing = self.loop.call_later(pause_s, self._probe, longer_s) if goes_on else None
