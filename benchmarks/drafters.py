"""The cost of a token that Gemma 4's assistants draft, in their real shapes with random weights: nothing about gains.

    python benchmarks/drafters.py [--rows 128,1024,4096] [--rounds 30]

Milliseconds, the least of the rounds: of the copy of the model's rows (once a draft, f16), of the layers, and of the
head by 32 of 2,048 centroids or whole. Divide their sum by the model's time for a token. The machine should be quiet.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from machine import machine, say

from edge.backends.base import SharedRows
from edge.backends.reference.assistant import Assistant
from edge.backends.tvm.kv.memory import ArenaSize
from edge.backends.tvm.kv.rows import HostRows
from edge.cli.terminal.show import table
from edge.formats.gguf import read_gguf
from edge.formats.gguf_writer import Field, Planned, write_gguf
from edge.model.assistant import ORDERING, read_assistant
from edge.model.cores import Attention
from edge.model.mtp import ASSISTANT
from edge.types import AnyArray

HIDDEN, FFN, VOCAB, HEADS, WINDOW, CENTROIDS = 256, 2048, 262_144, 4, 512, 2048
MODELS = {"E2B": (1536, 1), "E4B": (2560, 2)}  # width, KV heads


def fields(width: int, kv_heads: int) -> dict[str, Field]:
    numbers = {
        "embedding_length": HIDDEN, "block_count": 4, "attention.head_count": HEADS, "context_length": 131_072,
        "attention.head_count_kv": kv_heads, "attention.key_length": 512, "attention.value_length": 512,
        "attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.dimension_count": 512,
        "rope.dimension_count_swa": 256, "attention.sliding_window": WINDOW, "feed_forward_length": FFN,
        "embedding_length_out": width, "nextn_predict_layers": 4,
    }  # fmt: skip
    found: dict[str, Field] = {f"{ASSISTANT}.{name}": np.uint32(value) for name, value in numbers.items()}
    found["general.architecture"] = ASSISTANT
    found[f"{ASSISTANT}.attention.sliding_window_pattern"] = np.array([True] * 3 + [False])
    return found


def tensors(width: int, *, centroids: bool) -> Iterator[Planned]:
    yield Planned("token_embd.weight", (HIDDEN, VOCAB), "F16")
    yield Planned("output_norm.weight", (HIDDEN,), "F32")
    yield Planned("nextn.pre_projection.weight", (2 * width, HIDDEN), "F16")
    yield Planned("nextn.post_projection.weight", (HIDDEN, width), "F16")
    if centroids:
        yield Planned("masked_embd_centroids.weight", (HIDDEN, CENTROIDS), "F16")
        yield Planned(ORDERING, (VOCAB,), "I32")
    for layer in range(4):
        size = 512 if layer == 3 else 256
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            yield Planned(f"blk.{layer}.{name}.weight", (HIDDEN,), "F32")
        yield Planned(f"blk.{layer}.attn_q_norm.weight", (size,), "F32")
        yield Planned(f"blk.{layer}.layer_output_scale.weight", (1,), "F32")
        for name, columns, rows in (
            ("attn_q", HIDDEN, HEADS * size), ("attn_output", HEADS * size, HIDDEN), ("ffn_gate", HIDDEN, FFN),
            ("ffn_up", HIDDEN, FFN), ("ffn_down", FFN, HIDDEN),
        ):  # fmt: skip
            yield Planned(f"blk.{layer}.{name}.weight", (columns, rows), "F16")


def drawn(plan: Planned, random: np.random.Generator) -> AnyArray:
    if plan.type == "I32":
        return random.permutation(VOCAB).astype(np.int32)
    values = random.standard_normal(int(np.prod(plan.shape)), dtype=np.float32) / np.float32(16)
    return values.astype(np.float16) if plan.type == "F16" else np.ones(plan.shape[0], np.float32)


def copier(count: int, size: int) -> Callable[[], object]:
    """Copies a head's rows out of a cache of the native engine."""
    arena = ArenaSize("", Attention(HEADS, 1, size, 1.0), -(-count // 16) * 16, 0)
    arrays = {name: np.zeros(each.shape, each.dtype) for name, each in arena.stored("f16").items()}
    rows = HostRows(arena, arrays, "f16", np.zeros((1, size), np.float32), lambda *_: None)
    return lambda: rows.read(0, count, 0)


def least_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def measure(path: Path, width: int, kv_heads: int, counts: list[int], rounds: int, *, centroids: bool) -> list[float]:
    """Milliseconds of the head, then of copy and layers for each number of rows."""
    random = np.random.default_rng(1)
    planned = list(tensors(width, centroids=centroids))
    write_gguf(path, fields(width, kv_heads), planned, (drawn(each, random) for each in planned))
    file = read_gguf(path)
    assistant = Assistant(file, read_assistant(file))
    embedding, state = random.standard_normal((2, width), dtype=np.float32)
    found = [least_ms(lambda: assistant.logits_of(state[:HIDDEN]), rounds)]
    for count in counts:
        shapes = {True: (kv_heads, min(count, WINDOW - 1), 256), False: (kv_heads, count, 512)}
        rows = {
            window: SharedRows(
                *map(list, random.standard_normal((2, *shape), dtype=np.float32)), count, np.arange(shape[2])
            )
            for window, shape in shapes.items()
        }
        copies = sum(kv_heads * least_ms(copier(*shape[1:]), rounds) for shape in shapes.values())
        found += [copies, least_ms(lambda rows=rows: assistant.normed(embedding, state, rows), rounds)]
    assistant.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="128,1024,4096")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    counts = [int(each) for each in args.rows.split(",")]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (width, kv_heads) in MODELS.items():
            path = Path(folder) / "assistant.gguf"
            head, *others = measure(path, width, kv_heads, counts, args.rounds, centroids=True)
            whole = measure(path, width, kv_heads, [], max(3, args.rounds // 5), centroids=False)[0]
            pairs = zip(counts, others[::2], others[1::2], strict=True)
            lines += [[name, rows, copy, layers, head, whole] for rows, copy, layers in pairs]
    headings = ["assistant of", "rows", "copy a draft", "layers", "head", "head without centroids"]
    if args.json:
        print(json.dumps({"machine": machine(), "ms": [dict(zip(headings, line, strict=True)) for line in lines]}))
        return
    say(f"{machine()}\n")
    shown = [[f"{each:.2f}" if isinstance(each, float) else str(each) for each in line] for line in lines]
    print(table(headings, shown))


if __name__ == "__main__":
    main()
