"""A bundle of `edge export` beside peers: size, memory, speed, start, and the overhead of its loop.

    python benchmarks/bundle.py [--model smollm2-135m] [--rows 512] [--tokens 20000] [--rounds 9] [--threads N]
    python benchmarks/bundle.py --rows 256 --tokens 600 --rounds 1      a test that everything runs

A program in C (peers/bundle_worker.c), linked with the bundle's libedge.a, is the app; it needs a C compiler.

- library: libedge.so, which is stripped, with all instruction sets. Peers' sizes are as they publish them.
- memory: the peak resident set of a fresh process that runs half of the tokens as a prompt, and generates the others,
  in --rows KV rows. llama.cpp, which evicts nothing, has a cell for every token, and runs the first of them; of its
  process only what it takes itself counts, without Python. With as many cells as the bundle has rows it runs as many
  tokens.
- decode: 128 tokens of one text, turn by turn with the Python engine, whose plan has the same rows, threads and policy.
  Both must write the same text. CPU time tells more where other programs run.
- overhead: the time of edge_next outside the compiled pass, per token, in these turns.
- start: in a fresh process, files in the page cache: from edge_open to the first token, of a prompt of one token and of
  16.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from machine import machine, say

import edge
from edge.apps.constants import CONSTANTS, constants_header
from edge.apps.library import COMMON
from edge.budget import format_bytes
from edge.cli.terminal.show import table
from edge.devices.host import usable_cores
from edge.errors import UnsupportedError

PEERS = Path(__file__).parent / "peers"
PHONE = "pixel-9"
STEPS = 128
STARTS = 9
LLAMA_RUNS = 1_024  # tokens of those that llama.cpp has cells for: their memory is resident from the start
TEXTS = {1: "The", 16: "The sea was calm that morning, and the old boat lay quiet on the sand"}  # tokens of SmolLM2
LLAMA = f"""
import sys
sys.path.insert(0, {str(PEERS)!r})
from llama_worker import LlamaSteps
from protocol import peak_memory, random_tokens
path, threads, cells, count = sys.argv[1], *map(int, sys.argv[2:])
before = peak_memory()
engine = LlamaSteps(path, threads, cells)
logits = engine.run(random_tokens(count - 32, 1, engine.vocab))
for _ in range(32):
    logits = engine.run(logits.argmax(keepdims=True).astype("int32"))
