"""Runs the server until a signal ends it: running requests are finished first, within the time of --drain."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edge.errors import InputError
from edge.options import Options
from edge.server.app import make_app
from edge.server.hub import Hub
from edge.server.models.pool import Pool
from edge.server.settings import Settings

_KEEP_ALIVE_S = 75
_HEADERS_S = 15.0  # within which a connection must send the head of its request
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_LONGEST_HEAD = 32 << 10  # bytes


def make_hub(models: Sequence[str], options: Options, settings: Settings) -> Hub:
    """The models of a server, opened but not loaded. Raises InputError and the like."""
    return Hub(lambda told: Pool(models, options, settings, on_end=told), settings)


def listen(settings: Settings) -> socket.socket:
    """A socket at the server's address. Raises InputError."""
    host, port = settings.host, settings.port
    try:
        found = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=settings.connections
        )
    except (OSError, UnicodeError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{host}:{port} cannot be used ({why}): choose another --host or --port") from None
    found.setblocking(False)
    return found


def run(models: Sequence[str], options: Options, settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. ready: is called with the address, once the first model is loaded."""
    hub = make_hub(models, options, settings)
    if settings.log:
        log = logging.getLogger("edge.server")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
    with listen(settings) as listener:
        asyncio.run(_serve(hub, listener, ready))


async def _serve(hub: Hub, listener: socket.socket, ready: Callable[[str], None]) -> None:
    settings = hub.settings
    for name in hub.pool.entries:
        hub.pool.release(await hub.pool.acquire(name))
        break
    host, port = settings.host, listener.getsockname()[1]
    config = uvicorn.Config(
        make_app(hub), http=_limited(settings.connections), ws="none", lifespan="on", log_config=None,
        access_log=False, server_header=False, timeout_keep_alive=_KEEP_ALIVE_S, loop="asyncio",
        timeout_graceful_shutdown=max(1, round(settings.drain)), h11_max_incomplete_event_size=_LONGEST_HEAD,
    )  # fmt: skip
    server = _Server(config, hub)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    await server.serve([listener])


class _Server(uvicorn.Server):
    """Refuses new requests once its shutdown has begun."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._hub.draining = True
        await super().shutdown(sockets)


def _limited(most: int) -> type[H11Protocol]:
    """Connections, `most` at a time, that are closed unless they send the head of a request within _HEADERS_S."""

    class Limited(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _began = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.write(_FULL)
                transport.close()
                return
            self._late = self.loop.call_later(_HEADERS_S, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._late is not None:
                self._late.cancel()
            super().connection_lost(exc)

        def handle_events(self) -> None:
            super().handle_events()
            self._began = self._began or self.scope is not None

        def _give_up(self) -> None:
            if not self._began:
                self.transport.close()

    return Limited
