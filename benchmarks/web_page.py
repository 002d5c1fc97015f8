"""The page of benchmarks/web.py: its packages from npm, its server, its browser, and the browser's memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from machine import say

HERE = Path(__file__).parent
PACKAGES = {"@wllama/wllama": "3.8.1", "onnxruntime-web": "1.30.0"}
PAGE = "/bench/page.html"
_TYPES = {".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm"}

sys.path += [str(HERE.parent / "tests" / folder) for folder in ("", "apps", "web")]
from browser import WEBGPU, Page, browser, find_chromium  # noqa: E402

PLAIN, SOFTWARE_GPU = ("--disable-gpu",), WEBGPU  # flags of Chromium


def install(folder: Path) -> Path:
    """The peers' packages in folder/node_modules, unless they are there in these versions; returns that folder."""
    modules = folder / "node_modules"
    if all(_version(modules / name) == version for name, version in PACKAGES.items()):
        return modules
    say(f"installing {', '.join(PACKAGES)} from npm ...")
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": PACKAGES}), encoding="utf-8")
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"web.py gets its peers from npm, which cannot be run: {error}")
    if done.returncode:
        sys.exit(f"npm could not install the peers: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    return modules


def _version(package: Path) -> str | None:
    try:
        found: str = json.loads((package / "package.json").read_text(encoding="utf-8"))["version"]
    except OSError:
        return None
    return found


@contextmanager
def serve(places: dict[str, Path]) -> Iterator[str]:
    """A server on loopback with the headers that isolate its pages. places: folders by the first part of the path.

    Yields its address.
    """

    class Handler(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        extensions_map = SimpleHTTPRequestHandler.extensions_map | _TYPES

        def translate_path(self, path: str) -> str:
            first, _, rest = path.partition("?")[0].lstrip("/").partition("/")
            return str(places.get(first, HERE / "nowhere") / rest)

        def end_headers(self) -> None:
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
            super().end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Tab:
    """The benchmark's page in a browser of its own."""

    def __init__(self, page: Page, address: str) -> None:
        self.page, self._address = page, address

    def load(self, path: str = PAGE) -> None:
        self.page.events.clear()
        self.page.ask("Page.navigate", url=self._address + path)
        self.page.wait("Page.loadEventFired")

    def open(self, engine: str, settings: dict[str, Any]) -> dict[str, Any]:
        return self._call("open", engine, settings)

    def run(self, engine: str, prompt: dict[str, Any], tokens: int) -> dict[str, Any]:
        return self._call("run", engine, prompt, tokens)

    def close(self, engine: str) -> None:
        self._call("close", engine)

    def _call(self, name: str, *words: Any) -> Any:
        found = self.page.value(f"bench.{name}({', '.join(map(json.dumps, words))})")
        self.page.events.clear()
        return found


@contextmanager
def open_tab(address: str, path: str = PAGE, flags: Sequence[str] = PLAIN) -> Iterator[Tab]:
    chromium = find_chromium()
    if chromium is None:
        sys.exit("web.py needs Chromium: apt-get install chromium")
    folder = Path(tempfile.mkdtemp(prefix="edge-web-"))
    try:
        with browser(chromium, folder, flags) as page:
            tab = Tab(page, address)
            tab.load(path)
            yield tab
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def renderer_memory() -> tuple[int, int]:
    """Resident bytes of this process's browser's page, now and at most so far: of its largest renderer."""
    parents = dict(map(_parent, _processes()))
    found = [(0, 0)]
    for pid in parents:
        line, above = pid, set()
        while line in parents and line not in above:
            above.add(line)
            line = parents[line]
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if os.getpid() in above and b"--type=renderer" in words:
                status = Path(f"/proc/{pid}/status").read_text().splitlines()
                now, most = (next(each for each in status if each.startswith(key)) for key in ("VmRSS", "VmHWM"))
                found.append((int(now.split()[1]) << 10, int(most.split()[1]) << 10))
        except (OSError, StopIteration):  # it has ended
            continue
    return max(found)


def _processes() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _parent(pid: int) -> tuple[int, int]:
    try:
        return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return pid, 0
