"""A server that speaks as much of the protocol as the chat page needs, and says what a test wrote."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from browser import keep_port

from edge.apps.serve import TYPES
from edge.server.page import HEADERS, find

MIB = 1 << 20


@dataclass
class Script:
    """What the server does. answers: deltas of the next answers, in order; a number stands for a finish reason other
    than "stop", an exception for an error in the stream. asked: bodies that came. gone: answers that the page ended.
    go: deltas wait for it after the first one. told: figures of the server's memory wait for it."""

    answers: list[list[dict[str, Any] | str]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    models: tuple[str, ...] = ("tiny", "other")
    seeing: tuple[str, ...] = ()  # models that take pictures
    hearing: tuple[str, ...] = ()  # models that only hear
    heard: list[str | dict[str, Any]] = field(default_factory=list)  # transcripts, or a status and a message
    forms: list[bytes] = field(default_factory=list)  # bodies of transcriptions that came
    budget: int = 256 * MIB  # 0: none
    go: threading.Event = field(default_factory=threading.Event)
    told: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.go.set()
        self.told.set()


def _described(name: str, *takes: str) -> dict[str, Any]:
    return {"id": name, "chat_template": "text" in takes, "architecture": {"input_modalities": takes}}


class _Handler(BaseHTTPRequestHandler):
    script: Script

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if path := find(self.path):
            self._send(200, path.read_bytes(), TYPES[path.suffix])
        else:
            if self.path == "/props":
                self.script.told.wait()
            memory = {"resident": 141 * MIB, "budget": self.script.budget}
            found: dict[str, Any] = {
                "/v1/models": {
                    "data": [
                        *(_described(name, "audio") for name in self.script.hearing),
                        *(
                            _described(name, "text", *["image"] * (name in self.script.seeing))
                            for name in self.script.models
                        ),
                    ]
                },
                "/props": {"edge": {"memory": memory, "budgets": {"energy": 40.0}}},
            }
            self._send(200 if self.path in found else 404, json.dumps(found.get(self.path)).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/audio/transcriptions":
            self.script.forms.append(body)
            heard = self.script.heard.pop(0)
            if not self.headers["Content-Type"].startswith("multipart/form-data; boundary="):
                self._send(415, b"{}")
            elif isinstance(heard, str):
                self._send(200, json.dumps({"text": heard}).encode())
            else:
                self._send(heard["status"], json.dumps({"error": {"message": heard["message"]}}).encode())
            return
        self.script.asked.append(json.loads(body))
        deltas = self.script.answers.pop(0)
        if deltas and isinstance(refused := deltas[0], dict) and "status" in refused:
            self._send(refused["status"], json.dumps({"error": {"message": refused["message"]}}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self._stream(deltas)
        except OSError:
            self.script.gone.set()

    def _stream(self, deltas: list[dict[str, Any] | str]) -> None:
        reason, failed = "stop", False
        for number, delta in enumerate(deltas):
            if number:
                while not self.script.go.wait(0.05):
                    self._event(None)
            if isinstance(delta, dict) and "error" in delta:
                self._event(delta)
                failed = True
            elif isinstance(delta, dict) and "finish" in delta:
                reason = delta["finish"]
            else:
                self._choice({"content": delta} if isinstance(delta, str) else delta)
        if not failed:
            timings = {"predicted_per_second": 24.5}
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "timings": timings})
            memory = {"peak": 142 * MIB, "budget": self.script.budget}
            cost = {"joules": 3.25, "energy": {"certainty": "estimated"}, "budget": None, "memory": memory}
            self._event({"choices": [], "usage": {"completion_tokens": len(deltas), "edge": cost}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _choice(self, delta: dict[str, Any]) -> None:
        self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def _event(self, data: Any) -> None:
        """None: a comment, by which a client that went away is noticed."""
        self.wfile.write(b": waiting\n\n" if data is None else f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()


@contextmanager
def chat_server() -> Iterator[tuple[str, Script]]:
    """Its address, and what it is to do."""
    script = Script()
    handler = type("Handler", (_Handler,), {"script": script})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/", script
        finally:
            script.go.set()
            script.told.set()
            server.shutdown()
            thread.join()
    keep_port(server.server_port)
