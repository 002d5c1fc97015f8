"""Requests that would swell a server: each attack against a server of its own, and the peak of its memory.

    python benchmarks/attacks.py --memory 128MiB --sequences 3

Every attack must leave the process within --memory, get no internal error, and leave the server able to answer.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from typing import Any

from soak import resident, serving

from edge.budget import format_bytes, parse_bytes

CHATS = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
LONG = "word " * 520_000  # 2.6 MB
PATIENCE = 300.0

Body = dict[str, Any]


def post(port: int, path: str, body: Body) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def ask(path: str, *bodies: Body, clients: int = 4) -> Callable[[int], Counter[int]]:
    """Send these bodies by several clients at the same time; the statuses."""

    def run(port: int) -> Counter[int]:
        left, found, lock = list(bodies), Counter[int](), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not left:
                        return
                    body = left.pop()
                status = post(port, path, body)[0]
                with lock:
                    found[status] += 1

        threads = [threading.Thread(target=work) for _ in range(min(clients, len(bodies)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return run


def hold(path: str, body: Body, count: int, missing: int = 0) -> Callable[[int], Counter[int]]:
    """Send `count` requests without reading their answers; `missing`: bytes of each body that never come."""

    def run(port: int) -> Counter[int]:
        content = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        head += [f"Content-Length: {len(content)}", "", ""]
        found = Counter[int]()
        with ExitStack() as stack:
            held = [stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE)) for _ in range(count)]
            for connection in held:
                with suppress(OSError):
                    connection.sendall("\r\n".join(head).encode() + content[: len(content) - missing])
            time.sleep(12)
            for connection in held:
                connection.settimeout(0.01)
                answer = b""
                with suppress(OSError):
                    answer = connection.recv(12)
                found[int(answer[9:12] or 0)] += 1
        return found

    return run


def form(schema: Body) -> Body:
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": HELLO, "max_tokens": 20, "response_format": described}


def schema(number: int) -> Body:
    names = [f"field_{number}_{n}" for n in range(20)]
    kinds = ({"type": "string", "pattern": f"[a-z]{{1,{number + 2}}}"}, {"type": "integer"}, {"type": "number"})
    return {"type": "object", "properties": {name: kinds[n % 3] for n, name in enumerate(names)}, "required": names}


def tool(number: int) -> Body:
    parameters = {"type": "object", "properties": {f"argument_{n}": {"type": "string"} for n in range(4)}}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}


ATTACKS: dict[str, Callable[[int], Counter[int]]] = {
    "nothing": ask(CHATS, {"messages": HELLO, "max_tokens": 4}),
    "pieces of 2.6 MB": ask("/tokenize", {"content": LONG, "with_pieces": True}, clients=1),
    "120 schemas": ask(CHATS, *(form(schema(n)) for n in range(120))),
    "30 waiting streams of 2.6 MB": hold(CHATS, {"messages": [{"role": "user", "content": LONG}], "stream": True}, 30),
    "60 bodies of 3.9 MB that never end": hold(CHATS, {"x": "y" * 3_900_000}, 60, missing=1),
    "an enum of 60,000": ask(CHATS, *(form({"enum": [f"{prefix}{n}" for n in range(60_000)]}) for prefix in "ab")),
    "1,500 tools": ask(
        CHATS, *({"messages": HELLO, "max_tokens": 20, "tool_choice": choice, "edge": {"evict": True},
                  "tools": [tool(n) for n in range(1500)]} for choice in ("required", "auto")),
    ),
    "400 tools, eight times at once": ask(
        CHATS, *[{"messages": HELLO, "max_tokens": 4, "tools": [tool(n) for n in range(400)]}] * 8, clients=8,
    ),
    "log-probabilities": ask(
        CHATS, {"messages": HELLO, "n": 16, "max_tokens": 400, "logprobs": True, "top_logprobs": 20,
                "ignore_eos": True},
    ),
    "250,000 biases": ask(
        CHATS, *[{"messages": HELLO, "max_tokens": 4, "logit_bias": {f"{n}": 1 for n in range(250_000)}}] * 4,
    ),
    "200,000 empty lists": ask(CHATS, *[{"messages": HELLO, "max_tokens": 4, "x": [[]] * 200_000}] * 4),
    "answers without end": ask(
        CHATS, *[{"messages": HELLO, "max_tokens": 20_000, "ignore_eos": True, "edge": {"time": "20s"}}] * 3,
    ),
}  # fmt: skip


def attack(name: str, model: str, memory: str, *options: str) -> tuple[int, Counter[int]]:
    """The peak of a server's memory in bytes, and the statuses of its answers (0: none yet)."""
    with serving([model], "--memory", memory, *options) as (pid, port):
        found = ATTACKS[name](port)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and post(port, CHATS, {"messages": HELLO, "max_tokens": 2})[0] != 200:
            time.sleep(0.2)
        assert post(port, CHATS, {"messages": HELLO, "max_tokens": 2})[0] == 200, f"{name}: no answer any more"
        return resident(pid, "VmHWM"), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tests/golden/llama-gqa-tied.gguf")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--memory", default="128MiB")
    parser.add_argument("--only", help="attacks whose name has this text")
    given, options = parser.parse_known_args()
    for name in ATTACKS:
        if given.only and given.only not in name:
            continue
        peak, statuses = attack(name, given.model, given.memory, "--backend", given.backend, *options)
        over = "" if peak <= parse_bytes(given.memory) else "   OVER"
        print(f"{name:36} {format_bytes(peak):>9} of {given.memory} {dict(statuses)}{over}", flush=True)


if __name__ == "__main__":
    main()
