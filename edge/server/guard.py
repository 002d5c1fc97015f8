"""Access control before a request is read: by host name, origin of the web page, and API key."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import traceback
from collections.abc import Iterable
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.server.http import refuse
from edge.server.refusal import RefusedError, protocol_of
from edge.server.settings import Settings

_OPEN = ("/health", "/v1/health", "/")  # paths that reveal nothing about the server need no key
# Headers that pages of other origins may read.
_EXPOSED = "Retry-After, Request-Id, X-Request-Id, Edge-Ignored, Edge-Cut, Edge-Sources"

_log = logging.getLogger("edge.server")


class Guard:
    """Passes on permitted requests only. `scope["tenant"]` is the tenant, see `_check_key`."""

    def __init__(self, app: ASGIApp, settings: Settings, public: Iterable[str] = ()) -> None:
        self._app, self._settings = app, settings
        self._keys = [key.encode() for key in settings.api_key or ()]
        self._origins = frozenset(settings.cors or ())
        self._public = frozenset((*_OPEN, *public))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        _make_relative(scope)
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        identifier = scope["request_id"] = f"req_{uuid4().hex[:24]}"
        always = {"Request-Id" if protocol_of(scope) == "anthropic" else "X-Request-Id": identifier}
        if allowed := self._is_allowed(origin) and origin:
            always |= {
                "Access-Control-Allow-Origin": allowed, "Vary": "Origin", "Access-Control-Expose-Headers": _EXPOSED,
            }  # fmt: skip

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                found.setdefault("X-Content-Type-Options", "nosniff")
                for name, value in always.items():
                    found[name] = value
                if self._settings.log:
                    _log.info("%s %a %s", scope["method"], scope["path"], message["status"])
            await send(message)

        try:
            _check_length(headers)
            self._check_host(headers.get("host", ""))
            self._check_origin(origin, headers.get("host", ""))
            if scope["method"] == "OPTIONS" and allowed and "access-control-request-method" in headers:
                await _preflight(headers)(scope, receive, answer)
                return
            if scope["path"] not in self._public:
                scope["tenant"] = self._check_key(headers)
        except RefusedError as refused:
            await refuse(refused, scope)(scope, receive, answer)
            return
        try:
            await self._app(scope, receive, answer)
        except Exception as error:  # raised after the response; its message may quote the request
            _log.error("a request failed: %s", where(error))

    def _check_host(self, host: str) -> None:
        """On loopback, accept only names of this machine: otherwise, a page whose name now resolves to this machine
        would have the server's own origin (DNS rebinding)."""
        if self._settings.loopback and not _is_local(_host_name(host), self._settings.host):
            raise RefusedError(403, f"Host: {host[:80]!r} is no name of this machine", code="host")

    def _check_origin(self, origin: str | None, host: str) -> None:
        """Refuse pages of other origins, unless --cors allows them."""
        own = (f"http://{host}", f"https://{host}")
        if origin is not None and not self._is_allowed(origin) and origin not in own:
            raise RefusedError(
                403, f"pages of {origin[:80]} may not ask: --cors {origin[:80]} would let them", code="origin"
            )

    def _is_allowed(self, origin: str | None) -> bool:
        return origin is not None and (origin in self._origins or "*" in self._origins)

    def _check_key(self, headers: Headers) -> str:
        """The tenant, whose rows may be reused: the key's number, or empty if all requests share rows. Compares keys in
        constant time. Raises RefusedError."""
        if not self._keys:
            return ""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        stated = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        matches = [hmac.compare_digest(key, stated.encode("utf-8", "replace")) for key in self._keys]
        if not any(matches):
            raise RefusedError(
                401, "the key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
            )
        return "" if self._settings.shares else f"{matches.index(True)}"


def where(error: BaseException) -> str:
    """The kind of an error, and the line that raised it, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__


def _preflight(headers: Headers) -> Response:
    """The response to the preflight request of an allowed page: it may send any headers, since each client has its
    own, such as X-Stainless-Retry-Count."""
    found = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", ""),
        "Access-Control-Max-Age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        found["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=found)


def _check_length(headers: Headers) -> None:
    """Refuse a body with two lengths, of which a proxy may have taken the other one (RFC 9112, section 6.3)."""
    if "content-length" in headers and "transfer-encoding" in headers:
        message = "Content-Length and Transfer-Encoding exclude each other"
        raise RefusedError(400, message, code="http", closes=True)


def _make_relative(scope: Scope) -> None:
    """Split a target in absolute form (`GET http://host/path`, RFC 9112, section 3.2.2), whose host stands above the
    header's."""
    if not scope["path"].lower().startswith(("http://", "https://")):
        return
    authority, slash, path = scope["path"].split("//", 1)[1].partition("/")
    scope["path"] = slash + path or "/"
    scope["raw_path"] = scope["path"].encode()
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [*others, (b"host", authority.encode())]


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_local(name: str, own: str) -> bool:
    if name in ("localhost", own):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
