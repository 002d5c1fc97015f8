"""A mixture larger than its memory: experts in slots beside llama.cpp's mapped file, within the same cgroup.

    python benchmarks/experts.py [NAME[@LAYERS]] [--shares 1,0.6,0.3] [--rounds 3] [--mixture Q4_0]

NAME: of edge's table of current models (default: the first 7 layers of Qwen3-30B-A3B, 2.7 GiB, which lie on the disk
twice). Weights are random, but routers have favourites and tokens topics, so that choices are skewed and persist, as in
trained models: a uniform router cannot test a cache. A share is the part of the weights for which the memory leaves
room. Each run is a process of its own in a cgroup that limits it and its page cache, and begins with both files out of
the page cache. Prints medians of decode, after a warm-up, of a prompt of 128 tokens from the cold start, and the bytes
that the process read from the disk for each token. Without a cgroup it stops, unless --free: then only edge is limited,
by --memory, and everything comes from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from hybrids import Bytes, bytes_of_block, make_file, random_blocks, random_tensor
from limited import cgroup, limit
from machine import files_folder, machine
from streaming import forget

from edge.budget import format_bytes
from edge.cli.terminal.show import table
from edge.formats.gguf import TensorInfo, read_gguf
from edge.model.reader import read_spec

NAME = "qwen3:30b-a3b@7"
TOPICS, PART = 8, 16  # a sixteenth of an embedding is the same for all tokens, another for those of a topic
LOUD, CALM, LIKED = 25.0, 0.2, 1.6  # factors of embeddings, of attention, and of a router's weights for these parts
PROMPT, WARM, STEPS, CAPACITY = 128, 48, 64, 512
MOST_S = 120  # seconds of decoding; llama.cpp takes seconds for a token where it reads all of it from the disk
ROOM = 160 << 20  # beside weights: both processes' interpreter, rows and buffers
RUN = f"""
import json, os, sys, time
import numpy as np

