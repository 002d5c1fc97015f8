"""Runs the server until a signal ends it: running requests are finished first, within the time of --drain."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

import uvicorn

from edge.errors import InputError, speaking
from edge.options import Options
from edge.server.app import make_app
from edge.server.connections import limited
from edge.server.hub import Hub
from edge.server.models.pool import Pool
from edge.server.settings import Settings

_KEEP_ALIVE_S = 75
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
        make_app(hub), http=limited(settings.connections), ws="none", lifespan="on", log_config=None,
        access_log=False, server_header=False, timeout_keep_alive=_KEEP_ALIVE_S, loop="asyncio",
        timeout_graceful_shutdown=max(1, round(settings.drain)), h11_max_incomplete_event_size=_LONGEST_HEAD,
    )  # fmt: skip
    server = _Server(config, hub)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    with speaking("requests"):
        await server.serve([listener])


class _Server(uvicorn.Server):
    """Refuses new requests once its shutdown has begun."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._hub.draining = True
        await super().shutdown(sockets)
