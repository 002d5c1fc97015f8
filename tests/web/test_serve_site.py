"""`edge serve-site`: the files of a site and nothing else, with the headers that threads of a page need."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from threading import Thread

import pytest
from test_cli import edge

import edge as library
from edge.apps.serve import HEADERS, serving
from edge.errors import InputError

SECRET = b"nobody asks for this"
MODEL = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as a site has them, beside one that is not in it, and links that lead out."""
    around = tmp_path_factory.mktemp("around")
    folder = around / "site"
    (folder / "edge").mkdir(parents=True)
    for name in ("index.html", "page.css", "manifest.json", "edge/index.js", "edge/edge-simd.wasm", "two words.svg"):
        (folder / name).write_bytes(name.encode())
    (folder / "model.edge").write_bytes(MODEL)
    (folder / "empty").touch()
    (folder / ".hidden").write_bytes(SECRET)
    (around / "secret").write_bytes(SECRET)
    (around / "site-secret").write_bytes(SECRET)
    (folder / "out").symlink_to(around / "secret")
    (folder / "above").symlink_to(around)
    (folder / "circle").symlink_to(folder / "circle")
    return folder


@pytest.fixture(scope="module")
def port(site: Path) -> Iterator[int]:
    with serving(site, port=0) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def request(port: int, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        return response, response.read()


@pytest.mark.parametrize(("path", "name", "kind"), [
    ("/", "index.html", "text/html; charset=utf-8"),
    ("/?a=b", "index.html", "text/html; charset=utf-8"),
    ("/page.css", "page.css", "text/css; charset=utf-8"),
    ("/edge/index.js", "edge/index.js", "text/javascript; charset=utf-8"),
    ("/edge/edge-simd.wasm", "edge/edge-simd.wasm", "application/wasm"),
    ("/manifest.json", "manifest.json", "application/json"),
    ("/two%20words.svg", "two words.svg", "image/svg+xml"),
    ("/model.edge", "model.edge", "application/octet-stream"),
    ("/empty", "empty", "application/octet-stream"),
])  # fmt: skip
def test_files_have_types_and_isolation_headers(path: str, name: str, kind: str, site: Path, port: int) -> None:
    response, body = request(port, path)
    assert (response.status, body) == (200, (site / name).read_bytes())
    assert (response.headers["Content-Type"], response.headers["Accept-Ranges"]) == (kind, "bytes")
    assert HEADERS.items() <= dict(response.headers).items()
    head, nothing = request(port, path, "HEAD")
    assert (head.status, nothing, head.headers["Content-Length"]) == (200, b"", str(len(body)))


@pytest.mark.parametrize("path", [
    "/none", "/edge", "/edge/", "/page.css/", "/../secret", "/%2e%2e/secret", "/edge/../../secret", "/..%2fsecret",
    "/edge/..%2f..%2fsecret", "/..%5csecret", "/../site-secret", "/out", "/above/secret", "/circle", "/.hidden",
    "/%00", "/model.edge%00.js", "/%ff%fe", "/" + "a/" * 3000, "/" + "b" * 5000, "http://[::1/secret", "/x\\..\\y",
])  # fmt: skip
def test_paths_outside_the_site_are_not_found(path: str, port: int) -> None:
    response, body = request(port, path)
    assert (response.status, body) == (404, b"404 Not Found\n")


@pytest.mark.parametrize("method", ["POST", "DELETE", "TRACE"])
def test_other_methods_are_refused(method: str, port: int) -> None:
    assert request(port, "/model.edge", method)[0].status == 501


@pytest.mark.parametrize(("wanted", "start", "stop"), [
    ("bytes=0-99", 0, 100), ("bytes=100-", 100, 10240), ("bytes=-100", 10140, 10240), ("bytes=-99999", 0, 10240),
    ("bytes=10239-10239", 10239, 10240), ("bytes=5000-999999999", 5000, 10240),
    ("bytes=10240-", 0, 0), ("bytes=99999999-999999999", 0, 0), ("bytes=-0", 0, 0),  # beyond the file
])  # fmt: skip
def test_ranges_are_sent_with_their_place_or_refused(wanted: str, start: int, stop: int, port: int) -> None:
    response, body = request(port, "/model.edge", Range=wanted)
    if not stop:
        assert (response.status, response.headers["Content-Range"]) == (416, "bytes */10240")
        return
    assert (response.status, body) == (206, MODEL[start:stop])
    assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/10240"
    assert HEADERS.items() <= dict(response.headers).items()


@pytest.mark.parametrize(
    "wanted",
    ["bytes=0-1,5-6", "bytes=", "bytes=-", "lines=0-9", "bytes=9-3", "bytes=٣-٤", "bytes=a-b", "0-9", "=" * 99],
)
def test_other_ranges_are_ignored(wanted: str, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(f"GET /model.edge HTTP/1.1\r\nRange: {wanted}\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n" + MODEL)


@pytest.mark.parametrize("header", ["Content-Length: 30", "Transfer-Encoding: chunked"])
def test_content_of_a_request_is_not_another_request(header: str, port: int) -> None:
    """Else a proxy in front could take the second answer for that of another client."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(f"GET / HTTP/1.1\r\n{header}\r\n\r\nGET /page.css HTTP/1.1\r\n\r\n".encode())
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert (answer.count(b"HTTP/1.1 "), answer.endswith(b"\r\n\r\nindex.html")) == (1, True)


def test_unchanged_file_is_not_sent_again(port: int) -> None:
    tag = request(port, "/model.edge")[0].headers["ETag"]
    same, nothing = request(port, "/model.edge", If_None_Match=tag)
    assert (same.status, nothing, same.headers["ETag"]) == (304, b"", tag)
    assert request(port, "/model.edge", If_None_Match='"another"')[0].status == 200
    assert request(port, "/model.edge", Range="bytes=0-9", If_Range=tag)[0].status == 206
    assert request(port, "/model.edge", Range="bytes=0-9", If_Range='"another"')[1] == MODEL


def test_command_serves_until_it_is_interrupted(site: Path) -> None:
    command = [sys.executable, "-m", "edge", "serve-site", str(site), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = re.fullmatch(r'\{"url": "http://127\.0\.0\.1:(\d+)/"\}\n', child.stdout.readline())
        assert said is not None
        assert request(int(said[1]), "/model.edge")[1] == MODEL
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=120)
    assert (child.returncode, errors) == (130, "")


def test_folders_and_addresses_that_cannot_be_served_are_refused(site: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none", site / "index.html"):
        said = edge("serve-site", str(folder))
        assert said.returncode == 2
        assert said.stderr == f"edge: {folder} is not a site: edge export MODEL --device web -o {folder} makes one\n"
    with pytest.raises(InputError, match=r"--port 65536: choose a number from 0 to 65535"):
        library.serve_site(site, port=65536)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"^127\.0\.0\.1:{number} cannot be used \(Address already in use\)"):
            library.serve_site(site, port=number)
    for host in ("256.1.1.1", "..", "a" * 100, "192.0.2.1"):
        with pytest.raises(InputError, match="cannot be used"):
            library.serve_site(site, host, 0)
