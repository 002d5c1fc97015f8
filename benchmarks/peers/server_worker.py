"""`edge serve` for `busy.py`, behind the line protocol: whole requests, from the client's call to the answer's end.

server_worker.py MODEL THREADS CELLS SEQUENCES

The process that the parent started becomes the server, whose CPU time is then counted; its child speaks the protocol.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

from protocol import Tokens, serve

import edge

START_S = 120.0


class Served:
    """The measurements, as a client takes them."""

    def __init__(self, port: int, vocab: int) -> None:
        self.port, self.vocab, self.version = port, vocab, ""
        self._numbers = itertools.count()
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            try:
                self._ask("Hello", 1)
                return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError("edge serve does not answer")

    def prefill(self, tokens: Tokens) -> float:
        """Scaled to as many tokens. No text begins like an earlier one, whose rows would be reused."""
        text = " ".join(map(str, [next(self._numbers), *tokens[: tokens.size // 4]]))
        began = time.perf_counter()
        count = self._ask(text, 1)["prompt_tokens"]
        return (time.perf_counter() - began) * tokens.size / int(count)

    def decode(self, depth: int, tokens: Tokens) -> float:
        return self.batch(1, depth, tokens)

    def batch(self, count: int, depth: int, tokens: Tokens) -> float:
        texts = [" ".join(map(str, tokens[i : i + depth // 4])) for i in range(count)]
        began = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda text: self._ask(text, tokens.size // count), texts))
        return time.perf_counter() - began

    def _ask(self, prompt: str, count: int) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            found: dict[str, Any] = json.loads(connection.getresponse().read())["usage"]
            return found
        finally:
            connection.close()


def main(model: str, threads: str, cells: str, sequences: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    if os.fork():
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in range(3):
            os.dup2(nothing, each)
        os.execv(sys.executable, [
            sys.executable, "-m", "edge", "serve", model, "--port", str(port), "--threads", threads,
            "--max-kv-size", cells, "--sequences", sequences, "--speculate", "off",
        ])  # fmt: skip
    serve(lambda: Served(port, edge.open_model(model).spec.vocab))
    os.kill(os.getppid(), signal.SIGTERM)


if __name__ == "__main__":
    main(*sys.argv[1:])