print(peak_memory() - before)
"""

# Not measured here: what they publish. Megabytes, and where.
PEERS_SIZES = (
    ("ExecuTorch, AAR", "6.6 MB", "pytorch/executorch#17614"),
    ("llama.rn, one of its variants for arm64", "about 9 MB", "a-ghorbani/pocketpal-ai#750"),
    ("MNN, its core alone, armv7a", "about 0.8 MB", "README of alibaba/MNN"),
)


class App:
    """The program in C, with its model."""

    def __init__(self, bundle: Path, threads: int) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise SystemExit("bundle.py needs a C compiler: apt-get install gcc")
        self._program, self._model, self._threads = bundle / "worker", bundle / "model.edge", threads
        (bundle / CONSTANTS).write_text(constants_header(), encoding="utf-8")
        includes = [f"-I{each}" for each in (*COMMON, bundle)]
        command = [compiler, "-std=gnu11", "-O2", *includes, str(PEERS / "bundle_worker.c")]
        libraries = [str(bundle / "libedge.a"), "-lm", "-lpthread", "-Wl,-z,norelro"]
        subprocess.run([*command, *libraries, "-o", str(self._program)], check=True)

    def command(self, *words: object) -> list[str]:
        return [str(self._program), str(self._model), str(self._threads), *map(str, words)]

    def run(self, *words: object) -> dict[str, Any]:
        done = subprocess.run(self.command(*words), check=True, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


class Decoder:
    """The program in C, ready to answer the same text again and again."""

    def __init__(self, app: App) -> None:
        self._process: Any = subprocess.Popen(
            app.command("decode", STEPS), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, text: str) -> dict[str, Any]:
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def sizes(model: edge.Model, bundle: Path, folder: Path, options: dict[str, Any]) -> list[list[str]]:
    """Bytes of the libraries for this machine and for a phone, and what peers publish."""
    lines = [library_line(bundle)]
    try:
        edge.export(model, folder / "phone", device=PHONE, **options)
        lines.append(library_line(folder / "phone"))
    except UnsupportedError as error:  # no compiler for it
        say(f"{PHONE}: {error}")
    return lines + [list(each) for each in PEERS_SIZES]


def library_line(bundle: Path) -> list[str]:
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    device, library = manifest["device"], next(bundle.rglob("libedge.so"))
    name = f"edge, {device['machine']} for {device['system']}: {', '.join(manifest['isas'])}"
    return [name, f"{library.stat().st_size / 1e6:.2f} MB", "measured"]


def memory(app: App, model: Path, manifest: dict[str, Any], tokens: int, threads: int) -> list[list[str]]:
    found = app.run("memory", tokens // 2, tokens - tokens // 2)
    peak, needed, plan = found["peak"], found["weights"] + found["kv"], manifest["plan"]
    lines = [
        [f"weights + {plan['kv_size']} KV rows in {plan['kv_dtype']}", format_bytes(needed), ""],
        [f"bundle: peak, {found['tokens']} tokens, {found['evicted']} rows evicted", format_bytes(peak), "1"],
        ["beyond weights and KV", f"{(peak - needed) / 2**20:.1f} MiB", ""],
        ["bound in its manifest (estimated)", format_bytes(plan["peak"]), f"{plan['peak'] / peak:.2f}"],
    ]
    for cells, count in ((tokens + 32, min(tokens, LLAMA_RUNS)), (plan["kv_size"], plan["kv_size"] - 32)):
        say(f"llama.cpp with {cells} cells ...")
        command = [sys.executable, "-c", LLAMA, *map(str, (model, threads, cells, count))]
        theirs = int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        lines.append([f"llama.cpp: peak, {cells} cells, {count} tokens", format_bytes(theirs), f"{theirs / peak:.2f}"])
    return lines


def decode(app: App, session: edge.Session, rounds: int) -> list[list[str]]:
    """Speeds, and the time outside the pass."""
    prompt = session.model.encode_prompt(TEXTS[16], raw=True)
    greedy = edge.SamplingParams(temperature=0)

    def python() -> tuple[float, float, str]:
        """tok/s, CPU seconds, text."""
        pieces = session.stream(prompt, max_tokens=STEPS + 1, sampling=greedy, ignore_eos=True)
        text, began = next(pieces), time.process_time()
        text += "".join(pieces)
        busy = time.process_time() - began
        assert session.report is not None
        speed = session.report.timings.decode_tok_s
        assert speed is not None
        return speed, busy, text

    with closing(Decoder(app)) as decoder:
        decoder.run(TEXTS[16]), python()  # warm up
        pairs = []
        for number in range(rounds):
            say(f"decode, round {number + 1} of {rounds} ...")
            pairs.append((decoder.run(TEXTS[16]), python()))
    same = session.tokenizer.decode(pairs[0][0]["tokens"]) == pairs[0][1][2]
    ours, theirs = [STEPS / found["seconds"] for found, _ in pairs], [found[0] for _, found in pairs]
    busy, theirs_busy = [found["cpu"] for found, _ in pairs], [found[1] for _, found in pairs]
    outside = [(found["seconds"] - found["passes"]) / STEPS * 1e6 for found, _ in pairs]
    return [
        ["bundle, tok/s", *spread(ours, ".1f")],
        ["Python engine, tok/s", *spread(theirs, ".1f")],
        ["ratio, pair by pair", *spread([a / b for a, b in zip(ours, theirs, strict=True)], ".3f")],
        ["bundle, CPU ms per token", *spread([each / STEPS * 1e3 for each in busy], ".2f")],
        ["Python engine, CPU ms per token", *spread([each / STEPS * 1e3 for each in theirs_busy], ".2f")],
        ["outside the pass, µs per token", *spread(outside, ".1f")],
        ["the same text", "yes" if same else "NO", "", ""],
    ]


def start(app: App) -> list[list[str]]:
    lines = []
    for count, text in TEXTS.items():
        app.run("start", text)
        runs = [app.run("start", text) for _ in range(STARTS)]
        if not lines:
            lines.append(["edge_open and edge_begin, ms", *spread([1e3 * run["opened"] for run in runs], ".1f")])
        times = [1e3 * run["seconds"] for run in runs]
        lines.append([f"edge_open to the first token, prompt of {count}, ms", *spread(times, ".1f")])
    return lines


def spread(values: Sequence[float], form: str) -> list[str]:
    return [format(value, form) for value in (min(values), statistics.median(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=512, help="KV rows")
    parser.add_argument("--tokens", type=int, default=20_000, help="that run while memory is measured")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=usable_cores())
    asked = parser.parse_args()
    model = edge.open_model(asked.model)
    options = {"max_kv_size": asked.rows, "kv_policy": "streaming", "threads": asked.threads}
    options["expected_tokens"] = asked.tokens
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        say("exporting ...")
        manifest = edge.export(model, bundle, **options)
        plan = manifest["plan"]
        size_lines = sizes(model, bundle, Path(folder), options)
        app = App(bundle, asked.threads)
        memory_lines = memory(app, model.path, manifest, asked.tokens, asked.threads)
        start_lines = start(app)
        chosen = {name: plan[name] for name in ("kv_dtype", "prefill_step_size")}
        with edge.load(model, backend="cpu", **options | chosen) as session:
            decode_lines = decode(app, session, asked.rounds)
    print(f"\n## {manifest['model']['label']} in {plan['kv_size']} KV rows, {asked.threads} threads\n")
    print(f"{json.dumps(machine(), ensure_ascii=False)}\n")
    print(table(["library, stripped", "size", "source"], size_lines), end="\n\n")
    print(table(["memory", "bytes", "× bundle"], memory_lines), end="\n\n")
    print(table([f"decode, {asked.rounds} pairs of {STEPS} tokens", "min", "median", "max"], decode_lines), end="\n\n")
    print(table([f"start, {STARTS} processes", "min", "median", "max"], start_lines))


if __name__ == "__main__":
    main()
