"""The cost of a token that Gemma 4's assistants draft, in their real shapes with random weights: nothing about gains.

    python benchmarks/drafters.py [--rows 128,1024,4096] [--rounds 30]

CPU milliseconds of all threads, the least of the rounds: of the projection before the layers (NumPy), of the layers
over rows of a model (f16, 2 threads), and of the head by 32 of 2,048 centroids or whole (NumPy). Divide their sum by
the model's time for a token. The machine should be quiet.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine, say

from edge.backends import engine_named
from edge.backends.base import EngineConfig
from edge.backends.reference.assistant import Assistant
from edge.cli.terminal.show import table
from edge.formats.gguf import GGUFFile, read_gguf
from edge.formats.gguf_writer import Field, Planned, write_gguf
from edge.model.drafters.assistant import ORDERING, layers_of, read_assistant
from edge.model.reader import read_spec
from edge.model.structure.mtp import ASSISTANT
from edge.model.tensors import find_network
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


def target_file(path: Path, width: int, kv_heads: int) -> GGUFFile:
    """A model of two layers, one with a window, with rows of the real shape, and little else."""
    numbers = {
        "embedding_length": width, "block_count": 2, "attention.head_count": 8, "context_length": 131_072,
        "attention.head_count_kv": kv_heads, "attention.key_length": 512, "attention.value_length": 512,
        "attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.dimension_count": 512,
        "rope.dimension_count_swa": 256, "attention.sliding_window": WINDOW, "feed_forward_length": 32,
        "embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0,
    }  # fmt: skip
    header: dict[str, Field] = {f"gemma4.{name}": np.uint32(value) for name, value in numbers.items()}
    header["general.architecture"] = "gemma4"
    header["gemma4.attention.sliding_window_pattern"] = np.array([True, False])
    planned = [Planned("token_embd.weight", (width, 256), "F16"), Planned("output_norm.weight", (width,), "F32")]
    for layer, size in enumerate((256, 512)):
        vectors = dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), width)
        vectors |= {"attn_q_norm": size, "attn_k_norm": size, "layer_output_scale": 1}
        planned += [Planned(f"blk.{layer}.{name}.weight", (rows,), "F32") for name, rows in vectors.items()]
        for name, columns, rows in (
            ("attn_q", width, 8 * size), ("attn_k", width, kv_heads * size), ("attn_v", width, kv_heads * size),
            ("attn_output", 8 * size, width), ("ffn_gate", width, 32), ("ffn_up", width, 32), ("ffn_down", 32, width),
        ):  # fmt: skip
            planned.append(Planned(f"blk.{layer}.{name}.weight", (columns, rows), "F16"))
    random = np.random.default_rng(2)
    write_gguf(path, header, planned, (drawn(each, random) for each in planned))
    return read_gguf(path)


def least_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return 1e3 * min(times)


def measure(path: Path, width: int, kv_heads: int, counts: list[int], rounds: int, *, centroids: bool) -> list[float]:
    """Milliseconds of the head, of what is before the layers, then of the layers for each number of rows."""
    random = np.random.default_rng(1)
    planned = list(tensors(width, centroids=centroids))
    write_gguf(path, fields(width, kv_heads), planned, (drawn(each, random) for each in planned))
    file = read_gguf(path)
    spec = read_assistant(file)
    assistant = Assistant(file, spec, layers=False)
    embedding, state = random.standard_normal((2, width), dtype=np.float32)
    found = [least_ms(lambda: assistant.logits_of(state[:HIDDEN]), rounds)]
    found.append(least_ms(lambda: assistant.start(embedding, state), rounds))
    if counts:
        target, cpu, x = target_file(path.with_suffix(".model"), width, kv_heads), engine_named("cpu"), state[:HIDDEN]
        model = read_spec(target)
        engine: Any = cpu.load(target, model, EngineConfig(max(counts) + 64, 256, "f16", threads=2))
        config = EngineConfig(1, 1, "f16", threads=2)
        layers = engine.open_assistant(*layers_of(file, spec, find_network(model)), config)
        for count in counts:
            engine.forward(random.integers(0, 256, count - engine.kv.length).astype(np.int32))
            found.append(least_ms(lambda: layers.run(x), rounds))
        layers.close()
        engine.close()
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
            head, start, *layers = measure(path, width, kv_heads, counts, args.rounds, centroids=True)
            whole = measure(path, width, kv_heads, [], max(3, args.rounds // 5), centroids=False)[0]
            lines += [[name, rows, start, each, head, whole] for rows, each in zip(counts, layers, strict=True)]
    headings = ["assistant of", "rows", "projection", "layers", "head", "head without centroids"]
    if args.json:
        print(json.dumps({"machine": machine(), "ms": [dict(zip(headings, line, strict=True)) for line in lines]}))
        return
    say(f"{machine()}\n")
    shown = [[f"{each:.2f}" if isinstance(each, float) else str(each) for each in line] for line in lines]
    print(table(headings, shown))


if __name__ == "__main__":
    main()
