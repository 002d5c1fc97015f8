"""Serve a site's files over HTTP on this machine, with the headers that a page needs for threads."""

from __future__ import annotations

import email.utils
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from edge.devices.output import check_path
from edge.errors import InputError

HOST, PORT = "127.0.0.1", 8080

HEADERS = {  # https://web.dev/articles/coop-coep: without them a page has one thread
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a page revalidates each time, and mostly gets 304
}
TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".json": "application/json", ".webmanifest": "application/manifest+json", ".wasm": "application/wasm",
    ".svg": "image/svg+xml", ".png": "image/png", ".md": "text/markdown; charset=utf-8", ".ts": "text/plain",
}  # fmt: skip
_CHUNK = 1 << 20
_LONGEST = 30.0  # seconds without a byte from a client


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], root: Path, *, isolated: bool) -> None:
        self.root = root
        self.headers = HEADERS if isolated else {name: HEADERS[name] for name in HEADERS if "Cross" not in name}
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print no traceback: as a rule, the client went away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "edge", ""
    timeout = _LONGEST
    server: _Server

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        """Log nothing: a page makes dozens of requests."""

    def _answer(self, *, with_body: bool) -> None:
        path = find_file(self.server.root, self.path)
        if path is None:
            self._fail(HTTPStatus.NOT_FOUND, with_body=with_body)
            return
        try:
            file = path.open("rb")
        except OSError:
            self._fail(HTTPStatus.NOT_FOUND, with_body=with_body)
            return
        with file:
            status = os.fstat(file.fileno())
            tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
            if self.headers.get("If-None-Match") == tag:
                self._begin(HTTPStatus.NOT_MODIFIED, {"ETag": tag})
                return
            known = {
                "Content-Type": TYPES.get(path.suffix, "application/octet-stream"),
                "ETag": tag, "Accept-Ranges": "bytes",
                "Last-Modified": email.utils.formatdate(status.st_mtime, usegmt=True),
            }  # fmt: skip
            fits = self.headers.get("If-Range", tag) == tag
            span = find_range(self.headers.get("Range", ""), status.st_size) if fits else None
            if span is None:
                span = range(status.st_size)
                self._begin(HTTPStatus.OK, {**known, "Content-Length": str(len(span))})
            elif span:
                told = f"bytes {span.start}-{span.stop - 1}/{status.st_size}"
                self._begin(
                    HTTPStatus.PARTIAL_CONTENT, {**known, "Content-Range": told, "Content-Length": str(len(span))}
                )
            else:
                more = {"Content-Range": f"bytes */{status.st_size}"}
                self._fail(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, more, with_body=with_body)
                return
            if with_body:
                self._send(file, span)

    def _send(self, file: BinaryIO, span: range) -> None:
        file.seek(span.start)
        left = len(span)
        while left and (chunk := file.read(min(left, _CHUNK))):
            self.wfile.write(chunk)
            left -= len(chunk)
        if left:  # the file became shorter
            self.close_connection = True

    def _fail(self, status: HTTPStatus, more: dict[str, str] | None = None, *, with_body: bool) -> None:
        text = f"{status.value} {status.phrase}\n".encode()
        self._begin(status, {"Content-Type": "text/plain", "Content-Length": str(len(text)), **(more or {})})
        if with_body:
            self.wfile.write(text)

    def _begin(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, **self.server.headers}.items():
            self.send_header(name, value)
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.send_header("Connection", "close")  # this request's body follows, unread
        self.end_headers()


def find_file(root: Path, target: str) -> Path | None:
    """The file in `root` that a request's target names; None if there is none, it is hidden, or it lies outside."""
    try:
        path = unquote(urlsplit(target).path, errors="strict")
    except (ValueError, UnicodeDecodeError):
        return None
    parts = [part for part in path.split("/") if part]
    if any(part.startswith(".") or "\\" in part or "\0" in part for part in parts):
        return None
    found = root.joinpath(*parts)
    if path.endswith("/"):
        found = found / "index.html"
    try:
        inside = found.resolve(strict=True).is_relative_to(root.resolve())
        return found if inside and found.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def find_range(header: str, size: int) -> range | None:
    """The bytes of a header such as `bytes=0-99`, `bytes=100-` or `bytes=-100`, empty if the file has none of them;
    None for other headers, such as several ranges, which may be ignored (RFC 9110, section 14.2)."""
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", header.strip(), re.ASCII)
    first, last = match.groups() if match else ("", "")
    if not first:
        return range(max(0, size - int(last)), size) if last else None
    if last and int(last) < int(first):
        return None
    return range(int(first), min(size, int(last) + 1) if last else size)


@contextmanager
def serving(folder: Path, host: str = HOST, port: int = PORT, *, isolated: bool = True) -> Iterator[_Server]:
    """Yield a server of a site's folder that does not run yet: call its `serve_forever`. port 0: any free one.

    isolated: send the headers that give a page threads. Raises InputError if the folder holds no site, or the port is
    taken.
    """
    if not (folder / "manifest.json").is_file() or not (folder / "index.html").is_file():
        raise InputError(f"{folder} is not a site: edge export MODEL --device web -o {folder} makes one")
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port}: choose a number from 0 to 65535")
    try:
        server = _Server((host, port), folder, isolated=isolated)
    except (OSError, UnicodeError) as error:  # UnicodeError: an impossible host name
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{host}:{port} cannot be used ({why}): choose another --host or --port") from None
    with server:
        yield server


def serve_site(folder: str | Path, host: str = HOST, port: int = PORT) -> None:
    """Serve a site that `edge.export` made, until an interrupt. Raises InputError as `serving`."""
    check_path("folder", folder)
    with serving(Path(folder), host, port) as server:
        server.serve_forever()
