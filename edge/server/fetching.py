"""Pictures that requests name by their addresses, fetched for `edge serve --fetch-images`.

A client could have the server reach what only the server can: so a name is resolved once, all of its addresses must be
public, the connection goes to the first of these, and each redirect is judged anew. No proxy is used.
"""

from __future__ import annotations

import base64
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from edge.records import dataclass
from edge.server.refusal import RefusedError

_MOST_REDIRECTS = 3
_BLOCK = 1 << 16
_LONGEST = 2048  # characters of an address
_PORTS = {"http": 80, "https": 443}

Address = IPv4Address | IPv6Address


def is_public(address: Address) -> bool:
    """Whether everybody reaches the same host by an address, and by an IPv4 address within it. No address of ::/8 is,
    which `is_reserved` has: IPv4 addresses behind NAT64 (RFC 6052, RFC 8215), and mapped and compatible ones."""
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    inner = (
        [] if isinstance(address, IPv4Address) else [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    )
    return all(is_public(each) for each in inner if each is not None)


@dataclass(frozen=True)
class Fetcher:
    """Fetches the pictures of one request, in bounded bytes and time."""

    most: int  # bytes of all
    seconds: float = 20.0  # for all
    allowed: Callable[[Address], bool] = is_public

    def fill(self, parts: Iterable[dict[str, Any]], claim: Callable[[int], None]) -> None:
        """Put the pictures in place of their addresses, as data URLs. claim: called with a number of bytes
        before they are kept. Raises RefusedError."""
        until, left = time.monotonic() + self.seconds, self.most
        for part in parts:
            holder, key = _place(part)
            if holder is None:
                continue
            data = self._fetch(holder[key], until, left, claim)
            left -= len(data)
            url = f"data:;base64,{base64.b64encode(data).decode()}"
            if holder is part.get("source"):  # Anthropic's
                part["source"] = {"type": "base64", "data": url.partition(",")[2]}
            else:
                holder[key] = url

    def _fetch(self, url: str, until: float, most: int, claim: Callable[[int], None]) -> bytes:
        where = url
        for _ in range(1 + _MOST_REDIRECTS):
            parts = _checked(where)
            try:
                with self._connect(parts, until) as connection:
                    found = self._read(connection, parts, where, until, most, claim)
            except (OSError, HTTPException, UnicodeError, ValueError) as error:
                late = time.monotonic() >= until  # a connection that was cut off then fails in many ways
                raise _refused(where, _worded(TimeoutError() if late else error)) from None
            if isinstance(found, bytes):
                return found
            where = found
        raise _refused(url, f"it redirects more than {_MOST_REDIRECTS} times")

    def _connect(self, parts: SplitResult, until: float) -> _Pinned:
        """A connection to the first address of a name, all of whose addresses are allowed."""
        host, port = str(parts.hostname), parts.port or _PORTS[parts.scheme]
        known = socket.getaddrinfo(host.encode("idna").decode(), port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in known]
        if not addresses or not all(self.allowed(ip_address(each.partition("%")[0])) for each in addresses):
            raise _refused(parts.geturl(), "its host is not in the public internet")
        return _Pinned(host, port, addresses[0], parts.scheme == "https", until)

    def _read(
        self, pinned: _Pinned, parts: SplitResult, where: str, until: float, most: int, claim: Callable[[int], None]
    ) -> bytes | str:
        """The body of a response, or the address that it redirects to."""
        response = pinned.get(parts)
        if response.status in (301, 302, 303, 307, 308):
            return urljoin(where, response.headers.get("Location") or "")
        if response.status != 200:
            raise _refused(where, f"it answers with status {response.status}")
        found = bytearray()
        while block := response.read1(_BLOCK):
            if len(found) + len(block) > most:
                raise _refused(where, f"the request's pictures have more than {most} bytes (--max-body)")
            claim(len(block))
            found += block
        _left(until)  # a connection that was cut off then ends like a whole one
        if response.length:
            raise _refused(where, "the connection broke off")
        return bytes(found)


class _Pinned:
    """A connection to one address, by whatever name its certificate and its server know it."""

    def __init__(self, host: str, port: int, address: str, tls: bool, until: float) -> None:
        self._made: HTTPConnection = HTTPSConnection(host, port) if tls else HTTPConnection(host, port)
        plain = socket.create_connection((address, port), _left(until))
        # Each read would have the whole time anew.
        self._same = plain.dup()
        self._timer = threading.Timer(_left(until), self._cut)
        self._timer.daemon = True
        self._timer.start()
        self._made.sock = plain
        if tls:
            try:
                self._made.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            except BaseException:
                self.__exit__()
                raise

    def get(self, parts: SplitResult) -> HTTPResponse:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "edge", "Connection": "close"}
        self._made.request("GET", path, headers=headers)
        return self._made.getresponse()

    def __enter__(self) -> _Pinned:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        self._same.close()
        self._made.close()

    def _cut(self) -> None:
        with suppress(OSError):
            self._same.shutdown(socket.SHUT_RDWR)


def _place(part: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Where a part has an address, or None."""
    source, found = part.get("source"), part.get("image_url")
    holder, key = (source, "url") if isinstance(source, dict) else (found, "url") if isinstance(found, dict) else (
        part, "image_url"
    )  # fmt: skip
    value = holder.get(key)
    return (holder if isinstance(value, str) and value[:8].lower().startswith(("http://", "https://")) else None), key


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in _PORTS and parts.hostname and parts.username is None and (parts.port or 1) > 0
    except ValueError:
        fine = False
    if not fine or len(url) > _LONGEST or not url.isascii() or not url.isprintable() or " " in url:
        raise _refused(url, "it must be a http or https address without a password, in ASCII")
    return parts


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _worded(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, socket.gaierror):
        return "its host is unknown"
    if isinstance(error, ssl.SSLError):
        return f"its certificate or TLS failed ({error.reason or type(error).__name__})"
    return f"the connection failed ({getattr(error, 'strerror', None) or type(error).__name__})"


def _refused(url: str, why: str) -> RefusedError:
    shown = url[:80].encode("ascii", "replace").decode()
    return RefusedError(400, f"the picture {shown!r} was not fetched: {why}", code="image_not_fetched")
