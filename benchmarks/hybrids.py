"""Hybrids and mixtures in their real shapes, with random weights: the native engine beside llama.cpp, in turns.

    python benchmarks/hybrids.py [NAME[@LAYERS] …] [--rounds 5] [--mixture Q4_0,Q4_K_M] [--memory 1.3GiB]
    python benchmarks/hybrids.py llama3.2:1b --llama-bench PATH    beside a fork's, such as ik_llama.cpp's

NAME: of edge's table of current models whose layers the native engine runs; @LAYERS: with only its first ones. Without
names: qwen3.5:0.8b, lfm2.5:1.2b, gemma4:e2b, and two mixtures of 2.3 and 2.7 GiB, all of which lie on the disk twice.
--mixture: Q4_0, Q4_K_M, Q6_K or Q8_0, as llama.cpp mixes their types; others, such as IQ4_NL, by its own quantizer
from a file in F16. Prints medians (range) of decoding 64 tokens behind a short text and of a prompt of 512 tokens, the
peak of the resident set of a fresh process that does both, KV rows and fixed state, and the machine. Both engines hold
f16 rows. A random router likes all experts equally. --memory: edge's figures within this budget, too. --remove: each
file behind its figures; one of gemma4:e2b takes 3.2 GiB, and edge's packed weights 1.3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from llama_bench import LlamaBench
from machine import files_folder, machine

from edge.backends import engine_named
from edge.backends.base import Engine, EngineConfig
from edge.converters.gguf.ggml import quantize_with_llamacpp
from edge.devices.host import usable_cores
from edge.devices.memory import memory_use
from edge.formats.blocks import block_size, nbytes
from edge.formats.gguf import GGUFFile, TensorInfo, read_gguf
from edge.model.mixtures import MIXTURES
from edge.model.names.known import KnownModel, known_models, outline_model
from edge.model.reader import read_spec
from edge.options import Options
from edge.plan.plan import make_plan

PROMPT, ANSWER, SHORT, CAPACITY = 512, 64, 16, 1024
ENGINES = ("cpu", "llamacpp")
NAMES = ("qwen3.5:0.8b", "lfm2.5:1.2b", "gemma4:e2b", "lfm2:8b-a1b@13", "qwen3:30b-a3b@7")
SPREAD = 0.02  # standard deviation of weights
SCALED = {  # places of d and of a minimum's factor, that factor / d, standard deviation of weights / d
    "Q4_0": (0, None, 0.0, 4.6),
    "Q8_0": (0, None, 0.0, 74.0),
    "Q4_K": (0, 2, 7.5, 258.5),
    "Q6_K": (208, None, 0.0, 18.5 * 74),
}
_SLAB = 1 << 20  # blocks written at once
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Drawn = Callable[[TensorInfo, np.random.Generator], Iterator[bytes]]
_BALANCED = np.array([byte | (0 if byte & 15 else 8) | (0 if byte >> 4 else 128) for byte in range(256)], np.uint8)


def make_file(name: str, mixture: str, kind: str = "random", drawn: Drawn | None = None) -> Path:
    """The model's file with random weights, written once. drawn: the bytes of a tensor, for files of another kind."""
    path = files_folder() / f"{name.replace(':', '-').replace('@', '-')}-{mixture}-{kind}.gguf"
    if not path.exists() and mixture not in MIXTURES:
        quantize_with_llamacpp(make_file(name, "F16", kind, drawn), path, mixture)
    elif not path.exists():
        partial = path.with_suffix(".partial")
        file, random = outline_model(first_layers(name), mixture, partial, loadable=True), np.random.default_rng(0)
        with open(partial, "r+b") as out:
            for info in file.tensors.values():
                out.seek(info.offset)
                for part in (drawn or random_tensor)(info, random):
                    out.write(part)
        partial.rename(path)
    return path


def first_layers(name: str) -> KnownModel:
    """The model called `name`, or `name@layers`."""
    known, _, layers = name.partition("@")
    model = known_models()[known]
    if not layers:
        return model
    count = int(layers)

    def cut(figures: dict[str, Any]) -> dict[str, Any]:
        """Without what lists say of other layers."""
        parts = {key: cut(each) if isinstance(each, dict) else each for key, each in figures.items()}
        return {key: each[:count] if isinstance(each, list) else each for key, each in parts.items()}

    return replace(model, figures=cut(model.figures) | {"block_count": count})


def random_tensor(info: TensorInfo, random: np.random.Generator, factor: float = 1.0) -> Iterator[bytes]:
    """factor: of the weights of block types."""
    if info.type == "F32":
        drawn = random.standard_normal(info.elements)
        if info.name.endswith("ssm_a"):
            drawn = -np.exp(drawn)
        elif info.name.startswith("rope_"):
            drawn = np.ones(info.elements)
        elif "norm" in info.name or info.name.endswith(".scale"):
            drawn = 1 + 0.1 * drawn
        elif info.name.endswith("ffn_gate_inp.weight"):
            drawn /= info.shape[0] ** 0.5
        elif "exp_probs_b" in info.name:
            drawn *= 0.05
        yield drawn.astype("<f4").tobytes()
        return
    if info.type == "F16":
        yield (SPREAD * random.standard_normal(info.elements)).astype("<f2").tobytes()
        return
    count = info.nbytes // bytes_of_block(info.type)
    for first in range(0, count, _SLAB):
        yield random_blocks(info.type, random, (min(_SLAB, count - first),), factor).tobytes()


def bytes_of_block(kind: str) -> int:
    return nbytes(kind, block_size(kind))