engine, path, memory, group, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], np.load(sys.argv[5])
if group:
    with open(group + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
from pathlib import Path
from edge.backends import engine_named
from edge.backends.base import EngineConfig
from edge.devices.host import usable_cores
from edge.formats.gguf import read_gguf
from edge.model.reader import read_spec
from edge.options import Options
from edge.plan.plan import make_plan

def read():
    return int(next(line for line in open("/proc/self/io") if line.startswith("read_bytes")).split()[1])

file, backend = read_gguf(Path(path)), engine_named(engine)
spec, config = read_spec(file), EngineConfig({CAPACITY}, 128, "f16", usable_cores())
if engine == "cpu":
    config = make_plan(spec, backend, Options(memory=memory, max_kv_size={CAPACITY})).config
loaded, found = backend.load(file, spec, config), {{}}
def run(name, ids, steps):
    before, began, done, size = read(), time.perf_counter(), 0, 1 if steps else len(ids)
    while done < len(ids) and time.perf_counter() - began < {MOST_S}:
        loaded.forward(ids[done : done + size])
        done += size
    found[name] = done / (time.perf_counter() - began)
    found[name + "_read"] = (read() - before) / done
run("prefill", tokens[:{PROMPT}], False)
loaded.kv.truncate(0)
run("warm", tokens[{PROMPT} : {PROMPT + WARM}], True)
counts = getattr(loaded, "experts", None)
chosen, missed = (counts.choices, counts.misses) if counts else (0, 0)
run("decode", tokens[{PROMPT + WARM} :], True)
if counts:
    found["hits"] = 1 - (counts.misses - missed) / (counts.choices - chosen)
    found["slots"] = counts.slots / counts.experts
found["peak"] = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10
print(json.dumps(found))
"""


def _skewed(info: TensorInfo, random: np.random.Generator) -> Iterator[bytes]:
    if info.name == "token_embd.weight":
        yield from _of_topics(info, random)
    elif info.name.endswith("ffn_gate_inp.weight"):
        columns, rows = info.shape
        router = random.standard_normal((rows, columns)) / columns**0.5
        router[:, : 2 * columns // PART] *= LIKED
        yield router.astype("<f4").tobytes()
    else:
        calm = ".attn_output." in info.name  # averages of tokens, and so the same for all
        yield from random_tensor(info, random, CALM if calm else 1.0)


def _of_topics(info: TensorInfo, random: np.random.Generator) -> Iterator[bytes]:
    """Embeddings: common blocks, those of the topic (token mod TOPICS), and their own."""
    rows = info.shape[1]
    blocks = info.nbytes // bytes_of_block(info.type) // rows
    part = max(1, blocks // PART)

    def drawn(count: int, width: int) -> Bytes:
        return random_blocks(info.type, random, (count, width), LOUD)

    common, topics = drawn(1, part), drawn(TOPICS, part)
    for first in range(0, rows, 4096):
        count = min(4096, rows - first)
        own = drawn(count, blocks)
        own[:, :part] = common
        own[:, part : 2 * part] = topics[(first + np.arange(count)) % TOPICS]
        yield own.tobytes()


def tokens_of_topics(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Tokens of a text that changes its topic every 40 tokens or so."""
    random = np.random.default_rng(1)
    topic, found = 0, np.empty(count, np.int32)
    for at in range(count):
        topic = int(random.integers(TOPICS)) if random.random() < 1 / 40 else topic
        found[at] = int(random.integers(10, 1000)) * TOPICS + topic
    return found


def run(engine: str, path: Path, memory: int, group: Path | None, tokens: Path) -> dict[str, float]:
    if group:
        limit(group, memory)
    forget(path.name)
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-c", RUN, engine, str(path), str(memory), str(group or ""), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "EDGE_HISTORY": "0"})
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return {"failed": done.returncode} | dict(print(f"{engine} within {format_bytes(memory)}: {said}") or {})
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(path: Path, shares: list[float], rounds: int, group: Path | None) -> None:
    spec = read_spec(read_gguf(path))
    tokens = files_folder() / "tokens.npy"
    np.save(tokens, tokens_of_topics(PROMPT + WARM + STEPS))
    run("cpu", path, 1 << 40, None, tokens)  # compiles, and packs
    rows = []
    for share in shares:
        memory, found = ROOM + int(share * spec.weight_bytes), dict[str, list[dict[str, float]]]()
        for _ in range(rounds):
            for engine in ("cpu", "llamacpp"):
                found.setdefault(engine, []).append(run(engine, path, memory, group, tokens))
        ours, theirs = ([each for each in found[engine] if "failed" not in each] for engine in ("cpu", "llamacpp"))

        def median(runs: list[dict[str, float]], name: str) -> float:
            return statistics.median([each.get(name, 0.0) for each in runs] or [float("nan")])

        rows.append([
            f"{share:.0%}", format_bytes(memory), f"{median(ours, 'slots'):.0%}", f"{median(ours, 'hits'):.0%}",
            *(f"{median(each, 'decode'):.2f}" for each in (ours, theirs)),
            f"{median(ours, 'decode') / median(theirs, 'decode'):.2f}",
            *(f"{median(each, 'decode_read') / 2**20:.1f}" for each in (ours, theirs)),
            *(f"{median(each, 'prefill'):.1f}" for each in (ours, theirs)),
            f"{median(ours, 'prefill') / median(theirs, 'prefill'):.2f}",
            format_bytes(int(max((each["peak"] for each in ours), default=0))),
        ])  # fmt: skip
    print(f"\n{path.stem}: {format_bytes(spec.weight_bytes)}, of it experts {format_bytes(spec.expert_bytes)}\n")
    heads = [
        "share", "memory", "experts held", "hits", "decode edge", "llama.cpp", "×", "MiB read/token edge", "llama.cpp",
        "prefill edge", "llama.cpp", "×", "peak edge",
    ]  # fmt: skip
    print(table(heads, rows))


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("name", nargs="?", default=NAME)
    options.add_argument("--shares", default="1,0.6,0.3")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--mixture", default="Q4_0")
    options.add_argument("--free", action="store_true", help="without a cgroup")
    chosen = options.parse_args()
    print(machine())
    path = make_file(chosen.name, chosen.mixture, "skewed", _skewed)
    with nullcontext() if chosen.free else cgroup(0) as group:
        if group is None and not chosen.free:
            sys.exit("this needs a cgroup whose memory can be limited, and none can be made here (--free: without)")
        compare(path, [float(share) for share in chosen.shares.split(",")], chosen.rounds, group)


if __name__ == "__main__":
    main()
