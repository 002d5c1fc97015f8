"""The protocol between a worker and its parent: one JSON object per line, over stdin and stdout.

A worker loads its engine, writes `{"ready": true, "version": …}`, and then answers one request at a time:

- `{"op": "prefill", "n": 512, "seed": 1}` → `{"seconds": …}`: n random token ids into an empty cache, logits after the
  last one there to be read. With `"depth": 4096` behind those rows.
- `{"op": "decode", "depth": 4096, "n": 64, "seed": 1}` → `{"seconds": …}`: n steps of one token and its argmax, in a
  cache that holds `depth` rows when the clock starts. The rows are always the same ones, so they may be kept.
- `{"op": "batch", "sequences": 4, "depth": 64, "n": 64, "seed": 1}` → `{"seconds": …}`: n tokens in passes of the next
  token of each of 4 sequences and their argmaxes, where each holds `depth` rows when the clock starts.
- `{"op": "memory"}` → `{"peak": bytes}`: the process's peak resident set.

It stops when stdin ends. Only the standard library and NumPy may be imported here: workers run in other environments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FILL_SEED = 12345
START_TEXT = "The sea was calm that morning, and the old boat lay quiet on the sand"  # 16 tokens of SmolLM2
ANSWER_TOKENS = 32  # generated at the end of the run whose memory is measured

Tokens = npt.NDArray[np.int32]


class Measured(Protocol):
    """The measurements of a worker; both return seconds."""

    version: str
    vocab: int

    def prefill(self, tokens: Tokens, depth: int) -> float: ...

    def decode(self, depth: int, tokens: Tokens) -> float: ...

    def batch(self, count: int, depth: int, tokens: Tokens) -> float: ...


class Steps:
    """`prefill` and `decode` for an engine that runs the tokens it is given; subclasses supply `run` and `truncate`."""

    version = ""
    vocab = 0
    _filled = 0  # rows of the fixed filling that the cache begins with

    def run(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """Append the tokens; logits after the last."""
        raise NotImplementedError

    def truncate(self, rows: int) -> None:
        """Keep only the first rows: those of the filling, or none."""
        raise NotImplementedError

    def remember_end(self) -> None:
        """The cache holds the filling: save what `truncate` needs to come back to its end, if anything."""

    def prefill(self, tokens: Tokens, depth: int) -> float:
        self._fill(depth)
        started = time.perf_counter()
        float(self.run(tokens)[0])
        return time.perf_counter() - started

    def decode(self, depth: int, tokens: Tokens) -> float:
        self._fill(depth)
        steps = [tokens[i : i + 1] for i in range(tokens.size)]
        started = time.perf_counter()
        for step in steps:
            int(self.run(step).argmax())
        return time.perf_counter() - started

    def run_batch(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """Append one token to each of the first sequences; their logits."""
        raise NotImplementedError

    def fill_sequences(self, count: int, tokens: Tokens) -> None:
        """The first sequences hold these tokens, and nothing else."""
        raise NotImplementedError

    def batch(self, count: int, depth: int, tokens: Tokens) -> float:
        self._filled = 0
        self.fill_sequences(count, random_tokens(depth, FILL_SEED, self.vocab))
        started = time.perf_counter()
        for step in tokens[: tokens.size // count * count].reshape(-1, count):
            self.run_batch(step).argmax(axis=1)
        return time.perf_counter() - started

    def _fill(self, depth: int) -> None:
        if depth and self._filled == depth:
            self.truncate(depth)
            return
        self.truncate(0)
        if depth:
            self.run(random_tokens(depth, FILL_SEED, self.vocab))
            self.remember_end()
        self._filled = depth


def random_tokens(count: int, seed: int, vocab: int) -> Tokens:
    """Token ids, int32 [count], none of the first 100: special tokens are there.

    Each count begins with other ids, so that an engine that caches prefixes cannot skip a part.
    """
    return np.random.default_rng((seed, count)).integers(100, vocab, count, dtype=np.int32)


def peak_memory() -> int:
    """VmHWM of this process, bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def take_stdout() -> Any:
    """The real stdout as a file; everything that engines print from now on goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


def serve(load: Callable[[], Measured]) -> None:
    """Load, then answer until stdin ends. A failure is reported, not raised: the parent skips the engine."""
    out = take_stdout()

    def say(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    try:
        engine = load()
        say(ready=True, version=engine.version)
        for line in sys.stdin:
            request = json.loads(line)
            if request["op"] == "memory":
                say(peak=peak_memory())
                continue
            tokens = random_tokens(request["n"], request["seed"], engine.vocab)
            if request["op"] == "prefill":
                say(seconds=engine.prefill(tokens, request.get("depth", 0)))
            elif request["op"] == "batch":
                say(seconds=engine.batch(request["sequences"], request["depth"], tokens))
            else:
                say(seconds=engine.decode(request["depth"], tokens))
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}".splitlines()[0][:200])
