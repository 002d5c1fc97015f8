"""A Hub on loopback: revisions, listings and files as huggingface.co serves them, with faults to order.

tests/storage/test_hub.py shows that huggingface_hub itself downloads from it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "tiny/model-GGUF"
VARIABLES = (
    "HF_TOKEN", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN_PATH",
    "TRANSFORMERS_OFFLINE", "HUGGING_FACE_HUB_TOKEN", "XDG_CACHE_HOME", "HF_ENDPOINT",
)  # fmt: skip
_PAGE = 3  # files of a page of a listing


@dataclass
class Faults:
    """What goes wrong. status: answers to the next requests for a file. cut: bytes after which the next connections
    end. stall: seconds without a byte."""

    status: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    damage: bool = False
    no_range: bool = False
    stall: float = 0.0
    listed: dict[str, Any] = field(default_factory=dict)  # fields of the first file of a listing
    redirect: str | None = None  # where files are; None: /cdn of this server
    following: str | None = None  # the address of a listing's next page
    pace: float = 0.0  # seconds between two pieces of 64 KiB
    go: threading.Event = field(default_factory=threading.Event)  # pieces of whole files but the first wait for it

    def __post_init__(self) -> None:
        self.go.set()


@dataclass
class Hub:
    """Files of repositories, by path; and what was asked: method, path, headers."""

    repositories: dict[str, dict[str, bytes]]
    licence: str | None = "apache-2.0"
    gated: bool = False
    token: str | None = None  # that a gated repository wants
    faults: Faults = field(default_factory=Faults)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def ranges(self) -> list[str | None]:
        """The Range of each request to the place of contents."""
        return [headers.get("range") for method, path, headers in self.asked if method == "GET" and "/cdn/" in path]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        served = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.faults.go.set()
            server.shutdown()
            thread.join()


def hub_with(files: dict[str, bytes]) -> Any:
    """A fixture: the only Hub there is, with these files of NAME, and empty caches."""

    @pytest.fixture
    def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "edge"))
        monkeypatch.setattr("edge.hub.http._FIRST_PAUSE_S", 0.001)
        with serve(Hub({NAME: dict(files)})) as served:
            monkeypatch.setenv("HF_ENDPOINT", served.url)
            yield served

    return hub


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, parts = self.served, urlsplit(self.path)
        hub.asked.append((self.command, self.path, {key.lower(): value for key, value in self.headers.items()}))
        path = unquote(parts.path).strip("/").split("/")
        try:
            if path[:2] == ["api", "models"]:
                self._api("/".join(path[2:4]), path[4:], parse_qs(parts.query))
            elif path[0] == "cdn":
                self._content(hub.repositories["/".join(path[1:3])]["/".join(path[3:])])
            else:
                self._resolve("/".join(path[:2]), path[2:])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _api(self, name: str, rest: list[str], query: dict[str, list[str]]) -> None:
        hub = self.served
        if self._refused(name):
            return
        files = hub.repositories[name]
        if rest[0] == "revision":
            if rest[1] not in ("main", COMMIT):
                self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            card = {"license": hub.licence} if hub.licence else {}
            about = {"id": name, "sha": COMMIT, "gated": hub.gated, "cardData": card, "siblings": []}
            self._answer(200, json.dumps(about).encode())
            return
        assert rest[0] == "tree"
        page, entries = int(query.get("cursor", ["0"])[0]), [_entry(path, data) for path, data in files.items()]
        entries[0] |= hub.faults.listed
        shown = entries[page : page + _PAGE]
        following = f"{hub.url}{urlsplit(self.path).path}?recursive=true&cursor={page + _PAGE}"
        more = {"Link": f'<{hub.faults.following or following}>; rel="next"'} if page + _PAGE < len(entries) else {}
        self._answer(200, json.dumps(shown).encode(), more)

    def _resolve(self, name: str, rest: list[str]) -> None:
        hub = self.served
        if hub.faults.status:
            status, headers = hub.faults.status.pop(0)
            self._answer(status, b"no", headers)
            return
        if self._refused(name):
            return
        path = "/".join(rest[2:])
        data = hub.repositories[name].get(path)
        if data is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        size, etag = len(data), _entry(path, data)["lfs"]["oid"]
        elsewhere = hub.url.replace("127.0.0.1", "localhost")  # contents have another host than the Hub
        where = f"{hub.faults.redirect or f'{elsewhere}/cdn'}/{name}/{path}"
        linked = {"X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(size)}
        self._answer(302, b"", {"Location": where, **linked})

    def _content(self, data: bytes) -> None:
        faults, start, stop = self.served.faults, 0, len(data)
        if faults.damage:
            data = data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :]
        asked = self.headers.get("Range")
        headers = {"ETag": f'"{sha256(data)}"', "Accept-Ranges": "bytes"}
        if asked and not faults.no_range:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), int(last) + 1 if last else len(data)
            stop = min(stop, len(data))
            if start >= len(data):
                self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        time.sleep(faults.stall)
        self._answer(206 if "Content-Range" in headers else 200, data[start:stop], headers)

    def _refused(self, name: str) -> bool:
        hub = self.served
        bearer = self.headers.get("Authorization") or ""
        if name not in hub.repositories:
            self._answer(401, b'{"error": "Invalid username or password."}', {"X-Error-Code": "RepoNotFound"})
            return True
        if hub.gated and bearer != f"Bearer {hub.token}":
            self._answer(403 if bearer else 401, b"{}", {"X-Error-Code": "GatedRepo"})
            return True
        return False

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        faults, whole = self.served.faults, len(body)
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(whole))
        self.end_headers()
        if self.command == "HEAD":
            return
        if faults.cut and status in (200, 206) and "/cdn/" in self.path:
            body = body[: faults.cut.pop(0)]
        for at in range(0, len(body), 1 << 16):
            if at and status == 200:
                faults.go.wait()
            self.wfile.write(body[at : at + (1 << 16)])
            self.wfile.flush()
            time.sleep(faults.pace)
        if len(body) < whole:
            self.close_connection = True


def _entry(path: str, data: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return {
        "type": "file", "oid": git, "size": len(data), "path": path, "lfs": {"oid": sha256(data), "size": len(data)},
    }  # fmt: skip
