"""Many requests to one `edge serve`, good and bad ones: its memory stays within --memory, nothing hangs, and no answer
has rows of another's.

    python benchmarks/soak.py --requests 10000 --memory 1GiB smollm2-135m gemma3-270m

Clients ask at the same time, in random order: whole and streamed answers, some of which they leave, malformed bodies,
oversized ones, unknown models. Greedy questions have one answer each, whoever asks and whatever runs beside them.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from edge.budget import format_bytes, parse_bytes

TEXTS = [
    f"Tell me {what} about {thing}." for what in ("one thing", "a story") for thing in ("rivers", "stones", "cats")
]
KINDS = {"whole": 40, "stream": 20, "left": 15, "malformed": 10, "oversized": 5, "unknown": 5, "scored": 5}
ANSWER_S = 300.0


@contextmanager
def serving(models: Sequence[str], *options: str) -> Iterator[tuple[int, int]]:
    """A server: its process and port."""
    command = [sys.executable, "-m", "edge", "serve", *models, "--port", "0", "--json", "-q", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, int(json.loads(process.stdout.readline())["url"].rsplit(":", 1)[1])
    finally:
        process.terminate()
        process.communicate(timeout=60)


def resident(pid: int, name: str) -> int:
    """VmRSS or VmHWM of a process, bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


class Client:
    """One of several that ask at the same time. answers: the first one to each question of each model."""

    def __init__(self, port: int, models: Sequence[str], answers: dict[Any, Any], seed: int) -> None:
        self._port, self._models, self._answers, self._random = port, models, answers, random.Random(seed)
        self.seen: Counter[str] = Counter()

    def ask(self) -> None:
        """One request of a random kind. Raises AssertionError for an answer that is wrong."""
        kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
        status = getattr(self, f"_{kind}")()
        self.seen[f"{kind} {status}"] += 1

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _body(self, **more: Any) -> dict[str, Any]:
        model, text = self._random.choice(self._models), self._random.choice(TEXTS)
        return {"model": model, "prompt": text, "max_tokens": 12, "temperature": 0, **more}

    def _whole(self) -> int:
        body = self._body()
        status, found = self._post("/v1/completions", json.dumps(body).encode())
        assert status in (200, 429), found
        if status == 200:
            self._check(body, json.loads(found)["choices"][0]["text"])
        return status

    def _stream(self) -> int:
        body = self._body(stream=True)
        status, found = self._post("/v1/completions", json.dumps(body).encode())
        assert status in (200, 429), found
        if status == 200:
            lines = [line[6:] for line in found.decode().split("\n") if line.startswith("data: ")]
            assert lines[-1] == "[DONE]"
            self._check(body, "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]))
        return status

    def _check(self, body: dict[str, Any], text: str) -> None:
        first = self._answers.setdefault((body["model"], body["prompt"]), text)
        assert text == first, f"{body}: {text!r} instead of {first!r}"

    def _scored(self) -> int:
        body = self._body(echo=True, logprobs=1, max_tokens=1)
        status, found = self._post("/v1/completions", json.dumps(body).encode())
        assert status in (200, 429), found
        return status

    def _left(self) -> int:
        """Asks, and goes away while the answer comes."""
        body = json.dumps(self._body(stream=True, max_tokens=200)).encode()
        head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        head += [f"Content-Length: {len(body)}", "", ""]
        with socket.create_connection(("127.0.0.1", self._port), timeout=ANSWER_S) as connection:
            connection.sendall("\r\n".join(head).encode() + body)
            if self._random.random() < 0.7:
                connection.recv(1)
        return 0

    def _malformed(self) -> int:
        good = json.dumps(self._body()).encode()
        at = self._random.randrange(1, len(good) - 1)
        body = self._random.choice([good[:at], b"[" * 5000, b'{"prompt": 3}', b"\xff" + good, b'{"prompt": []}'])
        status, found = self._post("/v1/completions", body)
        assert status in (400, 429), (status, found)  # 429: the bodies of others take the memory for requests
        return status

    def _oversized(self) -> int:
        words = "word " * self._random.choice([100_000, 2_000_000])
        size = len(words)
        body = json.dumps({**self._body(), "prompt": words, "max_tokens": 0 if size > 1 << 20 else -5}).encode()
        try:
            status, _ = self._post("/v1/completions", body)
        except OSError:  # the server closed the connection on what it does not read
            return 413
        assert status in (400, 413, 429), status
        return status

    def _unknown(self) -> int:
        status, _ = self._post("/v1/completions", json.dumps(self._body(model="none")).encode())
        assert status in (404, 429)
        return status


def soak(models: Sequence[str], requests: int, memory: str, *options: str, clients: int = 6) -> dict[str, Any]:
    """Ask; returns what was seen, and bytes. Raises AssertionError for what must not be."""
    with serving(models, "--memory", memory, *options) as (pid, port):
        answers: dict[Any, Any] = {}
        several = [
            Client(port, [Path(each).stem if "/" in each else each for each in models], answers, n)
            for n in range(clients)
        ]
        failures: list[str] = []
        samples: list[int] = []
        left = iter(range(requests))
        lock = threading.Lock()

        def work(client: Client) -> None:
            while not failures:
                with lock:
                    number = next(left, None)
                    if number is not None and number % 50 == 0:
                        samples.append(resident(pid, "VmRSS"))
                if number is None:
                    return
                try:
                    client.ask()
                except Exception as error:
                    failures.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=work, args=(client,)) for client in several]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]
        peak, seen = resident(pid, "VmHWM"), sum((client.seen for client in several), Counter[str]())
        assert peak <= parse_bytes(memory), f"{format_bytes(peak)} are more than {memory}"
        return {
            "requests": seen.total(), "seen": dict(sorted(seen.items())), "seconds": time.perf_counter() - started,
            "peak": peak, "resident": samples, "answers": len(answers),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--sequences", default="4")
    options = parser.parse_args()
    found = soak(
        options.models, options.requests, options.memory, "--sequences", options.sequences, clients=options.clients
    )
    samples = found.pop("resident")
    half = len(samples) // 2
    print(json.dumps(found, indent=1))
    print(f"peak {format_bytes(found['peak'])} of {options.memory}; resident after the first half "
          f"{format_bytes(samples[half])}, at the end {format_bytes(samples[-1])}")  # fmt: skip


if __name__ == "__main__":
    main()
