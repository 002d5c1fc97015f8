"""edge for `peers.py`: its engine behind the line protocol, or a plain script through `edge.load`.

edge_worker.py serve  FILE BACKEND[:KV] THREADS CELLS [SEQUENCES]  KV: the dtype of its rows, f16 unless stated. THREADS
                                                       below 0: so many in every pass (cpu)
edge_worker.py start  FILE BACKEND THREADS CELLS       one token after a 16-token text
edge_worker.py memory FILE BACKEND THREADS CELLS N     N random tokens, the last 32 of them generated
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import numpy.typing as npt
from protocol import ANSWER_TOKENS, START_TEXT, Steps, Tokens, peak_memory, random_tokens, serve

import edge

if TYPE_CHECKING:
    from edge.backends.base import BatchedEngine


class EdgeSteps(Steps):
    def __init__(self, path: str, backend: str, threads: int, cells: int, sequences: int = 1) -> None:
        from edge.backends import find_backend
        from edge.backends.base import EngineConfig
        from edge.model.model import open_model

        backend, _, kv_dtype = backend.partition(":")
        model = open_model(path)
        module = find_backend(backend, model.file, model.spec)
        repack = module.can_repack(model.spec)
        config = EngineConfig(
            cells, chunk=512, kv_dtype=kv_dtype or "f16", threads=abs(threads), repack=repack, sequences=sequences
        )
        self._engine = module.load(model.file, model.spec, config)
        if threads < 0:
            from edge.backends.tvm.cpu.arguments import Job

            cast(Any, self._engine).passes.workers._job[Job.slot("fixed")] = 1
        self.vocab = model.spec.vocab
        self.version = ", ".join(f"{name} {version}" for name, version in module.versions().items())

    def run(self, tokens: Tokens) -> npt.NDArray[Any]:
        return self._engine.forward(tokens)

    def run_batch(self, tokens: Tokens) -> npt.NDArray[Any]:
        return cast("BatchedEngine", self._engine).forward_batch(tokens, range(tokens.size))

    def fill_sequences(self, count: int, tokens: Tokens) -> None:
        for number in range(count):
            sequence = cast("BatchedEngine", self._engine).sequence(number)
            sequence.kv.truncate(0)
            sequence.forward(tokens)

    def truncate(self, rows: int) -> None:
        self._engine.kv.truncate(rows, self._end if rows else None)

    def remember_end(self) -> None:
        from edge.backends.kv_cache import end_of

        self._end = end_of(self._engine.kv)


def start(path: str, backend: str, threads: int, cells: int) -> None:
    with edge.load(path, backend=backend, max_kv_size=cells, threads=threads, kv_dtype="f16") as session:
        text = session.generate(START_TEXT, raw=True, max_tokens=1, ignore_eos=True)
        print("TOKEN", repr(text), flush=True)


def memory(path: str, backend: str, threads: int, cells: int, count: int) -> None:
    with edge.load(path, backend=backend, max_kv_size=cells, threads=threads, kv_dtype="f16") as session:
        prompt = random_tokens(count - ANSWER_TOKENS, 1, session.spec.vocab)
        session.generate(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        print("PEAK", peak_memory(), flush=True)


def main(mode: str, path: str, backend: str, threads: int, cells: int, *rest: int) -> None:
    if mode == "serve":
        serve(lambda: EdgeSteps(path, backend, threads, cells, *rest))
    elif mode == "start":
        start(path, backend, threads, cells)
    else:
        memory(path, backend, threads, cells, *rest)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
