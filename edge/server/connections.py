"""Connections: how many there are at a time, and how long each may keep the server waiting for its bytes.

A request's body is read by the application, within a time of its own (`read_body`).
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from edge.server.http import dumps
from edge.server.refusal import RefusedError

SENT_S = 15.0  # within which a client must have sent the head of a request, or a body that is not read


def limited(most: int) -> type[H11Protocol]:
    """The protocol of connections, `most` at a time. One more takes the place of the one whose client has kept the
    server waiting for longest; it is refused if all requests are being answered."""

    class Limited(Connection):
        limit = most

    return Limited


class Connection(H11Protocol):
    """One connection, which is closed if its client keeps it waiting for more than SENT_S."""

    limit: int
    _late: asyncio.TimerHandle | None = None
    _since = 0.0  # of the loop's time: when it was made, or a request began or was answered
    _ended = False  # the last response is written; what still comes is dropped

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        self._set_deadline()
        held = [each for each in self.connections if isinstance(each, Connection) and not each.transport.is_closing()]
        if len(held) <= self.limit:
            return
        waiting = [each for each in held if each._waits and each is not self]
        if waiting:
            min(waiting, key=lambda each: (each._answers, each._since)).transport.close()
        else:
            self._refuse(RefusedError(503, "all connections are in use: try again", code="busy", retry=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._since = self.loop.time()
        self._set_deadline()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # refused before it was read
            self._set_deadline()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(RefusedError(400, "the request is not HTTP/1.1", code="http"))
        else:
            self.transport.close()

    @property
    def _answers(self) -> bool:
        """Whether a request is being read or answered."""
        return self.cycle is not None and not (self.cycle.response_complete or self._ended)

    @property
    def _waits(self) -> bool:
        """Whether it waits for bytes of its client."""
        return not self._answers or self.cycle.more_body

    def _set_deadline(self) -> None:
        if self._answers:
            self._end_deadline()
        elif self._late is None:
            self._late = self.loop.call_later(SENT_S, self.transport.close)

    def _end_deadline(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, error: RefusedError) -> None:
        """Answer without the application. The connection ends when the client closes it: closed with bytes unread, it
        would be reset, and the answer lost."""
        self._ended, body = True, dumps(error.body())
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        head = [f"HTTP/1.1 {error.status} {STATUS_PHRASES[error.status].decode()}"]
        headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        head += [f"{name}: {value}" for name, value in {**headers, **error.headers}.items()]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.write_eof()
        self._set_deadline()