def random_blocks(kind: str, random: np.random.Generator, shape: tuple[int, ...], factor: float) -> Bytes:
    """Blocks of weights with the mean 0 and the standard deviation `factor` · SPREAD: weights with a mean make all
    tokens alike. Q4_0 goes without its lowest code, which none balances."""
    place, minimum, share, spread = SCALED[kind]
    blocks = random.integers(0, 256, (*shape, bytes_of_block(kind)), np.uint8)
    if kind == "Q4_0":
        blocks = _BALANCED[blocks]
    d = factor * SPREAD / spread
    for at, number in ((place, d), (minimum, share * d)):
        if at is not None:
            blocks[..., at : at + 2] = np.array([number], "<f2").view(np.uint8)
    return blocks


def timed(engine: Engine, count: int, steps: bool) -> float:
    """Tokens per second."""
    tokens = np.random.default_rng(1).integers(100, 1000, count + SHORT).astype(np.int32)
    engine.kv.truncate(0)
    if steps:
        engine.forward(tokens[:SHORT])
    started = time.perf_counter()
    if steps:
        for at in range(SHORT, SHORT + count):
            engine.forward(tokens[at : at + 1])
    else:
        engine.forward(tokens[:count])
    return count / (time.perf_counter() - started)


def compare(name: str, mixture: str, rounds: int, memory: str, bench: LlamaBench | None) -> None:
    path = make_file(name, mixture)
    file: GGUFFile = read_gguf(path)
    spec = read_spec(file)
    config = EngineConfig(CAPACITY, 256, "f16", usable_cores())
    engines = {each: engine_named(each).load(file, spec, config) for each in ENGINES}
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for each, engine in engines.items():
            for test, count in (("decode", ANSWER), (f"prefill {PROMPT}", PROMPT)):
                speed = timed(engine, count, test == "decode")
                if number:  # the first round warms up
                    found.setdefault((test, each), []).append(speed)
        if bench and number:
            for test, counts in (("decode", (0, ANSWER)), (f"prefill {PROMPT}", (PROMPT, 0))):
                found.setdefault((test, "llama-bench"), []).append(bench.run(path, *counts)[test.split()[0]])
    print(f"\n{name}, {mixture}, {spec.weight_bytes / 2**20:.0f} MiB of weights")
    print("| | edge | peer | edge × |\n|---|---:|---:|---:|")
    for test, peer in product(("decode", f"prefill {PROMPT}"), (ENGINES[1], *(["llama-bench"] if bench else []))):
        ours, theirs = found[test, "cpu"], found[test, peer]
        shown = [f"{statistics.median(x):.1f} ({min(x):.1f}–{max(x):.1f})" for x in (ours, theirs)]
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        print(f"| {test}, tok/s, {peer} | {shown[0]} | {shown[1]} | {ratio:.2f} |")
    kv = engines["cpu"].kv
    rows = f"KV rows {(kv.nbytes - kv.fixed) / CAPACITY / 1024:.1f} KiB a token, fixed state {kv.fixed / 2**20:.2f} MiB"
    for engine in engines.values():
        with closing(engine):
            pass
    ours, theirs = (alone(name, mixture, each) for each in ENGINES)
    peaks = [each["peak"] / 2**20 for each in (ours, theirs)]
    print(f"| peak of a process, MiB | {peaks[0]:.0f} | {peaks[1]:.0f} | {peaks[0] / peaks[1]:.2f} |")
    if memory:
        found = alone(name, mixture, "cpu", memory)
        print(
            f"| within {memory}: decode, prefill {PROMPT}, tok/s; peak, MiB | {found['decode']:.1f}, "
            f"{found['prefill']:.1f}; {found['peak'] / 2**20:.0f} | | |"
        )
    print(rows)


def alone(name: str, mixture: str, engine: str, memory: str = "") -> dict[str, float]:
    """The figures of a process that runs one engine."""
    command = [sys.executable, __file__, name, "--mixture", mixture, "--alone", engine, "--memory", memory]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def measure(name: str, mixture: str, engine: str, memory: str) -> dict[str, float]:
    """What `alone` returns, of this process. Within a budget, edge's own plan decides."""
    file = read_gguf(make_file(name, mixture))
    spec, backend = read_spec(file), engine_named(engine)
    config = EngineConfig(CAPACITY, 256, "f16", usable_cores())
    if memory:
        options = Options.parse(memory=memory, max_kv_size=CAPACITY, kv_dtype="f16", kv_policy="full")
        config = make_plan(spec, backend, options).config
    with closing(backend.load(file, spec, config)) as loaded:
        found = {"prefill": timed(loaded, PROMPT, steps=False), "decode": timed(loaded, ANSWER, steps=True)}
    return found | {"peak": memory_use().peak}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", default=NAMES)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--mixture", default="Q4_0")
    options.add_argument("--memory", default="")
    options.add_argument("--llama-bench", type=Path, help="measure this llama-bench, too")
    options.add_argument("--llama-args", default="-fa 1", help="more of its arguments")
    options.add_argument("--remove", action="store_true", help="remove each file behind its figures")
    options.add_argument("--alone", default="", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.alone:
        print(json.dumps(measure(chosen.names[0], chosen.mixture, chosen.alone, chosen.memory)))
        return
    print(machine())
    arguments = ("-t", str(usable_cores()), *chosen.llama_args.split())
    bench = LlamaBench(chosen.llama_bench, arguments) if chosen.llama_bench else None
    for name, mixture in product(chosen.names, chosen.mixture.split(",")):
        compare(name, mixture, chosen.rounds, chosen.memory, bench)
        if chosen.remove:
            make_file(name, mixture).unlink()


if __name__ == "__main__":
    main()
