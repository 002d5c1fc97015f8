"""The cost of a token that an EAGLE-3 head drafts, beside its model's, in real shapes with random weights: no gains.

    python benchmarks/eagle_cost.py [--model qwen3:1.7b] [--types q4_0,q8_0] [--rows 512] [--rounds 20] [--threads 2]

CPU milliseconds (of all threads, the least of the rounds), which other programs change less than the clock's: of a step
of the model without and with inputs of layers kept, of a draft's first token (one row of features), of each further
token, and of passes over 2 and 4 tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine, say

from edge.backends import engine_named
from edge.backends.base import EngineConfig
from edge.cli.terminal.show import table
from edge.formats.blocks import nbytes
from edge.formats.gguf import GGUFFile, read_gguf
from edge.formats.gguf_writer import Field, Planned, write_gguf
from edge.model.drafters.eagle import plain_file, read_eagle
from edge.model.names.known import known_models, outline_model
from edge.model.reader import read_spec
from edge.types import AnyArray

TAPS, ROWS_OF_HEAD = 3, 32_000
RANDOM = np.random.default_rng(1)


def drawn(plan: Planned) -> AnyArray:
    """Blocks of small values: random codes, and a scale of 2⁻⁸ in float16 before each block."""
    count = int(np.prod(plan.shape))
    if plan.type == "F32":
        return np.ones(count, np.float32)
    size = nbytes(plan.type, 32)
    blocks = RANDOM.integers(0, 256, (count // 32, size), dtype=np.uint8)
    blocks[:, :2] = np.array([2.0**-8], np.float16).view(np.uint8)
    return blocks


def write(path: Path, fields: dict[str, Field], planned: list[Planned]) -> GGUFFile:
    write_gguf(path, fields, planned, map(drawn, planned))
    return read_gguf(path)


def model_file(path: Path, name: str, kind: str) -> GGUFFile:
    outline = outline_model(known_models()[name], kind.upper(), path.with_suffix(".outline"))
    planned = [
        Planned(info.name, info.shape, info.type if info.type == "F32" else kind.upper())
        for info in outline.tensors.values()
    ]
    return write(path, {key: outline.field_bytes(key) for key in outline.metadata}, planned)


def head_file(path: Path, model: GGUFFile, kind: str) -> GGUFFile:
    spec = read_spec(model)
    own = spec.layers // 2
    numbers = {
        "embedding_length": spec.hidden, "block_count": 1, "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads, "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim, "feed_forward_length": spec.ffn, "context_length": 4096,
        "target_hidden_size": spec.hidden,
    }  # fmt: skip
    fields: dict[str, Field] = {f"eagle3.{key}": np.uint32(value) for key, value in numbers.items()}
    fields |= {"general.architecture": "eagle3", "eagle3.target_layers": np.array([2, own, spec.layers - 3], np.int32)}
    fields["eagle3.attention.layer_norm_rms_epsilon"] = np.float32(1e-6)
    queries, keys, hidden = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden
    matrices = {
        "fc": (TAPS * hidden, hidden), "blk.0.attn_q": (2 * hidden, queries), "blk.0.attn_k": (2 * hidden, keys),
        "blk.0.attn_v": (2 * hidden, keys), "blk.0.attn_output": (queries, hidden),
        "blk.0.ffn_gate": (hidden, spec.ffn), "blk.0.ffn_up": (hidden, spec.ffn),
        "blk.0.ffn_down": (spec.ffn, hidden), "output": (hidden, ROWS_OF_HEAD),
    }  # fmt: skip
    norms = ("blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm", "output_norm")
    planned = [Planned(f"{name}.weight", shape, kind.upper()) for name, shape in matrices.items()]
    planned += [Planned(f"{name}.weight", (hidden,), "F32") for name in norms]
    return write(path, fields, planned)


def least_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return 1e3 * min(times)


def measure(folder: Path, name: str, kind: str, args: Any) -> list[float]:
    cpu = engine_named("cpu")
    model = model_file(folder / "model.gguf", name, kind)
    head = head_file(folder / "head.gguf", model, kind)
    spec, own = read_spec(model), read_eagle(head)
    assert own.features is not None
    config = EngineConfig(args.rows + 64, 64, "f16", args.threads, drafts=3)
    found = []

    def step(engine: Any, count: int) -> Callable[[], None]:
        tokens = np.arange(count, dtype=np.int32)

        def run() -> None:
            engine.verify_top(tokens, 1)
            engine.kv.truncate(args.rows)

        return run

    for taps in ((), own.features.layers):
        engine: Any = cpu.load(model, spec, replace(config, taps=taps))
        engine.forward(RANDOM.integers(0, spec.vocab, args.rows).astype(np.int32))
        found += [least_ms(step(engine, count), args.rounds) for count in ((1, 2, 4) if taps else (1,))]
        engine.close()
    plain = plain_file(head)
    drafter: Any = cpu.load(plain, own, EngineConfig(args.rows + 64, 64, "f16", args.threads))
    for at in range(0, args.rows, 64):
        count = min(64, args.rows - at)
        drafter.give(RANDOM.standard_normal((count, own.features.size), np.float32), np.ones((count, own.hidden)))
        drafter.forward(np.zeros(count, np.int32))
    for size in (own.features.size, own.hidden):
        states = RANDOM.standard_normal((1, size), np.float32)

        def draft(states: AnyArray = states) -> None:
            drafter.give(states, np.ones((1, own.hidden), np.float32))
            drafter.forward_top(np.zeros(1, np.int32), 1)
            drafter.kv.truncate(args.rows)

        found.append(least_ms(draft, args.rounds))
    drafter.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3:1.7b")
    parser.add_argument("--types", default="q4_0,q8_0")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    headings = ["type", "step", "step, states kept", "2 tokens", "4 tokens", "first draft", "further drafts"]
    lines: list[list[Any]] = []
    for kind in args.types.split(","):
        with tempfile.TemporaryDirectory() as folder:
            lines.append([kind, *measure(Path(folder), args.model, kind, args)])
    if args.json:
        print(json.dumps({"machine": machine(), "cpu_ms": [dict(zip(headings, line, strict=True)) for line in lines]}))
        return
    say(f"{machine()}\n")
    print(table(headings, [[line[0], *(f"{each:.1f}" for each in line[1:])] for line in lines]))


if __name__ == "__main__":
    main()
