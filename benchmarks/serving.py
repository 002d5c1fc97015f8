"""Throughput and waiting of `edge serve` beside llama.cpp's server at 1, 2, 4 and 8 clients.

    make bench-serving
    python benchmarks/serving.py smollm2-135m --llama-server $(python benchmarks/peers/make_server.py)

For each number of clients, with prompts that begin alike and with ones that do not: tokens per second of all clients
together, the time to the first token (median, 95th percentile), the CPU time of a token with its share of the prompts,
which other programs hardly change, and the peak memory of the server. The servers take
turns, each freshly started. Answers are greedy and have one length, but for those that the model ends earlier with
llama-cpp-python, which cannot ignore the end of a turn; tokens that came are counted.

Beside edge runs llama.cpp's own server, if --llama-server names one (8 slots; make_server.py builds it of the installed
llama-cpp-python's version), and that of llama-cpp-python, which
answers one request at a time, without interrupting it for the next, and with its memory of one earlier prompt. `make
bench-serving` installs it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from edge.cli.terminal.show import table
from edge.model.names.catalog import find_model

SHARED = "You are a careful assistant. " + " ".join(f"Rule {n}: cite section {n * 7 % 31}." for n in range(40))
CLIENTS = "1,2,4,8"
PEERS = Path(__file__).parents[1] / "build" / "peers" / "bin" / "python"
START_S = 120.0


@dataclass(frozen=True)
class Served:
    """One measurement. first: seconds to the first token, sorted."""

    speed: float  # tokens per second
    first: list[float]
    cpu: float  # milliseconds of CPU time by token
    peak: int  # bytes

    @property
    def p95(self) -> float:
        return self.first[min(len(self.first) - 1, int(0.95 * len(self.first)))]


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[int]:
    """A server's process, once it answers."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while time.monotonic() < until and process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                if answer(port, "Hello", 2)[1]:
                    break
            time.sleep(0.2)
        else:
            raise SystemExit(f"{command[0]} does not answer")
        yield process.pid
    finally:
        process.terminate()
        process.wait(60)


def answer(port: int, prompt: str, count: int) -> tuple[float, int]:
    """The seconds to the first token of a streamed answer, and the number of chunks with text."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True, "ignore_eos": True}
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    started, first, chunks = time.perf_counter(), 0.0, 0
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {") and any(
                each.get("text") for each in json.loads(line[6:]).get("choices", [])
            ):
                first = first or time.perf_counter() - started
                chunks += 1
    finally:
        connection.close()
    return first, chunks


def measure(pid: int, port: int, clients: int, *, shared: bool, rounds: int, length: int) -> Served:
    """Clients that ask `rounds` times each, one after the other, all of them at the same time."""
    first: list[float] = []
    count = 0

    def ask(client: int) -> None:
        nonlocal count
        for turn in range(rounds):
            question = f"Question {client}.{turn}: what does the next rule say?"
            prompt = f"{SHARED} {question}" if shared else f"{question} {SHARED[client * 3 + turn :]}"
            waited, chunks = answer(port, prompt, length)
            first.append(waited)
            count += chunks

    cpu = cpu_seconds(pid)
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    peak = next(
        int(line.split()[1]) * 1024
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return Served(count / seconds, sorted(first), 1e3 * (cpu_seconds(pid) - cpu) / count, peak)


def cpu_seconds(pid: int) -> float:
    """Of the process: user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def commands(model: str, path: Path, llama_server: str | None, port: int, threads: int) -> dict[str, list[str]]:
    """The servers that are compared."""
    found = {"edge": [
        sys.executable, "-m", "edge", "serve", model, "--port", str(port), "--sequences", "8", "--max-kv-size", "1024",
        "--threads", str(threads),
    ]}  # fmt: skip
    if llama_server is not None:
        found["llama.cpp"] = [
            llama_server, "-m", str(path), "--port", str(port), "-np", "8", "-c", "8192", "-t", str(threads),
        ]  # fmt: skip
    if PEERS.exists():
        found["llama-cpp-python"] = [
            str(PEERS), "-m", "llama_cpp.server", "--model", str(path), "--port", str(port), "--n_ctx", "1024",
            "--n_threads", str(threads), "--n_threads_batch", str(threads), "--interrupt_requests", "False",
        ]  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each client")
    parser.add_argument("--length", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--clients", default=CLIENTS, help="numbers of clients")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rows = []
    for shared in (True, False):
        for clients in map(int, options.clients.split(",")):
            servers = commands(options.model, find_model(options.model), options.llama_server, port, options.threads)
            for name, command in servers.items():
                with running(command, port) as pid:
                    found = measure(pid, port, clients, shared=shared, rounds=options.rounds, length=options.length)
                rows.append([
                    name, "shared" if shared else "own", str(clients), f"{found.speed:.0f}",
                    f"{statistics.median(found.first):.3f}", f"{found.p95:.3f}", f"{found.cpu:.1f}",
                    f"{found.peak >> 20}",
                ])  # fmt: skip
                print(*rows[-1], sep="  ", file=sys.stderr)
    if len({row[0] for row in rows}) == 1:
        print("no peer: make bench-serving installs one", file=sys.stderr)
    head = [
        "server",
        "prefix",
        "clients",
        "tok/s in all",
        "first token p50, s",
        "p95, s",
        "CPU ms a token",
        "peak, MiB",
    ]
    print(table(head, rows))


if __name__ == "__main__":
    main()
