"""A site of a small model, and servers that lose or damage what they send."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

from browser import keep_port
from bundles import model_of
from shared import made_once

from edge.apps import serve, site
from edge.apps.bundle import MODEL, export

NAME = "llama-gqa-tied"
ROWS = 64
PIECE = 16 << 10  # so that a small model has several
READY = "document.getElementById('status')?.textContent.startsWith('On this device')"  # on the page of a site
_PATIENCE = 60.0  # seconds


@lru_cache
def site_of(name: str = NAME, *isas: str, lora_rank: int = 0, gpu: bool = False, **options: Any) -> Path:
    chosen = {"max_kv_size": ROWS, "memory": "64MiB", "lora_rank": lora_rank, "gpu": gpu} | options

    def make(folder: Path) -> None:
        with patch.object(site, "PIECE", PIECE):
            export(model_of(name), folder, device="web", isas=isas or None, **chosen)

    return made_once(make, name, "site", isas, sorted(chosen.items()))


@dataclass
class Sent:
    """What a server sent of model.edge: spans of bytes in the order of their requests. Faults happen to the next ones.

    cut: bytes after which a connection ends, once the page says that it has the pieces before. flip: offsets of bytes
    that are changed, each once. go: model.edge is sent only while it is set.
    """

    spans: list[range] = field(default_factory=list)
    bytes: int = 0
    cut: list[int] = field(default_factory=list)
    flip: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)  # of all requests
    go: threading.Event = field(default_factory=threading.Event)
    loaded: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # one for each piece


class _Shaky(serve._Handler):
    sent: Sent

    def _answer(self, *, with_body: bool) -> None:
        self.sent.paths.append(self.path)
        if self.path == "/loaded":
            self.sent.loaded.release()
        super()._answer(with_body=with_body)

    def _send(self, file: BinaryIO, span: range) -> None:
        if Path(str(file.name)).name != MODEL:
            super()._send(file, span)
            return
        self.sent.go.wait(_PATIENCE)
        self.sent.spans.append(span)
        file.seek(span.start)
        content = bytearray(file.read(len(span)))
        for at in {each for each in self.sent.flip if each in span}:
            content[at - span.start] ^= 1
            self.sent.flip.remove(at)
        if not self.sent.cut:
            self.sent.bytes += len(content)
            self.wfile.write(content)
            return
        content = content[: self.sent.cut.pop(0)]
        self.sent.bytes += len(content)
        self.wfile.write(content)
        for _ in range(len(content) // PIECE):
            self.sent.loaded.acquire(timeout=_PATIENCE)
        self.close_connection = True


@contextmanager
def served(folder: Path, *, isolated: bool = True) -> Iterator[tuple[str, Sent]]:
    """The address of a site, which is another one each time, and so another origin with its own storage."""
    sent = Sent()
    sent.go.set()
    with serve.serving(folder, port=0, isolated=isolated) as server:
        server.RequestHandlerClass = type("Shaky", (_Shaky,), {"sent": sent})
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/", sent
        finally:
            server.shutdown()
            thread.join()
    keep_port(server.server_port)
