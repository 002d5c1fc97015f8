"""The cost of a LoRA adapter at run time: decode and prefill with one of rank 16 on all matrices, against none.

    python benchmarks/lora.py [MODEL] [--rank 16] [--rounds 21] [--threads N] [--engines cpu,llamacpp]

Each engine is loaded twice, with a random adapter (float16, as converters write it) and without, in one process. The
two take turns (A B A B); a ratio is the median over pairs of turns. CPU time is that of the process, all threads.

- decode: 32 steps behind 64 rows. prefill: 256 tokens into an empty cache.
- same tokens: of 256 predictions, those whose likeliest token is that of llama.cpp with the same adapter.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import cast

import gguf
import numpy as np

from edge.backends import find_backend
from edge.backends.base import AdaptedEngine, Engine, EngineConfig
from edge.cli.terminal.show import table
from edge.devices.host import usable_cores
from edge.model.adapters.lora import Lora, open_lora
from edge.model.adapters.lora_file import LoraFile
from edge.model.model import Model, open_model

STEPS, DEPTH, PROMPT, CHUNK, ROWS = 32, 64, 256, 128, 512
WORK = ("decode", "prefill")

Work = Callable[[], None]
Cost = tuple[float, float]  # seconds: wall, CPU


def write_adapter(path: Path, model: Model, rank: int) -> Path:
    random, writer = np.random.default_rng(1), gguf.GGUFWriter(path, model.spec.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0 * rank)
    for name, info in model.file.tensors.items():
        if name.startswith("blk.") and len(info.shape) == 2:
            columns, rows = info.shape
            for suffix, shape, size in (("lora_a", (rank, columns), columns), ("lora_b", (rows, rank), 100 * rank)):
                values = random.standard_normal(shape) / np.sqrt(size)
                writer.add_tensor(f"{name}.{suffix}", values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(model: Model, backend: str, threads: int, lora: Lora | None) -> Engine:
    module = find_backend(backend, model.file, model.spec)
    size = lora.size if lora else None
    config = EngineConfig(
        ROWS, CHUNK, "f16", threads, logits_rows=CHUNK, repack=module.can_repack(model.spec),
        lora_rank=size.rank if size else 0, lora_bytes=size.nbytes if size else 0,
    )  # fmt: skip
    engine = module.load(model.file, model.spec, config)
    if lora is not None:
        cast(AdaptedEngine, engine).set_lora(lora)
    return engine


def cost_of(engine: Engine, tokens: np.ndarray, what: str) -> Cost:
    """Of a step, or of a token of the prompt."""
    engine.kv.truncate(0)
    if what == "decode":
        engine.forward(tokens[:DEPTH])
    wall, cpu = time.perf_counter(), time.process_time()
    if what == "decode":
        for at in range(STEPS):
            engine.forward(tokens[at : at + 1])
    else:
        engine.forward(tokens)
    count = STEPS if what == "decode" else tokens.size
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def measure(plain: Engine, adapted: Engine, tokens: np.ndarray, what: str, rounds: int) -> list[str]:
    pairs = []
    for turn in range(rounds + 1):
        pair = (cost_of(plain, tokens, what), cost_of(adapted, tokens, what))
        if turn:  # the first warms up
            pairs.append(pair)
    speeds = [1 / statistics.median(pair[index][0] for pair in pairs) for index in (0, 1)]
    wall, cpu = (statistics.median(adapted[kind] / plain[kind] for plain, adapted in pairs) for kind in (0, 1))
    return [f"{speeds[0]:.1f}", f"{speeds[1]:.1f}", f"{wall:.3f}", f"{cpu:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--engines", default="cpu,llamacpp")
    options = parser.parse_args()
    model, rows, likeliest = open_model(options.model), list[list[str]](), dict[str, np.ndarray]()
    tokens = np.random.default_rng(2).integers(3, model.spec.vocab, PROMPT).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = write_adapter(Path(folder) / "adapter.gguf", model, options.rank)
        lora = open_lora([LoraFile(path)], model.file, model.spec)
        assert lora is not None
        for backend in options.engines.split(","):
            plain, adapted = (
                stack.enter_context(closing(load(model, backend, options.threads, each))) for each in (None, lora)
            )
            likeliest[backend] = adapted.forward_all(tokens).argmax(axis=1)
            for what in WORK:
                print(f"{backend} {what} ...", file=sys.stderr, flush=True)
                rows.append([backend, what, *measure(plain, adapted, tokens, what, options.rounds)])
        nbytes = lora.size.nbytes
    headings = ["engine", "", "tok/s without", "tok/s with", "time, ratio", "CPU time, ratio"]
    print(
        f"\n## An adapter of rank {options.rank} on all matrices, {options.threads} threads, {options.rounds} pairs\n"
    )
    print(table(headings, rows, left=2))
    same = {name: (found == likeliest.get("llamacpp")).mean() for name, found in likeliest.items()}
    if "llamacpp" in same:
        print("\n" + ", ".join(f"{name}: {100 * share:.1f} % same tokens" for name, share in same.items()))
    print(f"\n{model.spec.label}, adapter {nbytes / 2**20:.1f} MiB in float16 · {_lscpu()}")


def _lscpu() -> str:
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = ("Model name", "CPU family", "Model", "CPU(s)", "L3 cache")
    return ", ".join(f"{name} {fields[name].strip()}" for name in names if name in fields)


if __name__ == "__main__":
    main()
