"""What can be shown of NPUs without one: context binaries that the vendor's compiler makes, answers of its emulator.

Contexts: seconds and bytes for each device, of chunk and step together, which share their weights, and apart. Answers:
the CPU's greedy tokens behind a prompt that is longer than the cache, so that rows are evicted, and what the emulated
NPU finds likeliest behind each of them; each operator of the graphs must run on the NPU. The emulator takes some 20 s
for a token of SmolLM2: a quarter of an hour in all. Nothing here is a speed of an NPU.

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
from edge.backends.calibration_text import TEXT
from edge.backends.onnx.engine import OnnxEngine
from edge.backends.onnx.graph.static import make_static_graph, parts_of
from edge.backends.onnx.graph.weights import write_weights
from edge.backends.onnx.model_files import ModelFiles, find_model_files
from edge.backends.onnx.npu.contexts import compile_contexts
from edge.backends.onnx.npu.form import make_form
from edge.backends.onnx.providers import find_provider
from edge.backends.onnx.session import open_session
from edge.cli.terminal.show import table
from edge.devices.output import work_folder
from edge.devices.profiles import find_profile
from edge.formats.onnx_folder import WEIGHTS
from edge.kv import KVView, make_policy
from edge.model.model import Model, open_model
from edge.model.tensors import find_network
from edge.model.tokens.tokenizer import Tokenizer
from edge.types import FloatArray, IntArray


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
    return make_static_graph(files.layout, model.spec, find_network(model.spec), form, part, files.data)


def operators(model: Model, rows: int, chunk: int) -> dict[str, int]:
    """How often each occurs in the graph of a step. All run on the NPU, or the graph would not be compiled."""
    graph = static_graph(model, find_model_files(model.file, model.spec), rows, chunk, 1)
    return dict(Counter(node.op_type for node in onnx.load_from_string(graph).graph.node).most_common())


def answer(
    model: Model, provider: str, prompt: IntArray, rows: int, chunk: int, steps: int, forced: IntArray | None = None
) -> dict[str, Any]:
    """Logits behind a prompt and behind greedy tokens, or those of `forced`, float32 [steps + 1, vocabulary].

    The cache evicts the older half behind its sinks when it is full.
    """
    engine = OnnxEngine(model.file, model.spec, EngineConfig(rows, chunk, "f16", 2, provider=provider))
    policy, logits, evictions = make_policy("streaming", 4), list[FloatArray](), 0

    def run(part: IntArray) -> FloatArray:
        nonlocal evictions
        if engine.kv.free < part.size:
            engine.kv.keep(policy.rows_to_keep(KVView(engine.kv.length), rows // 2), close_gaps=True)
            evictions += 1
        return engine.forward(part).copy()

    started = time.perf_counter()
    for start in range(0, prompt.size, chunk):
        last = run(prompt[start : start + chunk])
    prefill = time.perf_counter() - started
    logits.append(last)
    for index in range(steps):
        token = int(logits[-1].argmax()) if forced is None else int(forced[index])
        logits.append(run(np.array([token], np.int32)))
        say(f"{provider}: {index + 1} of {steps} tokens, {time.perf_counter() - started:.0f} s")
    spent = time.perf_counter() - started - prefill
    engine.close()
    return {"provider": provider, "evictions": evictions, "step_s": spent / steps, "logits": np.array(logits)}


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
    prompt = np.asarray(Tokenizer(model.file).encode(TEXT)[: chosen.rows + chosen.chunk // 2], np.int32)
    # The same graphs, with activations in float32: the ordinary ones round them to 8 bits, which the NPU does not.
    expected = answer(model, "cpu-static", prompt, chosen.rows, chosen.chunk, chosen.steps)
    theirs = expected.pop("logits")
    forced = theirs.argmax(axis=1)
    emulated = answer(model, "qnn", prompt, chosen.rows, chosen.chunk, chosen.steps, forced)
    ours = emulated.pop("logits")
    best = np.sort(theirs, axis=1)
    said = {
        "machine": machine(), "contexts": found, "operators": operators(model, chosen.rows, chosen.chunk),
        "answers": [emulated, expected], "same": int((ours.argmax(axis=1) == forced).sum()), "of": len(forced),
        "parted": [float(best[i, -1] - best[i, -2]) for i in np.flatnonzero(ours.argmax(axis=1) != forced)],
        "error": float(np.abs(ours - theirs).max()), "deviation": float(theirs.std()),
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
    print(
        f"behind {prompt.size} tokens of a text and {chosen.steps} greedy ones, in {chosen.rows} rows with "
        f"{emulated['evictions']} evictions: at {said['same']} of {said['of']} places the likeliest is the CPU's; "
        f"logits differ by {said['error']:.2f} at most (their standard deviation is {said['deviation']:.2f})"
    )
    for margin in said["parted"]:
        print(f"where it is another, the CPU's best two logits differ by {margin:.3f}")
    print(f"emulated, which says nothing of an NPU: {emulated['step_s']:.1f} s a token")
    print(f"\n{said['machine']}")


if __name__ == "__main__":
    main()
