"""`edge serve` as a process: signals, and clients that go away."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from conftest import GOLDEN
from serving import HELLO, MODEL

CHATS = "/v1/chat/completions"
PATIENCE = 120  # seconds, for a loaded machine: httpx itself waits for 5
LONG: dict[str, Any] = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 1000000}


@contextmanager
def server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and its address."""
    command = [sys.executable, "-m", "edge", "serve", str(GOLDEN / f"{MODEL}.gguf"), "--port", "0", "--json", "-q",
               "--backend", "reference", "--max-kv-size", "256", *arguments]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.communicate()[1])
        yield process, json.loads(line)["url"]
    finally:
        process.kill()
        process.communicate()


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE).text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def test_client_that_goes_away_ends_its_answer() -> None:
    with server() as (_, url):
        with httpx.stream("POST", url + CHATS, json=LONG, timeout=PATIENCE) as response:
            assert response.status_code == 200
            lines = response.iter_lines()  # that is dropped closes the response
            next(lines)
            assert metric(url, "edge_running") == 1
        while metric(url, "edge_running"):
            pass
        whole = {**LONG, "stream": False}
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            body = json.dumps(whole).encode()
            head = [
                f"POST {CHATS} HTTP/1.1", f"Host: {host}", "Content-Type: application/json",
                f"Content-Length: {len(body)}",
            ]  # fmt: skip
            connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
            while not metric(url, "edge_running"):
                pass
        while metric(url, "edge_running"):
            pass
        assert metric(url, "edge_cancelled_total") == 2
        assert httpx.post(url + CHATS, json={"messages": HELLO, "max_tokens": 2}, timeout=PATIENCE).status_code == 200


def test_answers_are_finished_after_sigterm() -> None:
    with server("--drain", "100s") as (process, url):
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
