"""Connections over sockets: slow clients, and what is no HTTP. `edge serve` as a process: signals, memory, and clients
that go away."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import GOLDEN
from serving import HELLO, MODEL, OTHER, PLAIN
from serving_process import started

from edge.options import Options
from edge.server import connections
from edge.server.running import _serve, listen, make_hub
from edge.server.settings import Settings

HEAD = "{} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
HEALTH = HEAD.format("GET /health") + "\r\n"
BODY = HEAD.format("POST /health") + "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
CHATS = "/v1/chat/completions"
LONG: dict[str, Any] = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 1_000_000}
PATIENCE = 120.0  # seconds, for a loaded machine: httpx itself waits for 5


@contextmanager
def listening(**settings: Any) -> Iterator[int]:
    """The port of a server in a thread of this process."""
    given = Settings.parse(port=0, **settings)
    hub = make_hub([str(GOLDEN / f"{MODEL}.gguf")], Options.parse(**PLAIN), given)
    ready, ended = threading.Event(), threading.Event()
    found: list[Any] = []

    async def serve() -> None:
        found.extend((asyncio.get_running_loop(), asyncio.current_task()))
        try:
            await _serve(hub, listener, lambda url: ready.set())
        except asyncio.CancelledError:
            await hub.pool.close()
        finally:
            ready.set()

    with listen(given) as listener:
        thread = threading.Thread(target=lambda: (asyncio.run(serve()), ended.set()))
        thread.start()
        assert ready.wait(PATIENCE)
        assert not ended.is_set()
        try:
            yield listener.getsockname()[1]
        finally:
            loop, task = found
            loop.call_soon_threadsafe(task.cancel)
            assert ended.wait(PATIENCE)


def connect(port: int, text: str = "") -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    found.sendall(text.encode())
    return found


def endless_chat(**fields: Any) -> str:
    """A request of an answer without end."""
    body = json.dumps(LONG | fields)
    head = HEAD.format(f"POST {CHATS}") + f"Content-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n{body}"


def read(connection: socket.socket) -> str:
    """All until the server closes the connection."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts).decode()


def test_oversized_body_is_drained_before_the_refusal() -> None:
    size = 8 << 20  # more than the buffers of both ends hold
    head = BODY.replace("/health", "/v1/chat/completions").replace("1000", f"{size}\r\nConnection: close")
    with listening(most_body="100KiB") as port, connect(port, head) as client:
        client.sendall(bytes(size))
        assert "413" in read(client).splitlines()[0]
    waits = head.replace("Connection", "Expect: 100-continue\r\nConnection")
    with listening(most_body="100KiB") as port, connect(port, waits) as client:
        assert "413" in read(client).splitlines()[0]


@pytest.mark.parametrize("begun", ["", HEALTH + "G", BODY + "x"])
def test_waiting_connections_make_room(begun: str) -> None:
    with listening(connections=2) as port, ExitStack() as held:
        several = [held.enter_context(connect(port, begun)) for _ in range(2)]
        if begun.startswith((HEALTH, BODY)):
            for each in several:
                assert each.recv(100).startswith(b"HTTP/1.1 ")
        for _ in range(3):
            with connect(port, HEALTH) as one:
                assert one.recv(100).startswith(b"HTTP/1.1 200")


def test_connections_that_are_answered_keep_their_place() -> None:
    with listening(connections=1) as port, connect(port, endless_chat()) as first:
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        with connect(port, HEALTH) as second:
            answer = read(second)
        assert answer.startswith("HTTP/1.1 503")
        assert json.loads(answer.split("\r\n\r\n")[1])["error"]["code"] == "busy"
        assert first.recv(100)


@pytest.mark.parametrize("begun", ["G", HEAD])
def test_connections_of_slow_clients_are_closed(begun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that come one at a time do not keep a connection."""
    monkeypatch.setattr(connections, "SENT_S", 0.3)
    with listening() as port, connect(port, begun) as connection:
        connection.settimeout(0.05)
        while True:
            try:
                connection.sendall(b"x" if begun else b"")
                if not connection.recv(1 << 16):
                    break
            except TimeoutError:
                continue
            except OSError:
                break


@pytest.mark.parametrize(
    "text",
    ["\x00\r\n\r\n", "GET\r\n\r\n", "GET / HTTP/1.1\r\n\r\n", HEAD.format("GET /health") + "Content-Length: x\r\n\r\n",
     HEAD.format("GET /" + "x" * 99999), HEAD.format("GET /") + "Transfer-Encoding: gzip\r\n\r\n",
     HEAD.format("POST /health") + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
)  # fmt: skip
def test_malformed_http_is_refused_in_json(text: str) -> None:
    with listening() as port, connect(port, text) as connection:
        head, body = read(connection).split("\r\n\r\n")
        assert head.startswith("HTTP/1.1 400 Bad Request\r\n")
        assert "application/json" in head
        assert json.loads(body)["error"]["code"] == "http"


# edge serve as a process


SERVED = (str(GOLDEN / f"{MODEL}.gguf"), "--backend", "reference", "--max-kv-size", "256")


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE).text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def test_client_that_goes_away_ends_its_answer() -> None:
    with started(*SERVED) as (_, url):
        with httpx.stream("POST", url + CHATS, json=LONG, timeout=PATIENCE) as response:
            assert response.status_code == 200
            lines = response.iter_lines()  # that is dropped closes the response
            next(lines)
            assert metric(url, "edge_running") == 1
        while not metric(url, "edge_cancelled_total"):
            pass
        with connect(int(url.rpartition(":")[2]), endless_chat(stream=False)):
            while not metric(url, "edge_running"):
                pass
        while metric(url, "edge_cancelled_total") < 2:
            pass
        assert metric(url, "edge_running") == 0
        assert httpx.post(url + CHATS, json={"messages": HELLO, "max_tokens": 2}, timeout=PATIENCE).status_code == 200


def test_answers_are_finished_after_sigterm() -> None:
    with started(*SERVED, "--drain", "100s") as (process, url):
        body = {**LONG, "max_tokens": 150}
        with httpx.stream("POST", url + CHATS, json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(PATIENCE) == 143
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=PATIENCE)


def load_soak() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set of another process is read from /proc")
def test_memory_holds_whatever_clients_send() -> None:
    """A soak in small: benchmarks/soak.py has ten thousand requests."""
    models = [str(GOLDEN / f"{name}.gguf") for name in (MODEL, OTHER)]
    found = load_soak().soak(models, 40, "256MiB", "--backend", "reference", "--max-kv-size", "256", clients=4)
    assert found["requests"] == 40
    assert found["peak"] <= 256 << 20
    assert not any(kind.endswith(" 500") for kind in found["seen"])
