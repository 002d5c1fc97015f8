"""Formats of a model's weights in ONNX: size, quality and speed of each, against the same weights as floats.

    python benchmarks/onnx_methods.py [--methods w8a8,smoothquant] [--tokens 20000] [--rounds 7]

The model is SmolLM2's twin (benchmarks/twin.py) in F16, or --model. Bits per weight: of the matrices of all layers.
Perplexity (ratio) and KL against the float model, in windows of 512 tokens of held-out texts; `smoothquant` and
`llm-int8` are calibrated on 16,384 tokens of others. Speeds, interleaved, medians: decode of 32 tokens into an
empty cache, prefill of 512. `q4_0` and `q8_0` are plain rounding, for comparison.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
from machine import files_folder, machine, say
from text import CALIBRATION, HELD_OUT, long_text
from twin import write_twin

import edge
from edge.backends import find_backend
from edge.backends.base import Engine, EngineConfig
from edge.cli.terminal.show import table
from edge.converters.calibrate import calibration_tokens
from edge.converters.convert import Conversion, convert
from edge.converters.gguf.quantize import Settings
from edge.converters.onnx.methods import METHODS
from edge.devices.host import logical_cores
from edge.lab.quality.windows import Windows, divergence

ROUNDED = {"q4_0": "Q4_0", "q8_0": "Q8_0"}
FLOAT, STEPS, PREFILL = "float", 32, 512


def make_folder(model: Path, name: str, folder: Path) -> Path:
    """The model in ONNX, made anew."""
    say(f"converting to {name} ...")
    settings = Settings(type=ROUNDED[name], method="rtn", embedding="F16", output="F16") if name in ROUNDED else None
    wanted = Conversion("onnx", settings=settings, onnx_method=name if name in METHODS else None)
    texts = [long_text(each) for each in CALIBRATION] if wanted.calibrated else []
    tokens = (lambda tokenizer: calibration_tokens(tokenizer, texts, 16384)) if texts else None
    convert(model, folder, wanted, tokens=tokens, force=True)
    return folder


def bits_per_weight(folder: Path) -> float:
    """Bits per weight of the data file, without embedding, head and vectors."""
    model = edge.open_model(folder)
    outside = [info for name, info in model.file.tensors.items() if not name.startswith("blk.") and len(info.shape) > 1]
    inside = model.spec.parameters - sum(info.elements for info in outside)
    size = (folder / "model.onnx.data").stat().st_size - sum(info.nbytes for info in outside)
    return 8 * size / inside


def open_engine(folder: Path, threads: int) -> Engine:
    model = edge.open_model(folder)
    config = EngineConfig(1024, 256, "f32", threads=threads, logits_rows=128)
    return find_backend("onnx", model.file, model.spec).load(model.file, model.spec, config)


def seconds(engine: Engine, tokens: list[int], prompt: int) -> float:
    """Seconds of a prompt into an empty cache, or of one step per token."""
    ids = np.array(tokens, np.int32)
    engine.kv.truncate(0)
    started = time.perf_counter()
    for part in [ids[:prompt]] if prompt else np.split(ids, ids.size):
        engine.forward(part)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", default=",".join([*ROUNDED, *METHODS]))
    parser.add_argument("--model", type=Path, help="a GGUF file of floats")
    parser.add_argument("--threads", type=int, default=logical_cores())
    parser.add_argument("--tokens", type=int, default=20_000, help="held-out ones, of all texts together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cache", type=Path, default=files_folder())
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    model = options.model or options.cache / "twin-f16.gguf"
    if not model.exists():
        write_twin(edge.open_model("smollm2-135m"), model)
    names = [FLOAT, *options.methods.split(",")]
    folders = {name: make_folder(model, name, options.cache / f"onnx-{name}") for name in names}
    tokenizer = edge.open_model(model).tokenizer
    tokens = calibration_tokens(tokenizer, [long_text(each) for each in HELD_OUT["anarchism"]], options.tokens)
    speeds: dict[tuple[str, int], list[float]] = {}
    lines = []
    with ExitStack() as stack:
        loaded = {name: stack.enter_context(closing(open_engine(folders[name], options.threads))) for name in names}
        for number in range(options.rounds + 1):
            say(f"round {number} ...")
            for prompt in (0, PREFILL):
                for name, engine in loaded.items():
                    part = tokens[: prompt or STEPS].tolist()
                    speed = len(part) / seconds(engine, part, prompt)
                    if number:  # the first warms up
                        speeds.setdefault((name, prompt), []).append(speed)
        for name, engine in loaded.items():
            figures = [f"{statistics.median(speeds[name, prompt]):,.0f}" for prompt in (0, PREFILL)]
            quality = ["1", "0", "1"]
            if name != FLOAT:
                say(f"comparing {name} ...")
                found = divergence(loaded[FLOAT], engine, Windows(tokens))
                quality = [f"{found.ratio:.4f} ± {found.ratio_stderr:.4f}", f"{found.kl_mean:.4f}", f"{found.top1:.3f}"]
            lines.append([name, f"{bits_per_weight(folders[name]):.2f}", *quality, *figures])
    print(f"\n## Methods in ONNX, {options.threads} threads, {tokens.size:,} tokens\n")
    print(", ".join(f"{key} {value}" for key, value in machine().items()) + ".\n")
    print(table(["method", "bits/weight", "perplexity", "KL", "top-1", "decode tok/s", f"prefill {PREFILL}"], lines))


if __name__ == "__main__":
    main()
