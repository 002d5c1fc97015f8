"""What can be shown of NPUs without one: context binaries that the vendor's compiler makes, answers of its emulator.

Contexts: seconds and bytes for each device, of chunk and step together, which share their weights, and apart. Answers:
greedy tokens of the emulated NPU and of the CPU, behind a prompt that is longer than the cache, so that rows are
evicted; each operator of the graphs must run on the NPU. The emulator takes some 20 s for a token of SmolLM2: a quarter
of an hour in all. Nothing here is a speed of an NPU.

    python benchmarks/npu.py smollm2-135m --rows 64 --steps 24
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import Any

import numpy as np
import onnx
from machine import machine, say

from edge.backends.base import EngineConfig
from edge.backends.onnx.engine import OnnxEngine
from edge.backends.onnx.graph.static import make_static_graph, parts_of
from edge.backends.onnx.graph.weights import write_weights
from edge.backends.onnx.model_files import ModelFiles, find_model_files
from edge.backends.onnx.npu.contexts import compile_contexts
from edge.backends.onnx.npu.form import make_form
from edge.backends.onnx.providers import find_provider
from edge.backends.onnx.session import open_session
from edge.cli.show import table
from edge.devices.output import work_folder
from edge.devices.profiles import find_profile
from edge.formats.onnx_folder import WEIGHTS
from edge.kv import KVView, make_policy
from edge.model.model import Model, open_model
from edge.model.tensors import find_recipe
from edge.types import IntArray


def contexts(model: Model, device: str, rows: int, chunk: int) -> dict[str, Any]:
    """Of one device: seconds and bytes of the context with both graphs; bytes of those with one."""
    npu, form = find_profile(device).npu, make_form(model.spec, rows, chunk, "f16")
    provider, layout = find_provider("qnn").compiling_for(npu), find_model_files(model.file, model.spec).layout
    with work_folder() as folder:
        files = ModelFiles(layout, folder, WEIGHTS, "")
        write_weights(model.file, layout, folder / WEIGHTS)
        made = compile_contexts(model.spec, files, form, provider)
        alone = []
        for tokens in (chunk, 1):
            graph = folder / f"{tokens}.onnx"
            graph.write_bytes(static_graph(model, files, rows, chunk, tokens))
            entries = {"enable": "1", "embed_mode": "0", "file_path": str(folder / f"alone.{tokens}.onnx")}
            open_session(graph, None, provider, 1, entries={f"ep.context_{key}": said for key, said in entries.items()})
            alone.append((folder / f"alone.{tokens}_qnn.bin").stat().st_size)
    return {
        "device": device, "chip": str(npu), "seconds": made.seconds, "bytes": made.sizes[0], "chunk_alone": alone[0],
        "step_alone": alone[1], "weights": layout.nbytes, "compiler": made.compiler,
    }  # fmt: skip


def static_graph(model: Model, files: ModelFiles, rows: int, chunk: int, tokens: int) -> bytes:
    form = make_form(model.spec, rows, chunk, "f16")
    (part,) = parts_of(model.spec, form, tokens)
    return make_static_graph(files.layout, model.spec, find_recipe(model.spec), form, part, files.data)


def operators(model: Model, rows: int, chunk: int) -> dict[str, int]:
    """How often each occurs in the graph of a step. All run on the NPU, or the graph would not be compiled."""
    graph = static_graph(model, find_model_files(model.file, model.spec), rows, chunk, 1)
    return dict(Counter(node.op_type for node in onnx.load_from_string(graph).graph.node).most_common())


def answer(model: Model, provider: str, prompt: IntArray, rows: int, chunk: int, steps: int) -> dict[str, Any]:
    """Greedy tokens behind a prompt, in a cache that evicts the older half behind its sinks when it is full."""
    engine = OnnxEngine(model.file, model.spec, EngineConfig(rows, chunk, "f16", 2, provider=provider))
    policy, tokens, logits, evictions = make_policy("streaming", 4), list[int](), [], 0

    def run(part: IntArray) -> None:
        nonlocal evictions
        if engine.kv.free < part.size:
            engine.kv.keep(policy.rows_to_keep(KVView(engine.kv.length), rows // 2), close_gaps=True)
            evictions += 1
        logits.append(engine.forward(part).copy())

    started = time.perf_counter()
    for start in range(0, prompt.size, chunk):
        run(prompt[start : start + chunk])
    prefill = time.perf_counter() - started
    for index in range(steps):
        tokens.append(int(logits[-1].argmax()))
        run(np.array(tokens[-1:], np.int32))
        say(f"{provider}: {index + 1} of {steps} tokens, {time.perf_counter() - started:.0f} s")
    spent = time.perf_counter() - started - prefill
    engine.close()
    return {
        "provider": provider, "tokens": tokens, "evictions": evictions, "prefill_s": prefill, "step_s": spent / steps,
        "logits": np.array(logits),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--devices", nargs="*", default=["snapdragon-x-elite", "galaxy-s24", "galaxy-s25"])
    parser.add_argument("--compiled-rows", type=int, default=512, help="KV rows of the contexts")
    parser.add_argument("--rows", type=int, default=64, help="KV rows of the emulated run")
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    model = open_model(chosen.model)
    found = []
    for device in chosen.devices:
        found.append(contexts(model, device, chosen.compiled_rows, chosen.chunk))
        say(f"{device}: compiled")
    prompt = np.random.default_rng(1).integers(3, model.spec.vocab, chosen.rows + chosen.chunk // 2).astype(np.int32)
    emulated, expected = (
        answer(model, provider, prompt, chosen.rows, chosen.chunk, chosen.steps) for provider in ("qnn", "cpu")
    )
    error = float(np.abs(emulated.pop("logits") - (theirs := expected.pop("logits"))).max() / theirs.std())
    said = {
        "machine": machine(), "contexts": found, "operators": operators(model, chosen.rows, chosen.chunk),
        "answers": [emulated, expected], "equal": emulated["tokens"] == expected["tokens"], "error_by_deviation": error,
    }  # fmt: skip
    if chosen.json:
        print(json.dumps(said, indent=1))
        return
    rows = [
        [each["device"], each["chip"], *(f"{each[key] / 1e6:.1f} MB" for key in ("chunk_alone", "step_alone", "bytes")),
         f"{each['seconds']:.0f} s"]
        for each in found
    ]  # fmt: skip
    print(table(["device", "NPU", "chunk alone", "step alone", "both, weights shared", "compiling both"], rows, left=2))
    print(f"\noperators of a step, all on the NPU: {', '.join(f'{n} {op}' for op, n in said['operators'].items())}")
    same = "the same tokens" if said["equal"] else "other tokens"
    print(
        f"{chosen.steps} greedy tokens behind {prompt.size}, in {chosen.rows} rows with {emulated['evictions']} "
        f"evictions: {same} as on the CPU, logits within {error:.3f} standard deviations"
    )
    print(f"emulated, which says nothing of an NPU: {emulated['step_s']:.1f} s a token")
    print(f"\n{said['machine']}")


if __name__ == "__main__":
    main()
